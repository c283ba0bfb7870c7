"""RL prompts of query rewriting: every row with a valid teacher baseline, as there the teacher can be beaten."""

from typing import Any

import pyarrow as pa

from qinglan.config import Tenant
from qinglan.recipes.kinds.common import rl_record, rl_schema
from qinglan.recipes.kinds.retrieval.recipe import RetrievalRecipe
from qinglan.rows import Row

NOT_JUDGED = -1.0
"""`teacher_judge` in the RL files where the judge was not asked: a null would turn the column into NaN on the way."""

RL_REASONS = frozenset({None, "below_threshold", "worse_than_original", "rewrite_too_long", "rewrite_too_short"})
"""A row with one of these has a valid teacher baseline: teacher and RAG both answered. Refusals, boilerplate and
rewrites that a person rejected or corrected are none: the reward's guard takes its anchors from the baseline."""

_TEXT = pa.string()
SCHEMA = rl_schema(
    {
        "row_id": _TEXT,
        "tenant": _TEXT,
        "question": _TEXT,
        "gold_id": _TEXT,
        "teacher_rewrite": _TEXT,
        "teacher_quality": pa.float64(),
        "teacher_top1_score": pa.float64(),
        "teacher_gold_rank": pa.int64(),
        "teacher_judge": pa.float64(),
    }
)


def has_baseline(row: Row) -> bool:
    """Is there a rewrite of the teacher's to beat?"""
    found = row.answer_retrieved
    answered = bool(row.answer) and found is not None and bool(found.scores)
    return answered and row.reason in RL_REASONS and row.review != "correct"


def record(row: Row, recipe: RetrievalRecipe, tenant: Tenant) -> dict[str, Any]:
    """The row's prompt, and the teacher's side of it."""
    found, gold = row.answer_retrieved, row.gold_id or ""
    assert found is not None, "only rows with a baseline get here"
    baseline = {
        "row_id": row.id,
        "tenant": row.tenant,
        "question": recipe.question_text(row),
        "gold_id": gold,
        "teacher_rewrite": row.answer,
        "teacher_quality": found.quality,
        "teacher_top1_score": found.top1_score,
        "teacher_gold_rank": found.rank(row.gold_id),
        "teacher_judge": NOT_JUDGED if row.judge_score is None else row.judge_score,
    }
    return rl_record(recipe, recipe.student_messages(row, tenant), gold, baseline)
