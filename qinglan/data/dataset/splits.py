"""Assigns every row to train, dev or test, without leaks between them.

Near-duplicates (same question in other words or punctuation) stay in one split. A row keeps the
split that the workbook gives it, else the one that an earlier dataset version gave it; for others a
hash of their group decides, not their position. So the test set stays the same from run to run,
also when groups merge.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qinglan.config import Dataset
from qinglan.data.dataset.duplicates import Questions, near_duplicate_groups
from qinglan.rows import Row, Split, hash_fraction

_SPLITS: tuple[Split, ...] = ("train", "dev", "test")
"""From the least strict to the strictest."""
_STRENGTH: dict[Split | None, int] = {None: 0, "train": 1, "dev": 2, "test": 3}
_EVALUATION = 4
"""Stands for an evaluation workbook, in the place of a split's strength."""
LEAK = "near_duplicate_of_"


def is_leak(reason: str | None) -> bool:
    """Did the row fail because it repeats a question of a stricter split, or of an evaluation?"""
    return (reason or "").startswith(LEAK)


class Placement(NamedTuple):
    """The split of every row that was a question, in their order.

    It takes a few bytes a row, where the rows themselves have thousands.
    """

    splits: NDArray[np.uint8]
    """Strengths of the splits."""
    repeats: NDArray[np.uint8]
    """Strength of the split that the row must not repeat and repeats, or `_EVALUATION`; 0 for
    none."""
    groups: Mapping[int, str]
    """Smallest id among near-duplicates by place, for rows that have some."""

    def apply(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows that were placed, in the same order, with their splits; leaks are failed."""
        strengths = self.splits.tolist()
        repeated_strengths = self.repeats.tolist()
        place = 0
        for row in rows:
            if not row.was_question:
                yield row
                continue
            split = row.split or _SPLITS[strengths[place] - 1]
            placed = row.with_split(split).with_group(self.groups.get(place))
            repeated = repeated_strengths[place]
            if repeated == _EVALUATION:
                placed = placed.failed(f"{LEAK}evaluation")
            elif repeated:
                placed = placed.failed(f"{LEAK}{_SPLITS[repeated - 1]}")
            yield placed
            place += 1


def place_rows(
    rows: Iterable[Row],
    config: Dataset,
    pinned: Mapping[str, Split] | None = None,
    evaluation: Iterable[Row] = (),
    directory: Path | None = None,
) -> Placement:
    """Give every row that was a question a split; no group of near-duplicates straddles two.

    A row that resembles one of a stricter split (test before dev before train) is failed as
    ``near_duplicate_of_test`` or ``near_duplicate_of_dev``, whatever it failed for before. A row
    without a split joins its group's, or the whole group is placed by a seeded hash of its smallest
    id. A row of train or dev whose group repeats a question of `evaluation` is failed as
    ``near_duplicate_of_evaluation``; one of test may stay, since nothing learns from it.

    Args:
        pinned: splits of row ids in earlier dataset versions; they count like the workbook's where
            it has none.
        evaluation: questions that are kept for evaluation elsewhere.
        directory: for the temporary file of the questions' texts.
    """
    pinned = pinned or {}
    ids: list[str] = []
    strengths = bytearray()
    with Questions(directory) as questions:
        for row in rows:
            if row.was_question:
                questions.add(row)
                ids.append(row.id)
                strengths.append(_STRENGTH[row.split or pinned.get(row.id)])
        for row in evaluation:
            questions.add_evaluation(row)
        groups, is_evaluated = near_duplicate_groups(questions, config.near_duplicate_jaccard)

    own = np.array(strengths, dtype=np.uint8)
    strictest_by_group = np.zeros(len(ids), dtype=np.uint8)
    np.maximum.at(strictest_by_group, groups, own)
    strictest = strictest_by_group[groups]
    # A row keeps its own split, even where the group has a stricter one: then it fails as a leak.
    splits = np.where(own > 0, own, strictest)
    group_names = _names_of_groups(ids, groups)
    for place in np.flatnonzero(splits == 0).tolist():
        group = group_names.get(place, ids[place])
        splits[place] = _STRENGTH[split_of(group, config)]

    repeats = np.where(strictest > splits, strictest, np.uint8(0))
    is_learnt = splits < _STRENGTH["test"]
    repeats[(repeats == 0) & is_evaluated & is_learnt] = _EVALUATION
    return Placement(splits, repeats, group_names)


def with_groups(questions: Sequence[Row], config: Dataset) -> list[Row]:
    """The rows with the groups that a dataset of them would have.

    It is for figures over rows that are in no dataset.
    """
    groups = place_rows(questions, config).groups
    return [row.with_group(groups.get(place)) for place, row in enumerate(questions)]


def _names_of_groups(ids: list[str], groups: NDArray[np.intp]) -> dict[int, str]:
    """The smallest id of a row's group by the row's place, for groups of several rows."""
    group_sizes = np.bincount(groups, minlength=1)
    places = np.flatnonzero(group_sizes[groups] > 1).tolist()
    names: dict[int, str] = {}
    for place in places:
        group = int(groups[place])
        names[group] = min(ids[place], names.get(group, ids[place]))
    return {place: names[int(groups[place])] for place in places}


def split_of(group: str, config: Dataset) -> Split:
    """The split of a group that has none yet, by its smallest row id."""
    place = hash_fraction(f"{config.seed}:{group}")
    if place < config.train_share:
        return "train"
    if place < config.train_share + config.dev_share:
        return "dev"
    return "test"
