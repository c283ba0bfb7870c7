"""A clean-up as it goes on: what it has removed or would remove, and what it keeps."""

from collections import Counter
from collections.abc import Iterator, Sequence
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
    """The size that the disk gets back; 0 where a database keeps it, or a hard link elsewhere."""

    @property
    def line(self) -> str:
        space = f" ({size(self.bytes)})" if self.bytes else ""
        return f"{self.kind} {self.name}{space}: {self.why}"


@dataclass
class CleanUp:
    """A clean-up by a profile's `retention`, in which ages count to `now`.

    A dry run only says what would go.
    """

    profile: Profile
    dry_run: bool
    say: Say
    now: datetime
    removed: list[RetentionDecision] = field(default_factory=list)
    kept: list[RetentionDecision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """A line for each thing that could not be read or removed."""

    def note_removed(self, kind: Kind, name: str, why: str, freed_bytes: int = 0) -> None:
        decision = RetentionDecision(kind, name, why, freed_bytes)
        self.removed.append(decision)
        self.say(f"{'would remove ' if self.dry_run else ''}{decision.line}")

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
        """The number of removed things of each kind."""
        return dict(Counter(decision.kind for decision in self.removed))

    @property
    def freed_bytes(self) -> int:
        return sum(decision.bytes for decision in self.removed)

    @property
    def sentence(self) -> str:
        """The outcome as one sentence, without a full stop."""
        if not self.counts:
            return f"{self.profile.name}: nothing to remove"
        verb = "would remove" if self.dry_run else "removed"
        parts = []
        for kind, number in self.counts.items():
            plural = "s" if number != 1 else ""
            parts.append(f"{count(number)} {kind}{plural}")
        return f"{self.profile.name}: {verb} {', '.join(parts)}; {size(self.freed_bytes)}"

    @property
    def markdown(self) -> str:
        """The outcome, with the first of what was removed and of what stays as tables."""
        lines = ["## Clean-up", "", f"{self.sentence}."]
        lines += [f"\n{markdown_cell(note)}" for note in self.notes]
        lines += _table_lines("Removed", self.removed, [size(item.bytes) for item in self.removed])
        lines += _table_lines("Kept", self.kept, [""] * len(self.kept))
        return "\n".join(lines) + "\n"


def _table_lines(
    heading: str, decisions: Sequence[RetentionDecision], sizes: Sequence[str]
) -> list[str]:
    """A Markdown table of decisions; nothing where there are none."""
    if not decisions:
        return []
    rows = [
        (decision.kind, markdown_cell(decision.name), markdown_cell(decision.why), space)
        for decision, space in zip(decisions, sizes, strict=True)
    ]
    lines = ["", markdown_table((heading, "", "Why", "Bytes"), rows[:_SHOWN], "   r")]
    if len(rows) > _SHOWN:
        lines.append(f"\n… and {count(len(rows) - _SHOWN)} more")
    return lines
