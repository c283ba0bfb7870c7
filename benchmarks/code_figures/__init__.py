"""Figures of the code: how plainly it reads, its size and shape, and how soon commands start."""
