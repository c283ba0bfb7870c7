"""What a text is worth: what it retrieves, what a judge says of it, and how it meets rules.

A recipe has a grader (`RetrievalGrader` or `RuleGrader`). Validation, the reward in RL, evaluation
and the red team all call its `grade`; nothing else asks RAG and judge about a text.
"""
