"""Counts of what validation found, row by row, in memory that does not grow with the rows."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from qinglan.errors import StageError
from qinglan.grading.metrics import JUDGE
from qinglan.rows import Retrieved, Row, normalise
from qinglan.statistics import Histogram, quantile
from qinglan.text import shown

# Fewer rows say nothing about a service or about rules.
_MIN_ROWS = 20
# From this share of equal results on, the service seems to ignore the rewrite.
_ALIKE_SHARE = 0.98
_TIE = 1e-6
# Two answers with the same passages are the same within this: GPUs in batches do not repeat a
# score to the bit.
_SCORE_NOISE = 1e-3
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class ValidationStatistics(Protocol):
    """Counts what validation finds."""

    LOGGED: ClassVar[tuple[str, ...]]
    """Names of the most important figures; all figures where empty."""

    def add(self, row: Row) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Figures by name; none where no row was graded."""

    def check(self) -> None:
        """Raise StageError where what was found can't be right."""

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        """The distributions that the report draws, by plot, with `label`, `low`, `high` and
        `counts`."""


class RetrievalStatistics:
    """Figures and distributions of rewrites, and what is wrong with the retrieval service.

    Rows count for which question and rewrite were both retrieved with. The gain is the difference
    in top-1 score, rewrite minus original; nothing recalled counts as 0.
    """

    LOGGED: ClassVar[tuple[str, ...]] = (
        "success_rate",
        "top1_score_mean",
        "gain_mean",
        "gold_top1",
        "original_gold_top1",
    )

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, float] = defaultdict(float)
        self._labelled_sums: dict[str, float] = defaultdict(float)
        self._sum_of_squared_gains = 0.0
        # A gold id that a row names, and an id that the service sent, for the message of check().
        self._gold_id: str | None = None
        self._retrieved_id: str | None = None
        self._original_scores = Histogram(0, 1, 100)
        self._rewrite_scores = Histogram(0, 1, 100)
        # An odd number of bins, so that no change lies in the middle of one.
        self._gains = Histogram(-1.05, 1.05, 105)

    def add(self, row: Row) -> None:
        original = row.original_retrieved
        rewrite = row.answer_retrieved
        if original is None or rewrite is None:
            return
        self._counts["rows"] += 1
        self._add_scores(original, rewrite)
        if row.gold_id:
            self._add_ranks(row.gold_id, original, rewrite)
        if rewrite.scores:
            self._gold_id = self._gold_id or row.gold_id
            self._retrieved_id = self._retrieved_id or _first_id(rewrite, original)
            if row.answer and normalise(row.answer) != normalise(row.query):
                self._counts["changed"] += 1
                self._counts["alike"] += _are_alike(original, rewrite)

    def metrics(self) -> dict[str, float]:
        """Shares, means and quantiles by name; nothing where no row was retrieved for.

        `gain_mean` comes with its standard error over rows, `gain_se`: twice that on either side is
        the 95% interval, too narrow where many rows ask about the same thing. Quantiles are good to
        0.01.
        """
        rows = self._counts["rows"]
        if not rows:
            return {}
        figures = {name: total / rows for name, total in self._sums.items()}
        if rows > 1:
            mean_square = self._sum_of_squared_gains / rows
            variance = max(0.0, mean_square - figures["gain_mean"] ** 2)
            figures["gain_se"] = math.sqrt(variance / (rows - 1))
        figures |= _quantiles("top1_score", self._rewrite_scores)
        figures |= _quantiles("original_top1_score", self._original_scores)
        for name, total in self._labelled_sums.items():
            figures[name] = total / self._counts["labelled"]
        return figures

    def check(self) -> None:
        """Raise StageError where the RAG ignores rewrites or its ids can't be those of labels."""
        if self._gold_id is not None and self._retrieved_id is None:
            raise StageError(
                "validation: rows name a gold document, but no passage of the RAG has an `id`, "
                "so none could ever be found; let the service send ids, or leave the gold column "
                "empty"
            )
        gold_sought = self._counts["gold_sought"]
        if gold_sought >= _MIN_ROWS and not self._counts["gold_found"]:
            raise StageError(
                f"validation: {gold_sought:,} rows name a gold document, and the RAG found none at "
                f"any rank; they name {shown(self._gold_id or '')}, it sends "
                f"{shown(self._retrieved_id or '')}; write the RAG's ids into the gold column, "
                "or leave it empty"
            )
        changed = self._counts["changed"]
        alike = self._counts["alike"]
        if changed >= _MIN_ROWS and alike >= _ALIKE_SHARE * changed:
            raise StageError(
                "validation: the RAG gave the same passages with and without `rewritten_query` on "
                f"{alike:,} of {changed:,} rows; it seems to ignore the rewrite "
                "(docs/how-to/rag.md)"
            )

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        top1_scores = [
            _distribution("original question", self._original_scores),
            _distribution("rewrite", self._rewrite_scores),
        ]
        gains = [_distribution("rewrite − original", self._gains)]
        return {"top1_score": top1_scores, "gain": gains}

    def _add_scores(self, original: Retrieved, rewrite: Retrieved) -> None:
        gain = rewrite.top1_score - original.top1_score
        self._original_scores.add(original.top1_score)
        self._rewrite_scores.add(rewrite.top1_score)
        self._gains.add(gain)
        self._sum_of_squared_gains += gain * gain
        self._sums["success_rate"] += bool(rewrite.scores)
        self._sums["recall_count_mean"] += len(rewrite.scores)
        self._sums["top1_score_mean"] += rewrite.top1_score
        self._sums["original_top1_score_mean"] += original.top1_score
        self._sums["gain_mean"] += gain
        self._sums["better_share"] += gain > _TIE
        self._sums["equal_share"] += abs(gain) <= _TIE
        self._sums["worse_share"] += gain < -_TIE

    def _add_ranks(self, gold_id: str, original: Retrieved, rewrite: Retrieved) -> None:
        rank = rewrite.rank(gold_id)
        original_rank = original.rank(gold_id)
        self._labelled_sums["gold_top1"] += rank == 1
        self._labelled_sums["original_gold_top1"] += original_rank == 1
        self._counts["labelled"] += 1
        self._counts["gold_sought"] += bool(rewrite.scores)
        self._counts["gold_found"] += bool(rank or original_rank)


class RuleStatistics:
    """The parts' means, the share of answers that must not teach, and the judge's mean score.

    Rows count that were graded; a part's mean is over the rows that have it.
    """

    LOGGED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, rule_parts: tuple[str, ...], flaw: Callable[[Row], str | None]) -> None:
        self._rule_parts = rule_parts
        self._flaw = flaw
        self._rows = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._flaws: Counter[str] = Counter()
        self._judge_scores = Histogram(0, 5, 50)

    def add(self, row: Row) -> None:
        if row.parts is None:
            return
        self._rows += 1
        flaw = self._flaw(row)
        if flaw:
            self._flaws[flaw] += 1
        for name, value in row.parts.items():
            self._add_value(name, value)
        if row.judge_score is not None:
            self._add_value(JUDGE, row.judge_score)
            self._judge_scores.add(row.judge_score)

    def metrics(self) -> dict[str, float]:
        """`<part>_mean`, `flawed_share` and `judge_mean`; nothing where no row was graded."""
        if not self._rows:
            return {}
        figures: dict[str, float] = {}
        for name in (*self._rule_parts, JUDGE):
            if self._counts[name]:
                figures[f"{name}_mean"] = self._sums[name] / self._counts[name]
        figures["flawed_share"] = self._flaws.total() / self._rows
        return figures

    def check(self) -> None:
        """Raise StageError where every answer has a flaw, so that there is nothing to learn."""
        if self._rows < _MIN_ROWS or self._flaws.total() < self._rows:
            return
        flaws = ", ".join(f"{flaw} {count:,}" for flaw, count in self._flaws.most_common())
        raise StageError(
            f"validation: all {self._rows:,} of the teacher's answers have a flaw ({flaws}), "
            "so none may teach; read some in rows.jsonl, then correct the teacher's prompt or the "
            "recipe's rules"
        )

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        if not self._counts[JUDGE]:
            return {}
        return {"judge_score": [_distribution("teacher", self._judge_scores)]}

    def _add_value(self, name: str, value: float) -> None:
        self._sums[name] += value
        self._counts[name] += 1


def _first_id(*answers: Retrieved) -> str | None:
    """The first passage id in these answers of the service; None where it sends none."""
    for answer in answers:
        for passage_id in answer.ids:
            if passage_id is not None:
                return passage_id
    return None


def _are_alike(original: Retrieved, rewrite: Retrieved) -> bool:
    """Tell whether two answers have the same passages with the same scores."""
    if original.ids != rewrite.ids or original.titles != rewrite.titles:
        return False
    if len(original.scores) != len(rewrite.scores):
        return False
    score_pairs = zip(original.scores, rewrite.scores, strict=True)
    return all(abs(score - other_score) <= _SCORE_NOISE for score, other_score in score_pairs)


def _quantiles(name: str, histogram: Histogram) -> dict[str, float]:
    quantiles: dict[str, float] = {}
    for suffix, share in _QUANTILES.items():
        value = quantile(histogram.low, histogram.high, histogram.counts, share)
        if value is not None:
            quantiles[f"{name}_{suffix}"] = value
    return quantiles


def _distribution(label: str, histogram: Histogram) -> dict[str, Any]:
    return {
        "label": label,
        "low": histogram.low,
        "high": histogram.high,
        "counts": list(histogram.counts),
    }
