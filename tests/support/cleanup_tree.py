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

    def run(self, days: float, flow: str = "refresh", *folders: str, finished: bool = True, **state: Any) -> Path:
        """A run last written so many days ago, with these folders; of two as old the later made is the newer."""
        self.made += 1
        began = NOW - timedelta(days=days)
        name = f"{began:%Y%m%d-%H%M%S}-{self.made:04x}"
        directory = self.root / name
        record = Run(id=name, flow=flow, profile=self.profile, directory=directory).model_dump(mode="json")
        write_json(directory / "run.json", record | {"finished": finished, "profile_name": self.profile.name} | state)
        for folder in folders:
            (directory / folder).mkdir(parents=True)
            (directory / folder / "weights.bin").write_bytes(b"w" * 10_000)
        age(directory, days)
        return directory

    def stage(self, run: Path, name: str, file: str, by: Path | None = None) -> None:
        """A finished stage with one file, which keeps the run's age; with `by` it is that run's, reused here."""
        source = by or run
        path, written = source / name / file, run.stat().st_mtime
        if not path.exists():
            path.mkdir(parents=True)
            (path / "weights.bin").write_bytes(b"w" * 10_000)
        artifacts = {"file": Artifact.of(path)}
        result = StageResult(stage=name, key="k", run_id=source.name, seconds=1, artifacts=artifacts)
        write_json(run / name / MANIFEST, result.model_dump(mode="json"))
        age(run, (NOW.timestamp() - written) / 86400)

    @property
    def names(self) -> set[str]:
        return {path.parent.name for path in self.root.glob("*/run.json")}


def age(folder: Path, days: float) -> None:
    """As if nothing had been written there since."""
    then = (NOW - timedelta(days=days)).timestamp()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (then, then), follow_symlinks=False)
