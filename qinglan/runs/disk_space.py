"""Free disk space: what files take, what is left, and one line with a hint where the disk is
full."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from qinglan.config import Profile
from qinglan.errors import EngineError, QinglanError, StageError
from qinglan.text import size

_DISK_FULL = ("No space left on device", "disk is full", "Disk quota exceeded")
_MAYBE_FULL = ("disk I/O error", "500 Internal Server Error")
"""What SQLite says of a full disk too, where a file beside the database can't grow, and Prefect's
server."""
_FULL_BELOW_BYTES = 1_000_000


def file_stats(path: Path) -> Iterator[os.stat_result]:
    """The `lstat` of a file, or of every file below a folder, without the files that disappear
    meanwhile."""
    is_folder = path.is_dir() and not path.is_symlink()
    files = (
        (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
        if is_folder
        else (path,)
    )
    for file in files:
        with suppress(FileNotFoundError):
            yield file.lstat()


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next((each for each in (folder, *folder.parents) if each.exists()), folder)


def require_disk_space(what: str, profile: Profile, folder: Path, needed_bytes: int) -> None:
    """Raise `StageError` where it would not fit into `folder`; what an earlier attempt left there
    counts as written."""
    written = sum(stat.st_blocks * 512 for stat in file_stats(folder.resolve()))
    floor = profile.retention.min_free_mb * 10**6
    for place, wanted in (
        (folder, max(0, needed_bytes - written) + floor),
        (profile.paths.state, floor),
    ):
        if (free := shutil.disk_usage(nearest_folder(place)).free) < wanted:
            raise StageError(
                f"{what}: needs {size(wanted)} and {place} has {size(free)} free; {_hint(profile)}"
            )


@contextmanager
def explain_full_disk(what: str, profile: Profile) -> Iterator[None]:
    """Turn what the operating system, SQLite or an engine raises on a full disk into a StageError
    with a hint."""
    try:
        yield
    except (OSError, QinglanError, SQLAlchemyError) as error:
        text = f"{error}\n{error.__cause__}\n{getattr(error, 'said', '')}"
        places = (profile.paths.runs, profile.paths.state)
        is_full = any(
            shutil.disk_usage(nearest_folder(place)).free < _FULL_BELOW_BYTES for place in places
        )
        # An engine's log, which a full disk cuts off, need not say why it ended.
        suspected = is_full and (
            isinstance(error, EngineError) or any(words in text for words in _MAYBE_FULL)
        )
        if not (
            suspected or any(words in text for words in _DISK_FULL)
        ) or "qinglan clean-up" in str(error):
            raise
        where = f" ({named})" if (named := getattr(error, "filename", None)) else ""
        raise StageError(f"{what}: the disk is full{where}; {_hint(profile)}") from error


def _hint(profile: Profile) -> str:
    command = f"qinglan clean-up --profile {profile.name}"
    return f"free some space, such as by `{command}`, and run again: it goes on from here"
