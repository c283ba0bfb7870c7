"""Metrics of one row, each defined once. None where there is no value: nothing retrieved, no label, not judged.

With one gold document per question recall@k is a share of questions, and the ideal DCG is 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from qinglan.evaluation.arms import ArmRow
from qinglan.rows import Row
from qinglan.statistics import ArmScores

OfRank = Callable[[int], float]


def recall_at(places: int) -> OfRank:
    """Is the gold document among the first `places`? Rank 0 means that it was not recalled."""
    return lambda rank: float(0 < rank <= places)


def mrr10(rank: int) -> float:
    """1 / rank, 0 beyond the tenth place."""
    return 1 / rank if 0 < rank <= 10 else 0.0


def ndcg10(rank: int) -> float:
    """1 / log2(1 + rank), 0 beyond the tenth place."""
    return 1 / math.log2(1 + rank) if 0 < rank <= 10 else 0.0


BY_RANK: dict[str, OfRank] = {
    "top1": recall_at(1),
    "recall3": recall_at(3),
    "recall10": recall_at(10),
    "mrr10": mrr10,
    "ndcg10": ndcg10,
}
"""What follows from the gold document's rank alone."""


def arm_scores(name: str, arm: Sequence[ArmRow], rows: Iterable[Row]) -> ArmScores:
    """Every metric by row id."""
    gold = {row.id: row.gold_id for row in rows}
    ranks = {
        entry.row_id: entry.retrieved.rank(gold[entry.row_id]) if entry.retrieved and gold[entry.row_id] else None
        for entry in arm
    }
    scores: dict[str, dict[str, float | None]] = {
        metric: {row: None if rank is None else value(rank) for row, rank in ranks.items()}
        for metric, value in BY_RANK.items()
    }
    scores["mean_top1_score"] = {e.row_id: e.retrieved.top1_score if e.retrieved else None for e in arm}
    scores["quality"] = {e.row_id: e.judge_score if e.retrieved else None for e in arm}
    return ArmScores(arm=name, scores=scores)


def groups_of(rows: Iterable[Row]) -> dict[str, str]:
    """Rows that ask for the same document are one group; unlabelled ones that are near-duplicates."""
    return {row.id: row.gold_id or row.group or row.id for row in rows}
