"""Putting a backup back: everything is checked before anything is written, and nothing that is
there is deleted."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile, TemporaryDirectory

from qinglan.config import Profile
from qinglan.data.forgotten import Tombstones
from qinglan.errors import ArtifactError, ConfigError, StageError
from qinglan.ops.backup import MARGIN_BYTES, Backup, BackupEntry, Root
from qinglan.ops.forget import apply
from qinglan.ops.prefect.server import LOCK_FILE
from qinglan.ops.up.site import only_one
from qinglan.runs.artifacts import sha256_of
from qinglan.runs.locks import require_no_process
from qinglan.runs.processes import Say
from qinglan.text import size

_STAGING = ".restoring"
_OWNERS = 0o700


def restore_backup(profile: Profile, source: Path, say: Say, *, replace: bool = False) -> Backup:
    """Bring state and runs back to where they were; with `replace` what is there goes into
    `.replaced-<time>` in it."""
    source = source.expanduser().resolve()
    backup = Backup.read(source)
    state, runs, roots = profile.paths.state.resolve(), profile.paths.runs.resolve(), backup.roots
    # No part of what is replaced: the lock, and runs below the state folder or the other way round.
    spared = {state, runs} | {
        path / name for path in roots.values() for name in (_STAGING, LOCK_FILE)
    }
    _require_place(profile, backup, spared, replace=replace)
    for entry in (
        entry for entry in backup.entries if entry.kind != "link" and entry.same_as is None
    ):
        file = source / entry.path
        if not file.is_file():
            raise ArtifactError(f"{file}: is missing from the backup; restore another one")
        if file.stat().st_size != entry.bytes or sha256_of(file) != entry.sha256:
            raise ArtifactError(
                f"{file}: was changed after the backup was made; restore another one"
            )
    say(
        f"{len(backup.entries):,} files, {size(backup.bytes)}: as they were when the backup was made"
    )
    modes = {folder.path: folder.mode for folder in backup.folders}
    # A root that is there is its owner's to say who enters.
    new_roots = {
        path: modes[root] for root, path in roots.items() if root in modes and not path.exists()
    }
    forgotten = Tombstones.read(state)
    with only_one(state, say):  # no `qinglan up` begins meanwhile
        for path in new_roots:  # their owner's only until all is in place
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(_OWNERS)
        try:
            staged = _stage(source, backup)
            require_no_process(state, runs, but=state / LOCK_FILE)  # all of that took its time
            stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            for root, path in roots.items():
                aside = (
                    path / f".replaced-{stamp}"
                )  # within the folder, as it may be a volume of its own
                if _put_aside(path, aside, spared):
                    say(f"what was in {path} is now in {aside}; delete it when you don't need it")
                _bring(staged[root], path)
            _chmod({_place(path, roots): mode for path, mode in modes.items() if path not in roots})
            found = apply(profile, Tombstones.read(state) | forgotten)
            for line in found.lines:
                say(f"forgotten before, removed again: {line}")
            if found.notes:
                raise StageError(f"restore: correct this, and forget it again: {found.notes[0]}")
        finally:
            _chmod(new_roots)  # after an error too, for another try
    return backup


def _require_place(profile: Profile, backup: Backup, spared: set[Path], *, replace: bool) -> None:
    for root, was in backup.roots.items():
        now = getattr(profile.paths, root).resolve()
        if now != was:
            problem = (
                f"is {now}, but the backup is of {was}, and its runs name files by their full paths"
            )
            raise ConfigError(
                f"paths.{root}: {problem}; restore with `--set paths.{root}={was}`, or a link there"
            )
    require_no_process(profile.paths.state.resolve(), profile.paths.runs.resolve())
    for root, path in ((root, path) for root, path in backup.roots.items() if path.exists()):
        if not path.is_dir():
            raise ConfigError(f"paths.{root}: {path} is no folder")
        if not replace and any(_contents(path, spared)):
            hint = "--replace puts aside what is there, and deletes nothing"
            raise ConfigError(f"paths.{root}: {path} is not empty; {hint}")


def _contents(folder: Path, spared: set[Path]) -> Iterator[Path]:
    for each in sorted(folder.iterdir()):
        if not any(other.is_relative_to(each) for other in spared):
            yield each
        elif each not in spared:
            yield from _contents(each, spared)


def _chmod(modes: dict[Path, int]) -> None:
    """The inner first, as an outer one may forbid to go there."""
    for path in sorted(modes, key=lambda path: len(path.parts), reverse=True):
        path.chmod(modes[path])


def _stage(source: Path, backup: Backup) -> dict[Root, Path]:
    """Copy all of it next to where it belongs: by root, the folder that holds its part."""
    staged = {root: path / _STAGING for root, path in backup.roots.items()}
    for staging in staged.values():
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=_OWNERS, parents=True)  # folders get their modes only where they belong
    _require_disk_space(backup, staged)
    for folder in backup.folders:
        _place(folder.path, staged).mkdir(mode=_OWNERS, parents=True, exist_ok=True)
    for entry in sorted(
        backup.entries, key=lambda entry: (entry.kind == "link", entry.same_as is not None)
    ):
        _put(source, entry, staged)
    return staged


def _require_disk_space(backup: Backup, staged: dict[Root, Path]) -> None:
    """On each file system, for all that goes there."""
    devices = {root: staging.stat().st_dev for root, staging in staged.items()}
    wanted = dict.fromkeys(devices.values(), 0)
    for entry in backup.entries:
        root = _root(entry.path)
        if entry.same_as is None or not _can_link(staged[_root(entry.same_as)], staged[root]):
            wanted[devices[root]] += entry.bytes
    for device, needed in wanted.items():
        folders = [staging for root, staging in staged.items() if devices[root] == device]
        if (free := shutil.disk_usage(folders[0]).free) < needed + MARGIN_BYTES:
            for staging in staged.values():
                staging.rmdir()
            where = " and ".join(str(folder.parent) for folder in folders)
            has = f"has {size(free)} free, what the backup has of it takes {size(needed)}"
            raise ArtifactError(f"{where}: {has}; free disk space first")


@cache
def _can_link(source: Path, target: Path) -> bool:
    """Tried, as two mounts of one file system have one device number, and some file systems know no
    links."""
    with NamedTemporaryFile(dir=source) as file, TemporaryDirectory(dir=target) as other:
        with suppress(OSError):
            os.link(file.name, Path(other) / "link")
        return (Path(other) / "link").exists()


def _put(source: Path, entry: BackupEntry, staged: dict[Root, Path]) -> None:
    target = _place(entry.path, staged)
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.kind == "link":
        target.symlink_to(entry.target)
        return
    if entry.same_as is not None:
        with suppress(OSError):  # counted by `_require_disk_space`
            os.link(_place(entry.same_as, staged), target)
            return
    shutil.copy2(source / (entry.same_as or entry.path), target)


def _root(path: str) -> Root:
    return "state" if PurePosixPath(path).parts[0] == "state" else "runs"


def _place(path: str, roots: dict[Root, Path]) -> Path:
    return Path(roots[_root(path)], *PurePosixPath(path).parts[1:])


def _put_aside(path: Path, aside: Path, spared: set[Path]) -> bool:
    """Move what is there to `aside`; False where there is nothing."""
    if contents := list(_contents(path, spared)):
        aside.mkdir(mode=_OWNERS)
    for each in contents:
        target = aside / each.relative_to(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        each.rename(target)
    return bool(contents)


def _bring(staged: Path, place: Path) -> None:
    for each in staged.iterdir():
        # What is there still is a way to the other root.
        if (there := place / each.name).is_dir() and each.is_dir() and not each.is_symlink():
            _bring(each, there)
        else:
            each.rename(there)
    staged.rmdir()
