"""The report of a run: its data, sentences, tables, figures and page."""
