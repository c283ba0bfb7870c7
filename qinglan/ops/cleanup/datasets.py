"""Dataset versions that nothing uses any more. Their splits outlive them: each newer version holds its own."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock

from qinglan.config import Profile
from qinglan.data.versions import LATEST, LOCK, last_training, tenant_folder, versions_of
from qinglan.ops.cleanup.disposal import bytes_of, left_behind, set_aside
from qinglan.ops.cleanup.records import Kept, Removed
from qinglan.ops.cleanup.run_folders import age, is_past


def remove_datasets(
    profile: Profile, references: str, now: datetime, *, dry_run: bool
) -> Iterator[tuple[Removed | Kept | None, Path | None]]:
    """Set aside old versions of the profile's tenant and recipe, each with what is now to be deleted.

    Args:
        references: text that names the versions in use: of runs that stay, of registered models.
    """
    root, days = tenant_folder(profile).resolve(), profile.retention.dataset_days
    if not root.is_dir() or days is None:
        return
    with FileLock(root / LOCK):  # no version is published meanwhile
        if not dry_run:
            yield from ((None, each) for each in left_behind(root))
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
        beside = {each for version in versions if version.id in kept for each in (version.parent, version.pins)}
        for version in versions:
            if why := kept.get(version.id) or ("one that stays came of it" if version.id in beside else ""):
                yield Kept(kind="dataset", name=version.id, why=why), None
                continue
            old = f"made {age(datetime.fromisoformat(version.created), now)} ago"
            removed = Removed(kind="dataset", name=version.id, why=old, bytes=bytes_of(version.directory))
            yield removed, None if dry_run else set_aside(version.directory, root)
