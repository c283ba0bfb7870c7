"""What validation found, counted row by row in memory that does not grow with the rows."""

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from qinglan.errors import StageError
from qinglan.recipes.kinds.elements import JUDGE
from qinglan.rows import Row, normalise
from qinglan.statistics import Histogram, quantile
from qinglan.text import shown

if TYPE_CHECKING:
    from qinglan.recipes.kinds.answer import AnswerRecipe

_MIN_ROWS = 20
"""Fewer rows say nothing about a service or about rules."""
_ALIKE_SHARE = 0.98
"""From this share of equal results on, the service seems to ignore the rewrite."""
_TIE = 1e-6
_SCORE_NOISE = 1e-3
"""Two answers with the same passages are the same within this: GPUs in batches do not repeat a
score to the bit."""
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


class RetrievalStatistics:
    """Of a retrieval recipe: figures, what is wrong with the service, distributions.

    Counted are rows for which question and rewrite were both retrieved with. The gain is the
    difference in top-1 score, rewrite minus original; nothing recalled counts as 0.
    """

    LOGGED = ("success_rate", "top1_score_mean", "gain_mean", "gold_top1", "original_gold_top1")
    """The most important figures; all where empty."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._of_rows, self._of_labelled = (
            defaultdict[str, float](float),
            defaultdict[str, float](float),
        )
        self._gain_squares = 0.0
        self._gold_id: str | None = None  # one that a row names, and one that the service sent
        self._found_id: str | None = None
        self._originals, self._rewrites = Histogram(0, 1, 100), Histogram(0, 1, 100)
        # An odd number of bins, so that no change lies in the middle of one.
        self._gains = Histogram(-1.05, 1.05, 105)

    def add(self, row: Row) -> None:
        original, found = row.original_retrieved, row.answer_retrieved
        if original is None or found is None:
            return
        gain = found.top1_score - original.top1_score
        self._originals.add(original.top1_score)
        self._rewrites.add(found.top1_score)
        self._gains.add(gain)
        measured = {
            "success_rate": bool(found.scores),
            "recall_count_mean": len(found.scores),
            "top1_score_mean": found.top1_score,
            "original_top1_score_mean": original.top1_score,
            "gain_mean": gain,
            "better_share": gain > _TIE,
            "equal_share": abs(gain) <= _TIE,
            "worse_share": gain < -_TIE,
        }
        for name, value in measured.items():
            self._of_rows[name] += value
        self._gain_squares += gain * gain
        counted = {"rows": 1}
        if row.gold_id:
            rank, original_rank = found.rank(row.gold_id), original.rank(row.gold_id)
            self._of_labelled["gold_top1"] += rank == 1
            self._of_labelled["original_gold_top1"] += original_rank == 1
            counted |= {
                "labelled": 1,
                "gold_sought": bool(found.scores),
                "gold_found": bool(rank or original_rank),
            }
        if found.scores:
            self._gold_id = self._gold_id or row.gold_id
            self._found_id = self._found_id or next(
                (i for i in (*found.ids, *original.ids) if i is not None), None
            )
            if row.answer and normalise(row.answer) != normalise(row.query):
                passages = [(each.ids, each.titles, len(each.scores)) for each in (original, found)]
                alike = passages[0] == passages[1] and all(
                    abs(a - b) <= _SCORE_NOISE
                    for a, b in zip(original.scores, found.scores, strict=True)
                )
                counted |= {"changed": 1, "alike": alike}
        self._counts.update(counted)

    def metrics(self) -> dict[str, float]:
        """Shares, means and quantiles by name; nothing where no row was retrieved for.

        `gain_mean` comes with its standard error over rows, `gain_se`: twice that on either side is
        the 95% interval, too narrow where many rows ask about the same thing. Quantiles are good to
        0.01.
        """
        rows, labelled = self._counts["rows"], self._counts["labelled"]
        if not rows:
            return {}
        figures = {name: total / rows for name, total in self._of_rows.items()}
        if rows > 1:
            variance = max(0.0, self._gain_squares / rows - figures["gain_mean"] ** 2)
            figures["gain_se"] = math.sqrt(variance / (rows - 1))
        figures |= _quantiles("top1_score", self._rewrites) | _quantiles(
            "original_top1_score", self._originals
        )
        return figures | {name: total / labelled for name, total in self._of_labelled.items()}

    def check(self) -> None:
        """Raise StageError if the RAG ignores `rewritten_query`, or sends no ids or none that rows
        name as gold."""
        if self._gold_id is not None and self._found_id is None:
            raise StageError(
                "validation: rows name a gold document, but no passage of the RAG has an `id`, so none could ever be "
                "found; let the service send ids, or leave the gold column empty"
            )
        if (sought := self._counts["gold_sought"]) >= _MIN_ROWS and not self._counts["gold_found"]:
            raise StageError(
                f"validation: {sought:,.0f} rows name a gold document, and the RAG found none at any rank; "
                f"they name {shown(self._gold_id or '')}, it sends {shown(self._found_id or '')}; write the RAG's ids "
                "into the gold column, or leave it empty"
            )
        changed, alike = self._counts["changed"], self._counts["alike"]
        if changed >= _MIN_ROWS and alike >= _ALIKE_SHARE * changed:
            raise StageError(
                f"validation: the RAG gave the same passages with and without `rewritten_query` on {alike:,.0f} of "
                f"{changed:,.0f} rows; it seems to ignore the rewrite (docs/how-to/rag.md)"
            )

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        """What the report draws, as JSON: by plot, its distributions with `label`, `low`, `high`,
        `counts`."""
        top1 = [
            _distribution("original question", self._originals),
            _distribution("rewrite", self._rewrites),
        ]
        return {"top1_score": top1, "gain": [_distribution("rewrite − original", self._gains)]}


class AnswerStatistics:
    """Of an answer recipe: the parts' means, the share of answers that must not teach, the judge's
    mean score.

    Counted are rows that were graded; a part's mean is of the rows that have it.
    """

    LOGGED: tuple[str, ...] = ()

    def __init__(self, recipe: "AnswerRecipe") -> None:
        self._recipe = recipe
        self._rows = 0
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._flaws: Counter[str] = Counter()
        self._scores = Histogram(0, 5, 50)

    def add(self, row: Row) -> None:
        if row.parts is None:
            return
        self._rows += 1
        if flaw := self._recipe.flaw(row):
            self._flaws[flaw] += 1
        judged = {} if row.judge_score is None else {JUDGE: row.judge_score}
        for name, value in (row.parts | judged).items():
            self._sums[name] += value
            self._counts[name] += 1
        for score in judged.values():
            self._scores.add(score)

    def metrics(self) -> dict[str, float]:
        """`<part>_mean`, `flawed_share` and `judge_mean`; nothing where no row was graded."""
        if not self._rows:
            return {}
        names = [name for name in (*self._recipe.rule_parts, JUDGE) if self._counts[name]]
        means = {f"{name}_mean": self._sums[name] / self._counts[name] for name in names}
        return means | {"flawed_share": self._flaws.total() / self._rows}

    def check(self) -> None:
        """Raise StageError if every answer has a flaw, so that there is nothing to learn."""
        if self._rows >= _MIN_ROWS and self._flaws.total() == self._rows:
            flaws = ", ".join(f"{flaw} {count:,}" for flaw, count in self._flaws.most_common())
            raise StageError(
                f"validation: all {self._rows:,} of the teacher's answers have a flaw ({flaws}), so none may teach; "
                "read some in rows.jsonl, then correct the teacher's prompt or the recipe's rules"
            )

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        return (
            {"judge_score": [_distribution("teacher", self._scores)]} if self._counts[JUDGE] else {}
        )


def _quantiles(name: str, histogram: Histogram) -> dict[str, float]:
    found = {
        key: quantile(histogram.low, histogram.high, histogram.counts, share)
        for key, share in _QUANTILES.items()
    }
    return {f"{name}_{key}": value for key, value in found.items() if value is not None}


def _distribution(label: str, histogram: Histogram) -> dict[str, Any]:
    return {
        "label": label,
        "low": histogram.low,
        "high": histogram.high,
        "counts": list(histogram.counts),
    }
