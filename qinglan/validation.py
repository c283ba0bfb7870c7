"""Validate: retrieve with the original question and with the rewrite, and judge the rewrite once, before RL.

`summary` gives the stage's figures: `success_rate` (answered and something recalled), mean top-1 score, and gold
top-1 where rows are labelled.
"""

import asyncio
from collections.abc import Iterable

from qinglan.batches import Work
from qinglan.clients import Clients
from qinglan.config import Tenant
from qinglan.errors import StageError
from qinglan.recipes import Recipe
from qinglan.rows import Row, normalise

_TELLING_ROWS = 20


def validator(recipe: Recipe, clients: Clients, tenant: Tenant, *, judge: bool) -> Work:
    """The work on one row: two retrievals, and the judge's score if asked for."""

    async def validate(row: Row) -> Row:
        assert row.rewrite is not None
        question = recipe.user_text(row.query, row.profile, row.history)
        original, rewritten = await asyncio.gather(
            clients.rag.retrieve(row.query), clients.rag.retrieve(row.query, row.rewrite)
        )
        score = None
        if judge:
            messages = recipe.judge_messages(question, row.rewrite, tenant)
            score = (await clients.judge.ask(messages, recipe.parse_judge)).value
        return row.model_copy(
            update={"original_retrieved": original, "rewrite_retrieved": rewritten, "judge_score": score}
        )

    return validate


def summary(rows: Iterable[Row]) -> dict[str, float]:
    """Figures over the rows that were retrieved for."""
    seen = [row for row in rows if row.original_retrieved and row.rewrite_retrieved]
    if not seen:
        return {}
    recalled = [r.rewrite_retrieved for r in seen if r.rewrite_retrieved]
    figures = {
        "success_rate": _mean(bool(r.scores) for r in recalled),
        "recall_count_mean": _mean(len(r.scores) for r in recalled),
        "top1_score_mean": _mean(r.top1_score for r in recalled),
        "original_top1_score_mean": _mean(r.original_retrieved.top1_score for r in seen if r.original_retrieved),
    }
    labelled = [row for row in seen if row.gold_id]
    if labelled:
        figures["gold_top1"] = _mean(r.rewrite_retrieved.rank(r.gold_id) == 1 for r in labelled if r.rewrite_retrieved)
        figures["original_gold_top1"] = _mean(
            r.original_retrieved.rank(r.gold_id) == 1 for r in labelled if r.original_retrieved
        )
    return figures


def check_service(rows: Iterable[Row]) -> None:
    """Notice a RAG that answers well-formed nonsense.

    Raises:
        StageError: it ignores `rewritten_query`, or gives no ids though rows name a gold document.
    """
    seen = [row for row in rows if row.original_retrieved and row.rewrite_retrieved and row.rewrite_retrieved.scores]
    if seen and any(row.gold_id for row in seen) and not any(_ids(row) for row in seen):
        raise StageError(
            "validation: rows name a gold document, but no passage of the RAG has an `id`, so none could ever be "
            "found; let the service send ids, or leave the gold column empty"
        )
    changed = [row for row in seen if row.rewrite and normalise(row.rewrite) != normalise(row.query)]
    if len(changed) >= _TELLING_ROWS and all(row.rewrite_retrieved == row.original_retrieved for row in changed):
        raise StageError(
            f"validation: the RAG gave the same passages with and without `rewritten_query` on all {len(changed)} "
            "rows; it seems to ignore the rewrite (docs/contracts.md)"
        )


def _ids(row: Row) -> bool:
    return any(i is not None for r in (row.original_retrieved, row.rewrite_retrieved) if r for i in r.ids)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else float("nan")
