"""Putting a backup back: everything is checked before anything is written, and nothing that is there is deleted."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.ops.backup.records import Backup, BackupEntry, Root
from qinglan.ops.prefect.server import LOCK_FILE
from qinglan.ops.up.lock import only_one
from qinglan.runs.artifacts import sha256_of
from qinglan.runs.locks import is_held
from qinglan.runs.processes import Say
from qinglan.text import size

_STAGING = ".restoring"
_MARGIN_BYTES = 50e6
_OWNERS = 0o700


def restore_backup(profile: Profile, source: Path, say: Say, *, replace: bool = False) -> Backup:
    """Bring state and runs back to where they were.

    Args:
        replace: put what is there aside, into `.replaced-<time>` in the same folder.

    Raises:
        ConfigError: the profile's paths are others, there is something already, or a process is running there.
        ArtifactError: a file of the backup is missing or was changed, or the disk is too small.
    """
    source = source.expanduser().resolve()
    backup = Backup.read(source)
    _require_same_paths(profile, backup)
    state, runs = profile.paths.state.resolve(), profile.paths.runs.resolve()
    _require_no_process(state, runs)
    for root, path in backup.roots.items():
        _require_free(root, path, _spared(profile, path), replace=replace)
    for entry in backup.entries:
        _verify(source, entry)
    say(f"{len(backup.entries):,} files, {size(backup.bytes)}: as they were when the backup was made")
    modes = {folder.path: folder.mode for folder in backup.folders}
    # A root that is there is its owner's to say who enters.
    new = {path: modes[root] for root, path in backup.roots.items() if root in modes and not path.exists()}
    with only_one(state, say), _closed(new):  # no `qinglan up` begins meanwhile
        for path in backup.roots.values():
            _make_staging(path)
        _require_disk_space(backup)
        for folder in modes:
            _staged(folder, backup.roots).mkdir(mode=_OWNERS, parents=True, exist_ok=True)
        for entry in sorted(backup.entries, key=lambda entry: (entry.kind == "link", entry.same_as is not None)):
            _put(source, entry, backup.roots)
        _require_no_process(state, runs, but=state / LOCK_FILE)  # all of that took its time
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        for path in backup.roots.values():
            if aside := _swap(path, _spared(profile, path), stamp):
                say(f"what was in {path} is now in {aside}; delete it when you don't need it")
        _chmod({_place(path, backup.roots): mode for path, mode in modes.items() if path not in backup.roots})
    return backup


def _require_same_paths(profile: Profile, backup: Backup) -> None:
    for root, was in backup.roots.items():
        now = getattr(profile.paths, root).resolve()
        if now != was:
            raise ConfigError(
                f"paths.{root}: is {now}, but the backup is of {was}, and its runs and MLflow's records name files by "
                f"their full paths; restore with `--set paths.{root}={was}`, a link or a mount if need be"
            )


def _spared(profile: Profile, path: Path) -> set[Path]:
    """What lies below this folder and is no part of it: the lock, runs below state or the other way round."""
    others = (profile.paths.state.resolve(), profile.paths.runs.resolve())
    inner = [other for other in others if other != path and other.is_relative_to(path)]
    return {path / _STAGING, path / LOCK_FILE, *inner}


def _found(folder: Path, spared: set[Path]) -> Iterator[Path]:
    """All else that lies there."""
    for each in sorted(folder.iterdir()):
        if any(other.is_relative_to(each) for other in spared):
            if each not in spared:
                yield from _found(each, spared)
        else:
            yield each


def _require_free(root: Root, path: Path, spared: set[Path], *, replace: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"paths.{root}: {path} is no folder")
    if not replace and any(_found(path, spared)):
        raise ConfigError(f"paths.{root}: {path} is not empty; --replace puts aside what is there, and deletes nothing")


def _require_no_process(*folders: Path, but: Path | None = None) -> None:
    """Also where the backup has no runs: those at work write to the state folder."""
    for lock in (lock for folder in folders for lock in folder.rglob("*.lock")):
        if lock != but and is_held(lock):
            raise ConfigError(f"{lock}: a process is running there; stop `qinglan up`, `serve` and all runs first")


def _verify(source: Path, entry: BackupEntry) -> None:
    if entry.kind == "link" or entry.same_as is not None:
        return
    file = source / entry.path
    if not file.is_file():
        raise ArtifactError(f"{file}: is missing from the backup; restore another one")
    if file.stat().st_size != entry.bytes or sha256_of(file) != entry.sha256:
        raise ArtifactError(f"{file}: was changed after the backup was made; restore another one")


@contextmanager
def _closed(new: dict[Path, int]) -> Iterator[None]:
    """Make these, their owner's only until all is in place; with their modes after an error too, for another try."""
    for path in new:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(_OWNERS)
    try:
        yield
    finally:
        _chmod(new)


def _chmod(modes: dict[Path, int]) -> None:
    """The inner first, as an outer one may forbid to go there."""
    for path in sorted(modes, key=lambda path: len(path.parts), reverse=True):
        path.chmod(modes[path])


def _make_staging(path: Path) -> None:
    staging = path / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=_OWNERS, parents=True)  # folders get their modes only where they belong


def _require_disk_space(backup: Backup) -> None:
    """On each file system, for all that goes there.

    Raises:
        ArtifactError: one is too small.
    """
    stagings = {root: path / _STAGING for root, path in backup.roots.items()}
    places: dict[int, list[Root]] = {}
    for root, staging in stagings.items():
        places.setdefault(staging.stat().st_dev, []).append(root)
    wanted = _bytes_by_root(backup, stagings)
    for roots in places.values():
        free, needed = shutil.disk_usage(stagings[roots[0]]).free, sum(wanted[root] for root in roots)
        if free < needed + _MARGIN_BYTES:
            for staging in stagings.values():
                staging.rmdir()
            where = " and ".join(str(backup.roots[root]) for root in roots)
            raise ArtifactError(
                f"{where}: has {size(free)} free, what the backup has of it takes {size(needed)}; free disk space first"
            )


def _bytes_by_root(backup: Backup, stagings: dict[Root, Path]) -> Counter[Root]:
    """What each is to hold: a file with several names once for every folder that its names can't be linked into."""
    linkable: dict[tuple[Root, Root], bool] = {}
    wanted: Counter[Root] = Counter()
    for entry in backup.entries:
        root = _root(entry.path)
        if entry.same_as is not None:
            pair = (_root(entry.same_as), root)
            if pair not in linkable:
                linkable[pair] = _can_link(*(stagings[each] for each in pair))
            if linkable[pair]:
                continue
        wanted[root] += entry.bytes
    return wanted


def _can_link(source: Path, target: Path) -> bool:
    """Tried, as two mounts of one file system have one device number, and some file systems know no links."""
    with TemporaryDirectory(dir=source) as one, TemporaryDirectory(dir=target) as other:
        (Path(one) / "file").touch()
        try:
            os.link(Path(one) / "file", Path(other) / "link")
        except OSError:
            return False
    return True


def _put(source: Path, entry: BackupEntry, roots: dict[Root, Path]) -> None:
    target = _staged(entry.path, roots)
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.kind == "link":
        target.symlink_to(entry.target)
    elif entry.same_as is None:
        shutil.copy2(source / entry.path, target)
    else:
        try:
            os.link(_staged(entry.same_as, roots), target)
        except OSError:  # counted by `_require_disk_space`
            shutil.copy2(_staged(entry.same_as, roots), target)


def _root(path: str) -> Root:
    return "state" if PurePosixPath(path).parts[0] == "state" else "runs"


def _place(path: str, roots: dict[Root, Path]) -> Path:
    return Path(roots[_root(path)], *PurePosixPath(path).parts[1:])


def _staged(path: str, roots: dict[Root, Path]) -> Path:
    return Path(roots[_root(path)], _STAGING, *PurePosixPath(path).parts[1:])


def _swap(path: Path, spared: set[Path], stamp: str) -> Path | None:
    """Within the folder, as it may be a volume of its own."""
    aside, old = path / f".replaced-{stamp}", list(_found(path, spared))
    if old:
        aside.mkdir(mode=_OWNERS)
    for each in old:
        put_aside = aside / each.relative_to(path)
        put_aside.parent.mkdir(parents=True, exist_ok=True)
        each.rename(put_aside)
    _bring(path / _STAGING, path)
    return aside if old else None


def _bring(staged: Path, place: Path) -> None:
    for each in staged.iterdir():
        # What is there still is a way to the other root.
        if (there := place / each.name).is_dir() and each.is_dir() and not each.is_symlink():
            _bring(each, there)
        else:
            each.rename(there)
    staged.rmdir()
