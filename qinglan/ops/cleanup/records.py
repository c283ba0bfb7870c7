"""What a clean-up did, or would do."""

from collections import Counter
from typing import Literal

from pydantic import BaseModel

from qinglan.text import count, markdown_cell, size

Kind = Literal["run", "checkpoint", "superseded", "dataset", "mlflow_run", "flow_run", "log"]
_WORDS: dict[Kind, str] = {
    "run": "run",
    "checkpoint": "checkpoint",
    "superseded": "superseded stage",
    "dataset": "dataset version",
    "mlflow_run": "MLflow run",
    "flow_run": "flow run",
    "log": "log",
}
_SHOWN = 50


class _Thing(BaseModel, frozen=True):
    kind: Kind
    name: str
    why: str
    bytes: int = 0
    """That the disk gets back; 0 where a database keeps it, or a hard link elsewhere."""

    @property
    def line(self) -> str:
        space = f" ({size(self.bytes)})" if self.bytes else ""
        return f"{_WORDS[self.kind]} {self.name}{space}: {self.why}"


class Removed(_Thing):
    """A thing that was removed, or would be."""


class Kept(_Thing):
    """A thing that stays, and why."""


class Cleaned(BaseModel):
    profile: str
    dry_run: bool
    removed: list[Removed] = []
    kept: list[Kept] = []
    notes: list[str] = []
    """What could not be read or removed."""

    @property
    def counts(self) -> dict[Kind, int]:
        return dict(Counter(each.kind for each in self.removed))

    @property
    def freed_bytes(self) -> int:
        return sum(each.bytes for each in self.removed)

    @property
    def sentence(self) -> str:
        did = "would remove" if self.dry_run else "removed"
        parts = [f"{count(n)} {_WORDS[kind]}{'s' if n != 1 else ''}" for kind, n in self.counts.items()]
        if not parts:
            return f"{self.profile}: nothing to remove"
        return f"{self.profile}: {did} {', '.join(parts)}; {size(self.freed_bytes)}"

    @property
    def markdown(self) -> str:
        lines = ["## Clean-up", "", f"{self.sentence}.", *(f"\n{markdown_cell(note)}" for note in self.notes)]
        removed = [(each, size(each.bytes)) for each in self.removed]
        for head, rows in (("Removed", removed), ("Kept", [(each, "") for each in self.kept])):
            if rows:
                lines += ["", f"| {head} | | Why | Bytes |", "| --- | --- | --- | ---: |"]
            for each, space in rows[:_SHOWN]:
                lines.append(
                    f"| {_WORDS[each.kind]} | {markdown_cell(each.name)} | {markdown_cell(each.why)} | {space} |"
                )
            if len(rows) > _SHOWN:
                lines.append(f"\n… and {count(len(rows) - _SHOWN)} more")
        return "\n".join(lines) + "\n"
