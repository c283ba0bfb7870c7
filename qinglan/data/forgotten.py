"""Tombstones: rows and questions that `qinglan forget` removed, and that nothing may write again.

`forgotten.jsonl` in the state folder holds keyed digests and no text, so that it can be kept for
ever. A backup's tombstones and the present ones may have different keys, so each line has its own.
"""

import hmac
import secrets
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from qinglan.rows import Row, normalise
from qinglan.runs.artifacts import hash_of, written_whole
from qinglan.runs.schema_version import read_lines, record_line

FORGOTTEN_FILE = "forgotten.jsonl"


class Tombstone(BaseModel, frozen=True, extra="forbid"):
    """A row by its id, or a question by its normalised text, whoever asks it."""

    kind: Literal["row", "question"]
    key: str
    digest: str
    at: str


class Tombstones(BaseModel, frozen=True):
    lines: tuple[Tombstone, ...] = ()

    @classmethod
    def read(cls, state: Path) -> "Tombstones":
        """Those of a site; ArtifactError where a line is damaged, as none may be skipped."""
        return cls(
            lines=read_lines(
                Tombstone, state / FORGOTTEN_FILE, "tombstone", "restore the file from a backup"
            )
        )

    def write(self, state: Path) -> None:
        with (
            written_whole(state / FORGOTTEN_FILE) as partial,
            partial.open("w", encoding="utf-8") as stream,
        ):
            stream.writelines(map(record_line, self.lines))

    def __or__(self, other: "Tombstones") -> "Tombstones":
        return Tombstones(lines=tuple(dict.fromkeys((*self.lines, *other.lines))))

    def adding(self, rows: Iterable[str] = (), questions: Iterable[str] = ()) -> "Tombstones":
        """With these row ids and questions too."""
        key = self.lines[0].key if self.lines else secrets.token_hex(16)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        new = [("row", row) for row in rows if not self.has_row(row)]
        new += [
            ("question", text)
            for each in questions
            if (text := normalise(each)) and not self.has_question(each)
        ]
        lines = [
            Tombstone(kind=k, key=key, digest=_digest(k, v, key), at=at)
            for k, v in dict.fromkeys(new)
        ]
        return Tombstones(lines=(*self.lines, *lines))

    def has_row(self, row_id: str) -> bool:
        return self._has("row", row_id)

    def has_question(self, text: str) -> bool:
        return bool(known := normalise(text)) and self._has("question", known)

    def cover(self, row: Row) -> bool:
        return bool(self.lines) and (self.has_row(row.id) or self.has_question(row.query))

    @property
    def digest(self) -> str:
        return hash_of(sorted(self._digests))

    def _has(self, kind: str, value: str) -> bool:
        return any(_digest(kind, value, key) in self._digests for key in self._keys)

    @cached_property
    def _keys(self) -> Collection[str]:
        return {line.key for line in self.lines}

    @cached_property
    def _digests(self) -> Collection[str]:
        return {line.digest for line in self.lines}


NONE = Tombstones()


def _digest(kind: str, value: str, key: str) -> str:
    return hmac.digest(bytes.fromhex(key), f"{kind}\x1f{value}".encode(), "sha256").hex()
