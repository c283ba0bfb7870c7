"""Validate: retrieve with the original question and with the rewrite, and judge the rewrite once, before RL.

`Findings` gathers the stage's figures row by row, in memory that does not grow with the rows.
"""

import asyncio
import math
from typing import Any

from qinglan.clients.roles import Clients
from qinglan.clients.row_batches import Work
from qinglan.config import Tenant
from qinglan.errors import StageError
from qinglan.recipes.kinds.common import judged, outline
from qinglan.recipes.kinds.retrieval.recipe import RetrievalRecipe
from qinglan.rows import Retrieved, Row, normalise
from qinglan.statistics import Histogram, quantile

_TELLING_ROWS = 20
_TELLING_SHARE = 0.98
_TIE = 1e-6
_SCORE_NOISE = 1e-3
"""Two answers with the same passages are the same within this: GPUs in batches do not repeat a score to the bit."""
_SHOWN_FIGURES = ("success_rate", "top1_score_mean", "gain_mean", "gold_top1", "original_gold_top1")
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def validator(recipe: RetrievalRecipe, clients: Clients, tenant: Tenant, *, judge: bool) -> Work:
    """The work on one row: two retrievals, and the judge's score if asked for."""

    async def validate(row: Row) -> Row:
        assert row.answer is not None
        question = recipe.question_text(row)
        original, rewritten = await asyncio.gather(
            clients.rag.retrieve(row.query), clients.rag.retrieve(row.query, row.answer)
        )
        score = None
        if judge:
            messages = recipe.judge_messages(question, row.answer, tenant)
            score = await judged(clients, messages, recipe)
        return row.model_copy(
            update={"original_retrieved": original, "answer_retrieved": rewritten, "judge_score": score}
        )

    return validate


class Findings:
    """What validation found: figures, what is wrong with the service, distributions. Add every row, in any order.

    Counted are rows for which question and rewrite were both retrieved with. The gain is the difference in top-1
    score, rewrite minus original; nothing recalled counts as 0.
    """

    def __init__(self) -> None:
        self._rows = self._answered = self._passages = 0
        self._original_sum = self._rewrite_sum = self._gain_sum = self._gain_squares = 0.0
        self._better = self._worse = 0
        self._labelled = self._gold_hits = self._original_gold_hits = 0
        self._has_ids = self._expects_ids = False
        self._changed = self._alike = 0
        self._originals, self._rewrites = Histogram(0, 1, 100), Histogram(0, 1, 100)
        # An odd number of bins, so that no change lies in the middle of one.
        self._gains = Histogram(-1.05, 1.05, 105)

    def add(self, row: Row) -> None:
        """Count a row; one that was not retrieved for counts as nothing."""
        original, found = row.original_retrieved, row.answer_retrieved
        if original is None or found is None:
            return
        self._rows += 1
        self._answered += bool(found.scores)
        self._passages += len(found.scores)
        self._add_scores(original.top1_score, found.top1_score)
        if row.gold_id:
            self._labelled += 1
            self._gold_hits += found.rank(row.gold_id) == 1
            self._original_gold_hits += original.rank(row.gold_id) == 1
        if found.scores:
            self._watch_service(row, original, found)

    def metrics(self) -> dict[str, float]:
        """Shares, means and quantiles by name; nothing where no row was retrieved for.

        `gain_mean` comes with its standard error over rows, `gain_se`: twice that on either side is the 95% interval,
        too narrow where many rows ask about the same thing. Quantiles are good to 0.01.
        """
        rows = self._rows
        if not rows:
            return {}
        gain = self._gain_sum / rows
        figures = {
            "success_rate": self._answered / rows,
            "recall_count_mean": self._passages / rows,
            "top1_score_mean": self._rewrite_sum / rows,
            "original_top1_score_mean": self._original_sum / rows,
            "gain_mean": gain,
            "better_share": self._better / rows,
            "equal_share": (rows - self._better - self._worse) / rows,
            "worse_share": self._worse / rows,
        }
        if rows > 1:
            figures["gain_se"] = math.sqrt(max(0.0, self._gain_squares / rows - gain * gain) / (rows - 1))
        figures |= _quantiles("top1_score", self._rewrites) | _quantiles("original_top1_score", self._originals)
        if self._labelled:
            figures["gold_top1"] = self._gold_hits / self._labelled
            figures["original_gold_top1"] = self._original_gold_hits / self._labelled
        return figures

    def shown(self) -> dict[str, float]:
        """Those that are worth a line in the log."""
        return {name: value for name, value in self.metrics().items() if name in _SHOWN_FIGURES}

    def check(self) -> None:
        """Notice a RAG that answers well-formed nonsense.

        Raises:
            StageError: it ignores `rewritten_query`, or gives no ids though rows name a gold document.
        """
        if self._expects_ids and not self._has_ids:
            raise StageError(
                "validation: rows name a gold document, but no passage of the RAG has an `id`, so none could ever be "
                "found; let the service send ids, or leave the gold column empty"
            )
        if self._changed >= _TELLING_ROWS and self._alike >= _TELLING_SHARE * self._changed:
            raise StageError(
                f"validation: the RAG gave the same passages with and without `rewritten_query` on {self._alike:,} of "
                f"{self._changed:,} rows; it seems to ignore the rewrite (docs/rag-service.md)"
            )

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        """What the report draws, as JSON: by plot, its outlines with `label`, `low`, `high`, `counts`."""
        return {
            "top1_score": [_outline("original question", self._originals), _outline("rewrite", self._rewrites)],
            "gain": [_outline("rewrite − original", self._gains)],
        }

    def _add_scores(self, original: float, found: float) -> None:
        gain = found - original
        self._original_sum += original
        self._rewrite_sum += found
        self._gain_sum += gain
        self._gain_squares += gain * gain
        self._better += gain > _TIE
        self._worse += gain < -_TIE
        self._originals.add(original)
        self._rewrites.add(found)
        self._gains.add(gain)

    def _watch_service(self, row: Row, original: Retrieved, found: Retrieved) -> None:
        self._expects_ids |= row.gold_id is not None
        self._has_ids |= any(i is not None for i in (*original.ids, *found.ids))
        if row.answer and normalise(row.answer) != normalise(row.query):
            self._changed += 1
            self._alike += _alike(original, found)


def _alike(one: Retrieved, other: Retrieved) -> bool:
    return (
        (one.ids, one.titles) == (other.ids, other.titles)
        and len(one.scores) == len(other.scores)
        and all(abs(a - b) <= _SCORE_NOISE for a, b in zip(one.scores, other.scores, strict=True))
    )


def _quantiles(name: str, histogram: Histogram) -> dict[str, float]:
    found = {key: quantile(histogram.low, histogram.high, histogram.counts, share) for key, share in _QUANTILES.items()}
    return {f"{name}_{key}": value for key, value in found.items() if value is not None}


def _outline(label: str, histogram: Histogram) -> dict[str, Any]:
    return outline(label, histogram.low, histogram.high, histogram.counts)
