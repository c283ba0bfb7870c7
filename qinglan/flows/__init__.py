"""Flows: in what order the stages run."""
