"""Simulators for a machine without API key and GPU.

They are teachers and judges, a RAG, a tiny base model, and the sample data for each recipe.
"""
