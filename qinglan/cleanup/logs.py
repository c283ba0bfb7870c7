"""Logs under the state folder that nobody has written to for long, and that no process writes to."""

import fcntl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from qinglan.cleanup.disposal import bytes_of
from qinglan.cleanup.records import Removed
from qinglan.cleanup.run_folders import age, is_past
from qinglan.config import Profile


def remove_logs(profile: Profile, now: datetime, *, dry_run: bool) -> Iterator[Removed]:
    """Delete them."""
    days, folder = profile.retention.log_days, profile.paths.state.resolve() / "logs"
    if days is None or not folder.is_dir():
        return
    for file in sorted(folder.glob("**/*.log*")):
        if file.is_symlink() or not file.is_file():
            continue
        written = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        if not is_past(written, days, now) or _is_in_use(file):
            continue
        name, freed = file.relative_to(folder).as_posix(), bytes_of(file)
        if not dry_run:
            file.unlink(missing_ok=True)
        yield Removed(kind="log", name=name, why=f"last written {age(written, now)} ago", bytes=freed)


def _is_in_use(file: Path) -> bool:
    """Is it the log of a process that `Processes` started and that runs? One that can't be tried counts as such."""
    try:
        with file.open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
