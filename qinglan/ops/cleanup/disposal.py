"""How a folder goes: renamed first, so that a kill leaves no half of one under its own name, then deleted.

The new name begins with a dot and lies in the same folder, as a disk that is full may have no space for another
folder. Symbolic links are removed, never followed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from qinglan.runs.disk_space import file_stats

_PREFIX = ".removing-"


def bytes_of(path: Path) -> int:
    """What the disk gets back once `path` is gone; a file that has another hard link gives nothing."""
    return sum(map(freed_by, file_stats(path)))


def freed_by(file: os.stat_result) -> int:
    """The same of one file."""
    return file.st_blocks * 512 if file.st_nlink == 1 else 0


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


def left_behind(root: Path) -> list[Path]:
    """What was set aside and is still there, also by a clean-up that was killed before it deleted it."""
    return sorted(each for each in root.glob(f"{_PREFIX}*") if each.is_dir() and not each.is_symlink())


@contextmanager
def deleting(root: Path) -> Iterator[list[Path]]:
    """What is to be deleted now: two clean-ups find the same things, so the second waits until the first is done."""
    with FileLock(root / ".deletion.lock"):
        yield left_behind(root)
