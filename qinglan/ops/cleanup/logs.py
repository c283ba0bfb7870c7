"""Logs under the state folder that nobody has written to for long, and that no process writes to."""

import stat
from collections.abc import Iterator
from datetime import UTC, datetime

from qinglan.config import Profile
from qinglan.ops.cleanup.disposal import freed_by
from qinglan.ops.cleanup.records import Removed
from qinglan.ops.cleanup.run_folders import age, is_past
from qinglan.runs.locks import is_held


def remove_logs(profile: Profile, now: datetime, *, dry_run: bool) -> Iterator[Removed]:
    """Delete them."""
    days, folder = profile.retention.log_days, profile.paths.state.resolve() / "logs"
    if days is None or not folder.is_dir():
        return
    for file in sorted(folder.glob("**/*.log*")):
        try:
            status = file.lstat()
            written = datetime.fromtimestamp(status.st_mtime, UTC)
            # `Processes` shares a lock on the log of each process that it started, for as long as that runs.
            if not stat.S_ISREG(status.st_mode) or not is_past(written, days, now) or is_held(file, shared=True):
                continue
            if not dry_run:
                file.unlink()
        except FileNotFoundError:  # another profile's clean-up was quicker, or the log was renamed
            continue
        name, old = file.relative_to(folder).as_posix(), f"last written {age(written, now)} ago"
        yield Removed(kind="log", name=name, why=old, bytes=freed_by(status))
