"""Simulated teachers, judges, RAG and a tiny base model, with sample data, for a machine without
API key and GPU."""
