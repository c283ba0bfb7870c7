"""Data: sources, rows, datasets, immutable versions and review by people."""
