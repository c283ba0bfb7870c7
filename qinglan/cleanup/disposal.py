"""How a folder goes: renamed first, so that a kill leaves no half of one under its own name, then deleted.

The new name begins with a dot and lies in the same folder, as a disk that is full may have no room for another
folder. Symbolic links are removed, never followed.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".removing-"


def bytes_of(path: Path) -> int:
    """What the disk gets back once `path` is gone; a file that has another hard link gives nothing."""
    if path.is_symlink() or not path.is_dir():
        return _own_bytes(path)
    return sum(_own_bytes(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)


def set_aside(path: Path, root: Path) -> Path:
    """Take a folder away from where it would be found; `root` is the folder above all, on the same file system."""
    aside = root / f"{_PREFIX}{'.'.join(path.relative_to(root).parts)}"
    path.rename(aside)
    return aside


def delete(aside: Path) -> None:
    """Delete what was set aside, also where a file or folder is read-only."""
    for folder, _, _ in os.walk(aside):
        Path(folder).chmod(0o700)
    shutil.rmtree(aside)


def left_behind(root: Path) -> Iterator[Path]:
    """What a clean-up set aside that was killed before it deleted it."""
    yield from (each for each in root.glob(f"{_PREFIX}*") if each.is_dir() and not each.is_symlink())


def _own_bytes(file: Path) -> int:
    try:
        status = file.lstat()
    except FileNotFoundError:  # a process at work removed it
        return 0
    return status.st_blocks * 512 if status.st_nlink == 1 else 0
