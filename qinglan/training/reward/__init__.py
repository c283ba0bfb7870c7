"""Scores samples for verl: its reward function, and the run's reward service that answers it."""
