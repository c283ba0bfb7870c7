"""Chooses the rows to review: those where the signals disagree, and some at random.

Each stratum has its share of the sample; what a stratum cannot fill goes to the others. The control
rows are drawn from all rows that SFT would learn, so that their error rate is that of the dataset.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from qinglan.config import Select
from qinglan.data.dataset.splits import is_leak
from qinglan.data.strata import CONTROL, REWRITE_STRATA, RULE_REASONS, Stratum
from qinglan.rows import BottomK, Row, hash_fraction


class SampledRow(NamedTuple):
    """A row to review, and why it was drawn."""

    row: Row
    strata: tuple[Stratum, ...]
    """All that hold for it; `CONTROL` only where it is one of the control rows."""


class ReviewSample(NamedTuple):
    """The rows to review in a random order, so that the first half of them is a sample too."""

    rows: Sequence[SampledRow]
    strata: Sequence[Stratum]
    population: dict[str, int]
    """Number of rows that each stratum had to draw from, by its name."""

    @property
    def drawn(self) -> Counter[str]:
        """Number of rows in the sample of each stratum, by its name."""
        return Counter(stratum.name for sampled in self.rows for stratum in sampled.strata)


def draw_sample(
    rows: Iterable[Row], config: Select, size: int, strata: Sequence[Stratum] = REWRITE_STRATA
) -> ReviewSample:
    """Draw at most `size` rows of a stream, each once.

    No more than `size` rows per stratum are in memory.
    """
    candidates: dict[str, BottomK[Row]] = {
        stratum.name: BottomK(size, stratum.name) for stratum in strata
    }
    population = dict.fromkeys(candidates, 0)
    for row in rows:
        if not _is_reviewable(row):
            continue
        for stratum in strata:
            if stratum.holds(row, config):
                population[stratum.name] += 1
                candidates[stratum.name].add(row.id, row)

    ranked = {name: sample.items() for name, sample in candidates.items()}
    chosen, control_ids = _allot(ranked, size, strata)
    sampled_rows: list[SampledRow] = []
    for row in chosen.values():
        row_strata: list[Stratum] = []
        for stratum in strata:
            # The error rate is counted over the control rows, so no row that another stratum
            # brought in may be among them.
            is_control = stratum is CONTROL
            holds = row.id in control_ids if is_control else stratum.holds(row, config)
            if holds:
                row_strata.append(stratum)
        sampled_rows.append(SampledRow(row, tuple(row_strata)))
    sampled_rows.sort(key=lambda sampled: hash_fraction(f"order:{sampled.row.id}"))
    return ReviewSample(sampled_rows, strata, population)


def _is_reviewable(row: Row) -> bool:
    """Tell whether a verdict could change the row."""
    if not row.was_question or is_leak(row.reason):
        return False
    return bool(row.answer) or row.reason in RULE_REASONS


def _allot(
    ranked: dict[str, list[Row]], size: int, strata: Sequence[Stratum]
) -> tuple[dict[str, Row], set[str]]:
    """The chosen rows by id, and the ids of the control rows among them."""
    quotas = {stratum.name: int(stratum.share * size) for stratum in strata}
    # What rounding leaves goes to the control rows, whose error rate is reported.
    quotas[CONTROL.name] += size - sum(quotas.values())

    # First each stratum has its share, then all have turns until the sample is full.
    turns: list[str] = []
    for name, quota in quotas.items():
        turns += [name] * quota
    turns += [*quotas] * size

    chosen: dict[str, Row] = {}
    control_ids: set[str] = set()
    queues = {name: iter(rows) for name, rows in ranked.items()}
    for name in turns:
        if len(chosen) == size:
            break
        for row in queues[name]:
            # A row that is in the sample already is a control row too, but takes no place.
            if name == CONTROL.name:
                control_ids.add(row.id)
            if row.id not in chosen:
                chosen[row.id] = row
                break
    return chosen, control_ids
