"""Evaluate: the same questions through every arm, and paired comparisons between arms.

An arm is a way to get a text: the original question, a teacher, a student model. A row on which an arm failed
has no value there; it is counted and left out of that arm's means and comparisons, never scored 0.
"""

from qinglan.evaluation.comparisons import PAIRS, compare_arms, compared, pairs_of
from qinglan.evaluation.examples import examples, shared_between
from qinglan.evaluation.metrics import arm_scores, groups_of, summarise, values_of
from qinglan.evaluation.models import Evaluation
from qinglan.evaluation.red_team import texts_of, try_cases
from qinglan.evaluation.slices import slices_of
from qinglan.recipes.measuring.arms import (
    original_rows,
    retrieve_all,
    student_rows,
    teacher_rows,
    with_tokens,
)
from qinglan.recipes.measuring.panel import Panel
from qinglan.rows import ArmRow

__all__ = [
    "PAIRS",
    "ArmRow",
    "Evaluation",
    "Panel",
    "arm_scores",
    "compare_arms",
    "compared",
    "examples",
    "groups_of",
    "original_rows",
    "pairs_of",
    "retrieve_all",
    "shared_between",
    "slices_of",
    "student_rows",
    "summarise",
    "teacher_rows",
    "texts_of",
    "try_cases",
    "values_of",
    "with_tokens",
]
