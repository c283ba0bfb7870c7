"""The index of a dataset version: a short entry per row, sorted by id, so that two versions compare as two streams."""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel

from qinglan.rows import Row, Split
from qinglan.runs.artifacts import Artifact, hash_of

ChangeKind = Literal["added", "removed", "changed"]
_DIGITS = 12


class IndexEntry(NamedTuple):
    id: str
    split: Split | None
    reason: str | None
    """Why it failed; None while it is ok."""
    content: str
    """Hash of the question as it was written, with its context, inputs, pool and gold document."""
    answer: str
    """Hash of the answer that SFT would learn; empty where there is none."""

    @classmethod
    def of(cls, row: Row) -> "IndexEntry":
        content = hash_of(row.query, row.profile, row.history, row.gold_id, row.inputs, row.pool)[:_DIGITS]
        reason = None if row.status == "ok" else row.reason or "unknown"
        return cls(row.id, row.split, reason, content, hash_of(row.target)[:_DIGITS] if row.target else "")

    @property
    def teaches(self) -> bool:
        """Is it an SFT training row?"""
        return self.reason is None and self.split == "train" and bool(self.answer)


class RowChange(BaseModel, frozen=True):
    row_id: str
    kind: ChangeKind
    what: tuple[str, ...] = ()
    """Of a changed row: `answer`, `question`, `split train → test`, `ok → below_threshold`."""


class VersionDiff(BaseModel, frozen=True):
    """Version `b` against `a`."""

    a: str
    b: str
    added: int
    removed: int
    changed: int
    unchanged: int
    what: dict[str, int]
    """Changed rows by what changed; one row may count more than once."""
    examples: list[RowChange]
    """The first of each kind, by row id."""


class IndexBuilder:
    """Takes rows one at a time: about 200 bytes each, until they are sorted."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, row: Row) -> None:
        self._lines.append(json.dumps(IndexEntry.of(row), ensure_ascii=False))

    def write(self, path: Path) -> Artifact:
        """The entries sorted by id, a JSON array a line."""
        self._lines.sort()  # ids are hex digits, all as long: the lines' order is theirs
        with path.open("w", encoding="utf-8") as stream:
            stream.writelines(f"{line}\n" for line in self._lines)
        return Artifact.of(path, len(self._lines))


def read_index(path: Path) -> Iterator[IndexEntry]:
    """Entries in the order of their ids."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            yield IndexEntry(*json.loads(line))


def compare(a: tuple[str, Path], b: tuple[str, Path], examples: int = 5) -> VersionDiff:
    """Rows added, removed and changed from version `a` to `b`, each given as id and index."""
    kinds: Counter[str] = Counter()
    what: Counter[str] = Counter()
    shown: dict[str, list[RowChange]] = {"added": [], "removed": [], "changed": []}
    for old, new in pairs(a[1], b[1]):
        change = _change(old, new)
        if change is None:
            kinds["unchanged"] += 1
            continue
        kinds[change.kind] += 1
        what.update(change.what)
        if len(shown[change.kind]) < examples:
            shown[change.kind].append(change)
    counts = {kind: kinds[kind] for kind in ("added", "removed", "changed", "unchanged")}
    changes = [change for changes in shown.values() for change in changes]
    return VersionDiff(a=a[0], b=b[0], what=dict(what.most_common()), examples=changes, **counts)


def new_training_rows(a: Path | None, b: Path) -> int:
    """SFT training rows of `b` that `a` lacks, or has with another answer; all of them where there is no `a`."""
    if a is None:
        return sum(entry.teaches for entry in read_index(b))
    return sum(
        new is not None and new.teaches and not (old is not None and old.teaches and old.answer == new.answer)
        for old, new in pairs(a, b)
    )


def pairs(a: Path, b: Path) -> Iterator[tuple[IndexEntry | None, IndexEntry | None]]:
    """Every row id of two indexes once, with its entry in each."""
    merged: Iterable[tuple[IndexEntry, int]] = heapq.merge(
        ((entry, 0) for entry in read_index(a)), ((entry, 1) for entry in read_index(b)), key=lambda item: item[0].id
    )
    for _, group in groupby(merged, key=lambda item: item[0].id):
        sides: list[IndexEntry | None] = [None, None]
        for entry, side in group:
            sides[side] = entry
        yield sides[0], sides[1]


def _change(old: IndexEntry | None, new: IndexEntry | None) -> RowChange | None:
    if old is None or new is None:
        present = old or new
        assert present is not None, "an id comes from one of the two"
        return RowChange(row_id=present.id, kind="removed" if new is None else "added")
    what = []
    if old.content != new.content:
        what.append("question")
    if old.answer != new.answer:
        what.append("answer")
    if old.split != new.split:
        what.append(f"split {old.split or 'none'} → {new.split or 'none'}")
    if old.reason != new.reason:
        what.append(f"{old.reason or 'ok'} → {new.reason or 'ok'}")
    return RowChange(row_id=old.id, kind="changed", what=tuple(what)) if what else None
