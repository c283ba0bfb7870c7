"""Recipes whose text is put to the retrieval service."""
