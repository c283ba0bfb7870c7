"""What a test sees of the order in which files are forced onto the disk and get their names."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


def disk_events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is forced onto the disk, and what gets its name, in order; by file name."""
    events = list[tuple[str, str]]()
    fsync, replace, rename = os.fsync, Path.replace, Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def noted(what: str, call: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        return lambda path, target: (events.append((what, path.name)), call(path, target))[1]

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted("name", replace))
    monkeypatch.setattr(Path, "rename", noted("name", rename))
    return events
