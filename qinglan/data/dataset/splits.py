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
from qinglan.rows import INPUT_REASONS, Row, Split, hash_fraction

_NAMES: tuple[Split | None, ...] = (None, "train", "dev", "test")
_STRENGTH: dict[Split | None, int] = {name: strength for strength, name in enumerate(_NAMES)}
_EVALUATION = len(_NAMES)
LEAK = "near_duplicate_of_"


def was_question(row: Row) -> bool:
    return row.reason not in INPUT_REASONS


def is_leak(reason: str | None) -> bool:
    """Did the row fail because it repeats a question of a stricter split, or of an evaluation
    workbook?"""
    return (reason or "").startswith(LEAK)


class Placement(NamedTuple):
    """The split of every row that was a question, in their order: a few bytes each where rows have
    thousands."""

    splits: NDArray[np.uint8]
    repeats: NDArray[np.uint8]
    """What the row must not repeat and repeats: 0 nothing, else the strength of a split or
    `_EVALUATION`."""
    groups: Mapping[int, str]
    """By place, for near-duplicates alone: the smallest id among them."""

    def apply(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows that were placed, in the same order, each with its split; those that leak are
        failed."""
        places = iter(enumerate(zip(self.splits.tolist(), self.repeats.tolist(), strict=True)))
        for row in rows:
            if not was_question(row):
                yield row
                continue
            place, (strength, repeats) = next(places)
            update = {"split": row.split or _NAMES[strength], "group": self.groups.get(place)}
            placed = row.model_copy(update=update)
            repeated = "evaluation" if repeats == _EVALUATION else _NAMES[repeats]
            yield placed.failed(f"{LEAK}{repeated}") if repeats else placed


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
    pinned, ids, codes = pinned or {}, [], bytearray()
    with Questions(directory) as questions:
        for row in rows:
            if was_question(row):
                questions.add(row)
                ids.append(row.id)
                codes.append(_STRENGTH[row.split or pinned.get(row.id)])
        for row in evaluation:
            questions.add_evaluation(row)
        groups, evaluated = near_duplicate_groups(questions, config.near_duplicate_jaccard)
    given = np.array(codes, dtype=np.uint8)
    strictest = np.zeros(len(ids), dtype=np.uint8)
    np.maximum.at(strictest, groups, given)
    strictest = strictest[groups]
    splits = np.where(given > 0, given, strictest)
    unplaced = np.flatnonzero(splits == 0)
    names = _names_of_groups(ids, groups)
    chosen = (split_of(names.get(place, ids[place]), config) for place in unplaced.tolist())
    splits[unplaced] = np.fromiter(
        (_STRENGTH[split] for split in chosen), dtype=np.uint8, count=len(unplaced)
    )
    repeats = np.where(strictest > splits, strictest, np.uint8(0))
    repeats[(repeats == 0) & evaluated & (splits < _STRENGTH["test"])] = _EVALUATION
    return Placement(splits, repeats, names)


def with_groups(questions: Sequence[Row], config: Dataset) -> list[Row]:
    """The rows with the groups that a dataset of them would have, for figures over rows that are in
    none."""
    groups = place_rows(questions, config).groups
    return [
        row.model_copy(update={"group": groups.get(place)}) for place, row in enumerate(questions)
    ]


def _names_of_groups(ids: list[str], groups: NDArray[np.intp]) -> dict[int, str]:
    """By place, where a group has several rows, the smallest id among them."""
    together = np.flatnonzero(np.bincount(groups, minlength=1)[groups] > 1).tolist()
    names: dict[int, str] = {}
    for place in together:
        group = int(groups[place])
        names[group] = min(ids[place], names.get(group, ids[place]))
    return {place: names[int(groups[place])] for place in together}


def split_of(group: str, config: Dataset) -> Split:
    """Of a group without a split, by its smallest row id."""
    place = hash_fraction(f"{config.seed}:{group}")
    if place < config.train_share:
        return "train"
    return "dev" if place < config.train_share + config.dev_share else "test"
