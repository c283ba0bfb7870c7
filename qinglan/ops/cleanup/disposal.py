"""How a folder is removed: renamed first, so that a kill leaves no half of one under its own name, then deleted.

It is renamed in its own folder, as a full disk may have no space for another. Symbolic links are never followed.
"""

import os
import shutil
from pathlib import Path

from qinglan.runs.disk_space import file_stats

PREFIX = ".removing-"


def bytes_of(path: Path) -> int:
    """What the disk gets back once `path` is removed; a file that has another hard link gives nothing."""
    return sum(map(freed_by, file_stats(path)))


def freed_by(file: os.stat_result) -> int:
    return file.st_blocks * 512 if file.st_nlink == 1 else 0


def set_aside(path: Path, root: Path) -> Path:
    """Rename a folder so that it is no longer found; `root` is the folder above all, on the same file system."""
    aside = root / f"{PREFIX}{'.'.join(path.relative_to(root).parts)}"
    path.rename(aside)
    return aside


def delete(aside: Path) -> None:
    """Delete what was set aside, also where a file or folder is read-only."""
    for folder, _, _ in os.walk(aside):
        Path(folder).chmod(0o700)
    shutil.rmtree(aside)
