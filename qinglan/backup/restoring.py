"""Putting a backup back: everything is checked before anything is written, and nothing that is there is deleted."""

import fcntl
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from qinglan.artifacts import sha256_of
from qinglan.backup.records import Backup, Entry, Root
from qinglan.config import Profile
from qinglan.engines.processes import Say
from qinglan.errors import ArtifactError, ConfigError
from qinglan.formats import size
from qinglan.prefect_server import LOCK_FILE
from qinglan.up.lock import only_one

_STAGING = ".restoring"
_MARGIN_BYTES = 50e6


def restore_backup(profile: Profile, source: Path, say: Say, *, replace: bool = False) -> Backup:
    """Bring state and runs back to where they were.

    Args:
        replace: put what is there aside, into `.replaced-<time>` in the same folder.

    Raises:
        ConfigError: the profile's paths are others, there is something already, or a process is at work there.
        ArtifactError: a file of the backup is missing or was changed, or the disk is too small.
    """
    source = source.expanduser().resolve()
    backup = Backup.read(source)
    _require_same_paths(profile, backup)
    state, runs = profile.paths.state.resolve(), profile.paths.runs.resolve()
    _require_nobody(state, runs)
    for root, path in backup.roots.items():
        _require_free(root, path, _spared(profile, path), replace=replace)
    for entry in backup.entries:
        _verify(source, entry)
    say(f"{len(backup.entries):,} files, {size(backup.bytes)}: as they were when the backup was made")
    with only_one(state, say):  # no `qinglan up` begins meanwhile
        for path in backup.roots.values():
            _make_staging(path, backup.bytes)
        for entry in sorted(backup.entries, key=lambda entry: (entry.kind == "link", entry.same_as is not None)):
            _put(source, entry, backup.roots)
        _require_nobody(state, runs, but=state / LOCK_FILE)  # all of that took its time
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        for path in backup.roots.values():
            if aside := _swap(path, _spared(profile, path), stamp):
                say(f"what was in {path} is now in {aside}; delete it when you don't need it")
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
    """What lies in this folder and is no part of it: the lock, runs below the state folder or the other way round."""
    others = (profile.paths.state.resolve(), profile.paths.runs.resolve())
    inner = [other for other in others if other != path and other.is_relative_to(path)]
    return {path / _STAGING, path / LOCK_FILE, *(path / other.relative_to(path).parts[0] for other in inner)}


def _require_free(root: Root, path: Path, spared: set[Path], *, replace: bool) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"paths.{root}: {path} is no folder")
    if not replace and set(path.iterdir()) - spared:
        raise ConfigError(f"paths.{root}: {path} is not empty; --replace puts aside what is there, and deletes nothing")


def _require_nobody(*folders: Path, but: Path | None = None) -> None:
    """Also where the backup has no runs: those at work write to the state folder."""
    for lock in (lock for folder in folders for lock in folder.rglob("*.lock")):
        if lock != but and _is_held(lock):
            raise ConfigError(f"{lock}: a process is at work there; stop `qinglan up`, `serve` and all runs first")


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # one that can't be tried counts as held
        return True
    except FileNotFoundError:
        return False
    return False


def _verify(source: Path, entry: Entry) -> None:
    if entry.kind == "link" or entry.same_as is not None:
        return
    file = source / entry.path
    if not file.is_file():
        raise ArtifactError(f"{file}: is missing from the backup; restore another one")
    if file.stat().st_size != entry.bytes or sha256_of(file) != entry.sha256:
        raise ArtifactError(f"{file}: was changed after the backup was made; restore another one")


def _make_staging(path: Path, wanted: int) -> None:
    staging = path / _STAGING
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    free = shutil.disk_usage(staging).free
    if free < wanted + _MARGIN_BYTES:
        staging.rmdir()
        raise ArtifactError(f"{path}: has {size(free)} free, the backup takes {size(wanted)}; make room first")


def _put(source: Path, entry: Entry, roots: dict[Root, Path]) -> None:
    target = _staged(entry.path, roots)
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.kind == "link":
        target.symlink_to(entry.target)
    elif entry.same_as is None:
        shutil.copy2(source / entry.path, target)
    else:
        try:
            os.link(_staged(entry.same_as, roots), target)
        except OSError:  # state and runs on different file systems
            shutil.copy2(_staged(entry.same_as, roots), target)


def _staged(path: str, roots: dict[Root, Path]) -> Path:
    root, *inner = PurePosixPath(path).parts
    return Path(roots["state" if root == "state" else "runs"], _STAGING, *inner)


def _swap(path: Path, spared: set[Path], stamp: str) -> Path | None:
    """Within the folder, as it may be a volume of its own."""
    staging, aside = path / _STAGING, path / f".replaced-{stamp}"
    old = sorted(set(path.iterdir()) - spared)
    if old:
        aside.mkdir()
    for each in old:
        each.rename(aside / each.name)
    for each in staging.iterdir():
        each.rename(path / each.name)
    staging.rmdir()
    return aside if old else None
