"""Files that another process removes while they are looked at."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest


class _Listing:
    """As os.scandir's, of a folder from which something is gone once it has been listed."""

    def __init__(self, entries: "list[os.DirEntry[str]]") -> None:
        self._entries = iter(entries)

    def __enter__(self) -> "_Listing":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> "Iterator[os.DirEntry[str]]":
        return self._entries

    def __next__(self) -> "os.DirEntry[str]":
        return next(self._entries)

    def close(self) -> None:
        """Nothing is open any more."""


def vanish(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Whoever lists the folder that one of these lies in is still told of it, and finds it gone."""
    scandir = os.scandir

    def list_and_remove(folder: str | os.PathLike[str] | int = ".") -> _Listing:
        with scandir(folder) as entries:
            listed = list(entries)
        for path in paths:
            if not isinstance(folder, int) and path.parent == Path(
                folder
            ):  # a number is an open folder, as shutil uses
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return _Listing(listed)

    monkeypatch.setattr(os, "scandir", list_and_remove)
