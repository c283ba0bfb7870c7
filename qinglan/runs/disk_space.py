"""Free disk space: what files take, what is left, and a hint where the disk is full."""

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
"""Words on a full disk that may have another cause.

SQLite says the first where a file beside the database can't grow, Prefect's server the second."""
_FULL_BELOW_BYTES = 1_000_000
BLOCK_BYTES = 512
"""The unit of `st_blocks`, whatever the file system's own."""


def file_stats(path: Path) -> Iterator[os.stat_result]:
    """The `lstat` of a file, or of every file below a folder.

    Files that disappear meanwhile are left out.
    """
    for file in _files_of(path):
        with suppress(FileNotFoundError):
            yield file.lstat()


def _files_of(path: Path) -> Iterator[Path]:
    if not path.is_dir() or path.is_symlink():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder) / name


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    for candidate in (folder, *folder.parents):
        if candidate.exists():
            return candidate
    return folder


def require_disk_space(what: str, profile: Profile, folder: Path, needed_bytes: int) -> None:
    """Raise `StageError` where it would not fit into `folder`.

    An earlier attempt's files there count as written.
    """
    written_bytes = sum(stat.st_blocks * BLOCK_BYTES for stat in file_stats(folder.resolve()))
    remaining_bytes = max(0, needed_bytes - written_bytes)
    floor_bytes = profile.retention.min_free_mb * 10**6
    _require_free(what, profile, folder, remaining_bytes + floor_bytes)
    _require_free(what, profile, profile.paths.state, floor_bytes)


def _require_free(what: str, profile: Profile, place: Path, required_bytes: int) -> None:
    free_bytes = _free_bytes(place)
    if free_bytes < required_bytes:
        raise StageError(
            f"{what}: needs {size(required_bytes)} and {place} has {size(free_bytes)} free; "
            f"{_hint(profile)}"
        )


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(nearest_folder(place)).free


@contextmanager
def explain_full_disk(what: str, profile: Profile) -> Iterator[None]:
    """Turn an error of a full disk into a StageError with a hint.

    The operating system, SQLite or an engine may have raised it.
    """
    try:
        yield
    except (OSError, QinglanError, SQLAlchemyError) as error:
        is_explained = "qinglan clean-up" in str(error)
        if is_explained or not _is_of_full_disk(error, profile):
            raise
        file = getattr(error, "filename", None)
        place = f" ({file})" if file else ""
        raise StageError(f"{what}: the disk is full{place}; {_hint(profile)}") from error


def _is_of_full_disk(error: Exception, profile: Profile) -> bool:
    text = f"{error}\n{error.__cause__}\n{getattr(error, 'said', '')}"
    if any(words in text for words in _DISK_FULL):
        return True
    # An engine's log, which a full disk cuts off, need not say why it ended.
    may_be_full = isinstance(error, EngineError) or any(words in text for words in _MAYBE_FULL)
    places = (profile.paths.runs, profile.paths.state)
    return may_be_full and any(_free_bytes(place) < _FULL_BELOW_BYTES for place in places)


def _hint(profile: Profile) -> str:
    command = f"qinglan clean-up --profile {profile.name}"
    return f"free some space, such as by `{command}`, and run again: it goes on from here"
