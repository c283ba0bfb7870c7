"""Clients of the services over HTTP: chat models, the RAG and batch APIs."""
