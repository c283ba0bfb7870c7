"""What a clean-up did, or would do."""

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict

from qinglan.text import count, markdown_cell, size

Kind = Literal["run", "checkpoint", "superseded", "dataset", "mlflow_run", "flow_run", "log"]
_WORDS: dict[Kind, tuple[str, str]] = {
    "run": ("run", "runs"),
    "checkpoint": ("checkpoint", "checkpoints"),
    "superseded": ("superseded stage", "superseded stages"),
    "dataset": ("dataset version", "dataset versions"),
    "mlflow_run": ("MLflow run", "MLflow runs"),
    "flow_run": ("flow run", "flow runs"),
    "log": ("log", "logs"),
}
_SHOWN = 50


class Removed(BaseModel):
    """One thing that went."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    name: str
    why: str
    bytes: int = 0
    """Of the disk; 0 where a database keeps it, or a hard link elsewhere."""

    @property
    def line(self) -> str:
        """For the terminal."""
        return f"{_WORDS[self.kind][0]} {self.name}{f' ({size(self.bytes)})' if self.bytes else ''}: {self.why}"


class Kept(BaseModel):
    """Something that stays, and why."""

    model_config = ConfigDict(frozen=True)

    kind: Kind
    name: str
    why: str

    @property
    def line(self) -> str:
        """For the terminal."""
        return f"{_WORDS[self.kind][0]} {self.name}: {self.why}"


class Cleaned(BaseModel):
    """A clean-up of one profile."""

    model_config = ConfigDict(frozen=True)

    profile: str
    dry_run: bool
    removed: tuple[Removed, ...] = ()
    kept: tuple[Kept, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be read or removed."""

    @property
    def counts(self) -> dict[Kind, int]:
        """How many of each kind went."""
        return dict(Counter(each.kind for each in self.removed))

    @property
    def freed_bytes(self) -> int:
        """Of the disk."""
        return sum(each.bytes for each in self.removed)

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        did = "would remove" if self.dry_run else "removed"
        parts = [f"{count(n)} {_WORDS[kind][n != 1]}" for kind, n in self.counts.items()]
        if not parts:
            return f"{self.profile}: nothing to remove"
        return f"{self.profile}: {did} {', '.join(parts)}; {size(self.freed_bytes)}"

    @property
    def markdown(self) -> str:
        """For Prefect's UI."""
        lines = ["## Clean-up", "", f"{self.sentence}.", *(f"\n{markdown_cell(note)}" for note in self.notes)]
        lines += _table("Removed", [(each.kind, each.name, each.why, size(each.bytes)) for each in self.removed])
        lines += _table("Kept", [(each.kind, each.name, each.why, "") for each in self.kept])
        return "\n".join(lines) + "\n"


def _table(head: str, rows: list[tuple[Kind, str, str, str]]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"| {head} | | Why | Bytes |", "| --- | --- | --- | ---: |"]
    lines += [
        f"| {_WORDS[kind][0]} | {markdown_cell(name)} | {markdown_cell(why)} | {space} |"
        for kind, name, why, space in rows[:_SHOWN]
    ]
    return lines + ([f"\n… and {count(len(rows) - _SHOWN)} more"] if len(rows) > _SHOWN else [])
