"""Qinglan: from a workbook of questions to a small model that beats its teacher."""

__version__ = "0.1.0"
