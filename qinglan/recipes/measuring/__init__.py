"""Evaluation of arms: what each way to get a text is worth, by retrieval, rules and the judge."""
