"""Recipes whose text is an answer, graded by rules on its row and by a judge."""
