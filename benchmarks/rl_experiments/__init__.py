"""The experiments on the embedded task: their settings, their results as JSON, and the tables."""
