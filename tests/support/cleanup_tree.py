"""Run folders for the tests of clean-up, as old as a test wants them."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from qinglan.config import Profile
from qinglan.runs.artifacts import MANIFEST, Artifact, StageResult, write_json
from qinglan.runs.run import Run

NOW = datetime(2026, 6, 1, tzinfo=UTC)


class Tree:
    """A profile's `paths.runs`."""

    def __init__(self, profile: Profile) -> None:
        self.profile, self.root, self.made = profile, profile.paths.runs, 0
        self.root.mkdir(parents=True, exist_ok=True)

    def run(self, days: float, flow: str = "refresh", *, finished: bool = True, **state: Any) -> Path:
        """A run whose last work was so many days ago; of two as old the later made is the newer."""
        self.made += 1
        began = NOW - timedelta(days=days)
        name = f"{began:%Y%m%d-%H%M%S}-{self.made:04x}"
        folder = self.root / name
        told = Run(id=name, flow=flow, profile=self.profile, directory=folder).model_dump(mode="json")
        write_json(folder / "run.json", told | {"finished": finished, "profile_name": self.profile.name} | state)
        age(folder, days)
        return folder

    def stage(
        self, run: Path, name: str, *files: str, by: Path | None = None, days: float | None = None
    ) -> StageResult:
        """A finished stage; with `by` it is that run's, reused here."""
        source = (by or run) / name
        artifacts = {}
        for file in files:
            path = source / file
            if not path.exists():
                path.mkdir(parents=True)
                (path / "weights.bin").write_bytes(b"w" * 10_000)
            artifacts[file.replace("/", "_")] = Artifact.of(path)
        result = StageResult(stage=name, key="k", run_id=(by or run).name, seconds=1, artifacts=artifacts)
        write_json(run / name / MANIFEST, result.model_dump(mode="json"))
        if days is not None:
            age(run, days)

    @property
    def names(self) -> set[str]:
        """Runs that are there."""
        return {path.parent.name for path in self.root.glob("*/run.json")}


def age(folder: Path, days: float) -> None:
    """As if nothing had been written there since."""
    then = (NOW - timedelta(days=days)).timestamp()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)
