"""A registry in memory, with aliases that a test moves."""

from datetime import UTC, datetime
from pathlib import Path

from qinglan.registry import Alias, Released

_TEXTS = (
    "arm",
    "sha256",
    "recipe",
    "recipe_version",
    "prompt_sha256",
    "dataset_version",
    "run_id",
    "mlflow_run_id",
)


class FakeRegistry:
    """Every version has a folder of its own; `problem` is raised by a request for the aliases."""

    def __init__(self, root: Path, **aliases: str) -> None:
        self.named: dict[Alias, str] = dict(aliases)  # type: ignore[arg-type]
        self.root = root
        self.problem: Exception | None = None
        self.withdrawn: list[str] = []
        self.deleted: set[str] = set()
        self.rolled_back: dict[str, str] = {}

    def aliases(self) -> dict[Alias, str]:
        if self.problem:
            raise self.problem
        return dict(self.named)

    def version(self, version: str) -> Released:
        if version in self.deleted:
            raise LookupError("there is no such version")
        folder = self.root / version
        folder.mkdir(parents=True, exist_ok=True)
        return Released(
            name="m",
            version=version,
            folder=folder,
            weights="path",
            verdict="promote",
            created=datetime(2026, 1, 1, tzinfo=UTC),
            rolled_back_to=self.rolled_back.get(version, ""),
            **dict.fromkeys(_TEXTS, "x"),
        )

    def folder(self, released: Released, _say: object) -> Path:
        return released.folder

    def withdraw_challenger(self, reason: str, version: str | None = None) -> None:
        if version == self.named.get("challenger"):
            self.withdrawn.append(reason)
            self.named.pop("challenger", None)
