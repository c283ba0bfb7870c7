"""Grading of texts: by what they retrieve, what a judge says of them, and how they meet rules.

A recipe has a grader (`RetrievalGrader` or `RuleGrader`). Validation, the reward in RL, evaluation
and the red team all call its `grade`. Beside it, only the evaluation's panel asks the judge about
several texts at once, and `judge_agreement` compares two judges.
"""
