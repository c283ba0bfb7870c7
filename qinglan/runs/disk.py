"""What lies on a disk, seen while other processes write and remove there."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def statuses(path: Path) -> Iterator[os.stat_result]:
    """Of a file, or of every file below a folder; what vanishes meanwhile is left out, links are not followed."""
    is_folder = path.is_dir() and not path.is_symlink()
    files = (Path(folder) / name for folder, _, names in os.walk(path) for name in names) if is_folder else (path,)
    for file in files:
        with suppress(FileNotFoundError):
            yield file.lstat()


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: nobody makes one to look at its disk."""
    folder = folder.absolute()
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)
