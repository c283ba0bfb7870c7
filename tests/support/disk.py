"""The order in which files are forced onto the disk and get their names, for a test to see."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The events that follow, by file name: forced onto the disk (`sync`), or named (`name`)."""
    events: list[tuple[str, str]] = []
    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def noted(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def note_and_rename(path: Path, target: Path) -> Path:
            events.append(("name", path.name))
            return rename(path, target)

        return note_and_rename

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted(Path.replace))
    monkeypatch.setattr(Path, "rename", noted(Path.rename))
    return events
