"""Drift: do questions or their retrieval scores differ from those of the last dataset version?

The distance of two samples of one population is never 0, and large for small ones. So each Jensen–Shannon distance
(base 2: 0 the same, 1 nothing in common) comes with the distance by chance alone, from permuting which rows are the
new ones. `excess` is the distance without that part, and only one that is very unlikely by chance gives a warning.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from qinglan.data.versions.summary import DriftRow, RowSummary, grams, length_bucket, score_bucket
from qinglan.text import count, number

DRAWS = 200
SIGNIFICANT = 0.01
"""Eight distances are tested per version; at 0.05 every third version would give a warning by chance."""
_SCORES = ("original score", "rewrite score")

Categories = Sequence[str]


class Distance(BaseModel, frozen=True):
    """The distance of two samples in one respect."""

    distance: float
    expected: float
    """The average for two samples of these sizes from one population (root mean square)."""
    excess: float
    """√(distance² − expected²), 0 where the distance is less than expected."""
    p_value: float
    """Share of permutations with at least this distance."""


class Unseen(BaseModel, frozen=True):
    """Share of the new rows' items that the parent version lacks."""

    share: float
    expected: float
    """The expected share for one more row of the parent's population (Good–Turing: the share of items seen once)."""


class Shift(BaseModel, frozen=True):
    """Some rows of a version against all rows of its parent."""

    rows: int
    distances: dict[str, Distance] = {}
    """By vocabulary, length, original score and rewrite score; a respect that one side lacks is left out."""
    new_vocabulary: Unseen | None = None
    new_intents: Unseen | None = None
    failed_share: float = 0.0
    parent_failed_share: float = 0.0

    def warnings(self, threshold: float) -> list[str]:
        return [n for n, d in self.distances.items() if d.excess >= threshold and d.p_value <= SIGNIFICANT]


class Drift(BaseModel, frozen=True):
    """A version compared with its parent: its new rows, and all its rows.

    Most of all rows are in the parent too, so that their distances show changes of the knowledge base and the teacher,
    and understate them rather than overstate.
    """

    parent: str
    arrivals: Shift
    whole: Shift
    threshold: float
    warnings: list[str]
    sentence: str


_RESPECTS: dict[str, Callable[[DriftRow], Categories]] = {
    "vocabulary": lambda row: grams(row.query),
    "length": lambda row: [length_bucket(row.query)],
    _SCORES[0]: lambda row: [] if row.original is None else [score_bucket(row.original)],
    _SCORES[1]: lambda row: [] if row.rewrite is None else [score_bucket(row.rewrite)],
}


def drift(
    parent_id: str, parent: RowSummary, arrivals: RowSummary, whole: RowSummary, threshold: float, seed: int = 0
) -> Drift:
    """Compare a version with its parent; `arrivals` is of the rows whose ids the parent lacks."""
    came, now = shift(parent, arrivals, seed), shift(parent, whole, seed)
    warnings = [f"{name} of the new rows" for name in came.warnings(threshold)]
    warnings += [f"{name} of all rows" for name in now.warnings(threshold)]
    return Drift(
        parent=parent_id,
        arrivals=came,
        whole=now,
        threshold=threshold,
        warnings=warnings,
        sentence=_sentence(parent_id, came, now, warnings),
    )


def shift(parent: RowSummary, rows: RowSummary, seed: int = 0, draws: int = DRAWS) -> Shift:
    found = {
        name: distance([respect(row) for row in parent.sample], [respect(row) for row in rows.sample], seed, draws)
        for name, respect in _RESPECTS.items()
    }
    return Shift(
        rows=rows.rows,
        distances={name: value for name, value in found.items() if value},
        new_vocabulary=unseen(parent.vocabulary, rows.vocabulary),
        new_intents=unseen(parent.intents, rows.intents),
        failed_share=rows.failed_share,
        parent_failed_share=parent.failed_share,
    )


def distance(
    old: Sequence[Categories], new: Sequence[Categories], seed: int = 0, draws: int = DRAWS
) -> Distance | None:
    """Jensen–Shannon distance of two samples' categories, with its null from permuting whole rows.

    None where a side has no category at all.
    """
    import numpy as np

    rows = [row for row in (*old, *new) if row]
    split = sum(1 for row in old if row)
    if split in (0, len(rows)):
        return None
    numbers: dict[str, int] = {}
    codes = np.array([numbers.setdefault(category, len(numbers)) for row in rows for category in row])
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    is_new = np.arange(len(rows)) >= split
    observed = _jensen_shannon(codes, is_new[owners])
    random = np.random.default_rng(seed)
    null = np.array([_jensen_shannon(codes, random.permutation(is_new)[owners]) for _ in range(draws)])
    expected = float(np.sqrt(np.mean(null**2)))
    return Distance(
        distance=observed,
        expected=expected,
        excess=math.sqrt(max(0.0, observed**2 - expected**2)),
        p_value=float((1 + np.sum(null >= observed - 1e-12)) / (1 + draws)),
    )


def unseen(old: Mapping[str, int], new: Mapping[str, int]) -> Unseen | None:
    """The share of new items; None where either side is empty."""
    total, total_old = sum(new.values()), sum(old.values())
    if not total or not total_old:
        return None
    share = sum(n for name, n in new.items() if name not in old) / total
    return Unseen(share=share, expected=sum(1 for n in old.values() if n == 1) / total_old)


def _jensen_shannon(codes: Any, is_new: Any) -> float:
    import numpy as np
    from scipy.spatial.distance import jensenshannon  # type: ignore[import-untyped]

    size = int(codes.max()) + 1
    new, old = np.bincount(codes[is_new], minlength=size), np.bincount(codes[~is_new], minlength=size)
    with np.errstate(invalid="ignore"):  # the root of −1e-17, where both are the same
        return float(np.nan_to_num(jensenshannon(old, new, base=2)))


def _sentence(parent_id: str, came: Shift, now: Shift, warnings: Sequence[str]) -> str:
    if not came.rows:
        text = f"No question came in since {parent_id}"
    else:
        text = f"{count(came.rows)} of {count(now.rows)} questions came in since {parent_id}"
        if came.new_intents:
            text += f", {came.new_intents.share:.0%} of their intents new ({came.new_intents.expected:.0%} expected)"
    text += f"; failures {now.parent_failed_share:.1%} → {now.failed_share:.1%}. "
    if not warnings:
        return text + "No drift beyond chance and threshold."
    shifts = {"the new rows": came, "all rows": now}
    details = []
    for warning in warnings:
        name, _, rows = warning.partition(" of ")
        details.append(f"{warning} ({number(shifts[rows].distances[name].excess, 2)} beyond chance)")
    return text + f"Drift: {', '.join(details)}."
