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
from qinglan.runs.artifacts import hash_of, write_jsonl
from qinglan.runs.schema_version import dump_record, read_lines

FORGOTTEN_FILE = "forgotten.jsonl"
_Kind = Literal["row", "question"]


class Tombstone(BaseModel, frozen=True, extra="forbid"):
    """A row by its id, or a question by its normalised text, whoever asks it."""

    kind: _Kind
    key: str
    digest: str
    at: str


class Tombstones(BaseModel, frozen=True):
    """All tombstones of a site."""

    lines: tuple[Tombstone, ...] = ()

    @classmethod
    def read(cls, state: Path) -> "Tombstones":
        """The tombstones of a site; ArtifactError where a line is damaged, as none is skipped."""
        hint = "restore the file from a backup"
        return cls(lines=read_lines(Tombstone, state / FORGOTTEN_FILE, "tombstone", hint))

    def write(self, state: Path) -> None:
        write_jsonl(state / FORGOTTEN_FILE, map(dump_record, self.lines))

    def __or__(self, other: "Tombstones") -> "Tombstones":
        return Tombstones(lines=tuple(dict.fromkeys((*self.lines, *other.lines))))

    def adding(self, rows: Iterable[str] = (), questions: Iterable[str] = ()) -> "Tombstones":
        """The tombstones with those of further row ids and questions."""
        key = self.lines[0].key if self.lines else secrets.token_hex(16)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        additions: list[tuple[_Kind, str]] = []
        for row_id in rows:
            if not self.has_row(row_id):
                additions.append(("row", row_id))
        for question in questions:
            text = normalise(question)
            if text and not self.has_question(question):
                additions.append(("question", text))
        lines = list(self.lines)
        for kind, value in dict.fromkeys(additions):
            digest = _digest(kind, value, key)
            lines.append(Tombstone(kind=kind, key=key, digest=digest, at=at))
        return Tombstones(lines=tuple(lines))

    def has_row(self, row_id: str) -> bool:
        return self._has("row", row_id)

    def has_question(self, text: str) -> bool:
        normalised = normalise(text)
        return bool(normalised) and self._has("question", normalised)

    def cover(self, row: Row) -> bool:
        """Tell whether the row or its question was forgotten."""
        # Most sites have forgotten nothing, and need no digest of every row.
        if not self.lines:
            return False
        return self.has_row(row.id) or self.has_question(row.query)

    @property
    def digest(self) -> str:
        """A digest that changes with what is forgotten."""
        return hash_of(sorted(self._digests))

    def _has(self, kind: _Kind, value: str) -> bool:
        # The lines of a restored backup may have other keys than the present ones.
        return any(_digest(kind, value, key) in self._digests for key in self._keys)

    @cached_property
    def _keys(self) -> Collection[str]:
        return {line.key for line in self.lines}

    @cached_property
    def _digests(self) -> Collection[str]:
        return {line.digest for line in self.lines}


NONE = Tombstones()


def _digest(kind: _Kind, value: str, key: str) -> str:
    message = f"{kind}\x1f{value}".encode()
    return hmac.digest(bytes.fromhex(key), message, "sha256").hex()
