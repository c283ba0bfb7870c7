"""Tasks: one stage each, thin over the core."""
