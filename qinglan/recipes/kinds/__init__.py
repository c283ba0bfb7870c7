"""The two kinds of recipe: texts that are retrieved with, and answers that are graded by themselves."""
