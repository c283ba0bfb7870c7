"""What is removed below the state folder: dataset versions that nothing uses, and old logs that no process writes."""

import stat
from collections.abc import Iterator
from datetime import UTC, datetime

from filelock import FileLock

from qinglan.config import Profile
from qinglan.data.versions import LATEST, LOCK, last_training, tenant_folder, versions_of
from qinglan.ops.cleanup.disposal import bytes_of, freed_by, set_aside
from qinglan.ops.cleanup.records import Kept, Removed
from qinglan.ops.cleanup.run_folders import age, is_past
from qinglan.runs.locks import is_held


def remove_datasets(profile: Profile, references: str, now: datetime, *, dry_run: bool) -> Iterator[Removed | Kept]:
    """Set aside old versions of the profile's tenant and recipe. Each newer one holds its own copy of the splits.

    Args:
        references: text that names the versions in use: of runs that stay, of registered models.
    """
    root, days = tenant_folder(profile).resolve(), profile.retention.dataset_days
    if not root.is_dir() or days is None:
        return
    with FileLock(root / LOCK):  # no version is published meanwhile
        versions, trained = versions_of(profile), last_training(profile)
        newest = (root / LATEST).resolve().name
        kept: dict[str, str] = {}
        for version in versions:
            if version.id == newest:
                kept[version.id] = "is the newest"
            elif trained and trained.version == version.id:
                kept[version.id] = "was trained on last"
            elif version.id in references:
                kept[version.id] = "a run or a registered model uses it"
            elif not is_past(datetime.fromisoformat(version.created), days, now):
                kept[version.id] = "is young enough"
        # A version that stays can still be compared with its parent, and made again with the same splits.
        origins = {each for version in versions if version.id in kept for each in (version.parent, version.pins)}
        for version in versions:
            if why := kept.get(version.id) or ("one that stays came of it" if version.id in origins else ""):
                yield Kept(kind="dataset", name=version.id, why=why)
                continue
            old = f"made {age(datetime.fromisoformat(version.created), now)} ago"
            freed = bytes_of(version.directory)
            if not dry_run:
                set_aside(version.directory, root)
            yield Removed(kind="dataset", name=version.id, why=old, bytes=freed)


def remove_logs(profile: Profile, now: datetime, *, dry_run: bool) -> Iterator[Removed]:
    """Delete logs that nobody has written to for as long as `retention.log_days` says."""
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
