"""A clean-up as it goes on: what it has removed or would remove, and what it keeps."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

from qinglan.config import Profile
from qinglan.errors import QinglanError, first_line
from qinglan.runs.processes import Say
from qinglan.text import count, markdown_cell, markdown_table, size

Kind = Literal[
    "run", "checkpoint", "superseded stage", "dataset version", "MLflow run", "flow run", "log"
]
_SHOWN = 50


class RetentionDecision(NamedTuple):
    """A thing that is removed or stays, and why."""

    kind: Kind
    name: str
    why: str
    bytes: int = 0
    """That the disk gets back; 0 where a database keeps it, or a hard link elsewhere."""

    @property
    def line(self) -> str:
        space = f" ({size(self.bytes)})" if self.bytes else ""
        return f"{self.kind} {self.name}{space}: {self.why}"


@dataclass
class CleanUp:
    """By a profile's `retention`; ages count to `now`. A dry run only says what would go."""

    profile: Profile
    dry_run: bool
    say: Say
    now: datetime
    removed: list[RetentionDecision] = field(default_factory=list)
    kept: list[RetentionDecision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be read or removed."""

    def note_removed(self, kind: Kind, name: str, why: str, freed_bytes: int = 0) -> None:
        self.removed.append(RetentionDecision(kind, name, why, freed_bytes))
        self.say(f"{'would remove ' if self.dry_run else ''}{self.removed[-1].line}")

    def note_kept(self, kind: Kind, name: str, why: str) -> None:
        self.kept.append(RetentionDecision(kind, name, why))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Go on after what can't be done, and say so."""
        try:
            yield
        except (QinglanError, OSError) as error:
            self.notes.append(first_line(error))
            self.say(f"not removed: {self.notes[-1]}")

    def is_past(self, written: datetime, days: float | None) -> bool:
        return days is not None and self.now - written >= timedelta(days=days)

    def age(self, written: datetime) -> str:
        days = (self.now - written).days
        return "1 day" if days == 1 else f"{max(0, days)} days"

    @property
    def counts(self) -> dict[Kind, int]:
        return dict(Counter(each.kind for each in self.removed))

    @property
    def freed_bytes(self) -> int:
        return sum(each.bytes for each in self.removed)

    @property
    def sentence(self) -> str:
        did = "would remove" if self.dry_run else "removed"
        parts = [f"{count(n)} {kind}{'s' if n != 1 else ''}" for kind, n in self.counts.items()]
        if not parts:
            return f"{self.profile.name}: nothing to remove"
        return f"{self.profile.name}: {did} {', '.join(parts)}; {size(self.freed_bytes)}"

    @property
    def markdown(self) -> str:
        lines = [
            "## Clean-up",
            "",
            f"{self.sentence}.",
            *(f"\n{markdown_cell(note)}" for note in self.notes),
        ]
        removed = [(each, size(each.bytes)) for each in self.removed]
        for head, rows in (("Removed", removed), ("Kept", [(each, "") for each in self.kept])):
            cells = [
                (each.kind, markdown_cell(each.name), markdown_cell(each.why), space)
                for each, space in rows
            ]
            lines += (
                ["", markdown_table((head, "", "Why", "Bytes"), cells[:_SHOWN], "   r")]
                if rows
                else []
            )
            if len(rows) > _SHOWN:
                lines.append(f"\n… and {count(len(rows) - _SHOWN)} more")
        return "\n".join(lines) + "\n"
