"""Files that another process removes while they are read."""

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest


class _Listing(ExitStack):
    """A listing like os.scandir's, of entries of which some no longer exist."""

    def __init__(self, entries: "list[os.DirEntry[str]]") -> None:
        super().__init__()
        self._entries = iter(entries)

    def __iter__(self) -> "_Listing":
        return self

    def __next__(self) -> "os.DirEntry[str]":
        return next(self._entries)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def vanish(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Remove each path just after the folder that it lies in was listed."""
    scandir = os.scandir

    def list_and_remove(folder: str | os.PathLike[str] | int = ".") -> _Listing:
        with scandir(folder) as entries:
            entries_before = list(entries)
        for path in paths:
            # A number is an open folder, as shutil uses.
            if not isinstance(folder, int) and path.parent == Path(folder):
                _remove(path)
        return _Listing(entries_before)

    monkeypatch.setattr(os, "scandir", list_and_remove)
