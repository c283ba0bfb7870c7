"""Evaluate: the same questions through every arm, and paired comparisons between arms.

An arm is a way to get a text: the original question, a teacher, a student model. A row on which an
arm failed has no value there; it is counted and left out of that arm's means and comparisons, never
scored 0.
"""
