"""Putting a backup back.

Everything is checked before anything is written, and nothing that is there is deleted.
"""

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
_OWNER_ONLY = 0o700


def restore_backup(profile: Profile, source: Path, say: Say, *, replace: bool = False) -> Backup:
    """Bring state and runs back to where they were.

    With `replace` what is there goes into `.replaced-<time>` in it. Raises ConfigError where it
    can't come back here, ArtifactError where the backup is damaged or the disk too full, and
    StageError where rows that were forgotten since could not be removed again.
    """
    source = source.expanduser().resolve()
    backup = Backup.read(source)
    state = profile.paths.state.resolve()
    runs = profile.paths.runs.resolve()
    roots = backup.roots
    # No part of what is replaced: the lock, and runs below the state folder or the other way round.
    spared = {state, runs}
    for path in roots.values():
        spared |= {path / _STAGING, path / LOCK_FILE}
    _require_place(profile, backup, spared, replace=replace)
    _require_unchanged(source, backup)
    files = f"{len(backup.entries):,} files, {size(backup.bytes)}"
    say(f"{files}: as they were when the backup was made")
    modes = {folder.path: folder.mode for folder in backup.folders}
    # Who may enter a root that is there already is left to its owner.
    new_roots = {
        path: modes[root] for root, path in roots.items() if root in modes and not path.exists()
    }
    forgotten = Tombstones.read(state)
    # No `qinglan up` begins meanwhile.
    with only_one(state, say):
        # New roots are their owner's only until all is in place.
        for path in new_roots:
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(_OWNER_ONLY)
        try:
            staged = _stage(source, backup)
            # Staging has taken its time.
            require_no_process(state, runs, but=state / LOCK_FILE)
            _bring_all(staged, roots, spared, say)
            inner_folders = [folder for folder in backup.folders if folder.path not in roots]
            _chmod({_place(folder.path, roots): folder.mode for folder in inner_folders})
            _forget_again(profile, Tombstones.read(state) | forgotten, say)
        finally:
            # After an error too, for another try.
            _chmod(new_roots)
    return backup


def _require_place(profile: Profile, backup: Backup, spared: set[Path], *, replace: bool) -> None:
    """Raise `ConfigError` where the backup is of other folders, or something is in the way."""
    for root, path in backup.roots.items():
        configured = getattr(profile.paths, root).resolve()
        if configured != path:
            reason = f"the backup is of {path}, and its runs name files by their full paths"
            hint = f"restore with `--set paths.{root}={path}`, or a link there"
            raise ConfigError(f"paths.{root}: is {configured}, but {reason}; {hint}")
    require_no_process(profile.paths.state.resolve(), profile.paths.runs.resolve())
    for root, path in backup.roots.items():
        if not path.exists():
            continue
        if not path.is_dir():
            raise ConfigError(f"paths.{root}: {path} is no folder")
        if not replace and any(_contents(path, spared)):
            hint = "--replace puts aside what is there, and deletes nothing"
            raise ConfigError(f"paths.{root}: {path} is not empty; {hint}")


def _require_unchanged(source: Path, backup: Backup) -> None:
    """Raise `ArtifactError` where a file of the backup is not as it was when that was made."""
    for entry in backup.entries:
        if entry.kind == "link" or entry.same_as is not None:
            continue
        file = source / entry.path
        if not file.is_file():
            raise ArtifactError(f"{file}: is missing from the backup; restore another one")
        if file.stat().st_size != entry.bytes or sha256_of(file) != entry.sha256:
            problem = "was changed after the backup was made"
            raise ArtifactError(f"{file}: {problem}; restore another one")


def _contents(folder: Path, spared: set[Path]) -> Iterator[Path]:
    """The outermost paths in a folder that hold nothing which is spared."""
    for path in sorted(folder.iterdir()):
        if not any(spared_path.is_relative_to(path) for spared_path in spared):
            yield path
        elif path not in spared:
            yield from _contents(path, spared)


def _chmod(modes: dict[Path, int]) -> None:
    """Set who may enter folders; the inner ones first, as an outer one may forbid to go there."""
    for path in sorted(modes, key=lambda path: len(path.parts), reverse=True):
        path.chmod(modes[path])


def _stage(source: Path, backup: Backup) -> dict[Root, Path]:
    """Copy all of it next to where it belongs: by root, the folder that holds its part."""
    staged = {root: path / _STAGING for root, path in backup.roots.items()}
    # Folders get their modes only where they belong.
    for staging in staged.values():
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=_OWNER_ONLY, parents=True)
    _require_disk_space(backup, staged)
    for folder in backup.folders:
        _place(folder.path, staged).mkdir(mode=_OWNER_ONLY, parents=True, exist_ok=True)
    # A file before its hard links, and symbolic links last.
    for entry in sorted(
        backup.entries, key=lambda entry: (entry.kind == "link", entry.same_as is not None)
    ):
        _put(source, entry, staged)
    return staged


def _require_disk_space(backup: Backup, staged: dict[Root, Path]) -> None:
    """Raise `ArtifactError` where a file system lacks the space for all that goes there."""
    devices = {root: staging.stat().st_dev for root, staging in staged.items()}
    needed_bytes = dict.fromkeys(devices.values(), 0)
    for entry in backup.entries:
        root = _root(entry.path)
        if entry.same_as is None or not _can_link(staged[_root(entry.same_as)], staged[root]):
            needed_bytes[devices[root]] += entry.bytes
    for device, device_bytes in needed_bytes.items():
        folders = [staging for root, staging in staged.items() if devices[root] == device]
        free_bytes = shutil.disk_usage(folders[0]).free
        if free_bytes >= device_bytes + MARGIN_BYTES:
            continue
        for staging in staged.values():
            staging.rmdir()
        places = " and ".join(str(folder.parent) for folder in folders)
        has = f"has {size(free_bytes)} free, what the backup has of it takes {size(device_bytes)}"
        raise ArtifactError(f"{places}: {has}; free disk space first")


@cache
def _can_link(source: Path, target: Path) -> bool:
    """Try whether a file in one folder can get a second name in the other.

    Two mounts of one file system have one device number, and some file systems know no links.
    """
    with NamedTemporaryFile(dir=source) as file, TemporaryDirectory(dir=target) as folder:
        link = Path(folder) / "link"
        with suppress(OSError):
            os.link(file.name, link)
        return link.exists()


def _put(source: Path, entry: BackupEntry, staged: dict[Root, Path]) -> None:
    target = _place(entry.path, staged)
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.kind == "link":
        target.symlink_to(entry.target)
        return
    if entry.same_as is not None:
        # Where no link can be made, `_require_disk_space` has counted a copy.
        with suppress(OSError):
            os.link(_place(entry.same_as, staged), target)
            return
    shutil.copy2(source / (entry.same_as or entry.path), target)


def _root(path: str) -> Root:
    return "state" if PurePosixPath(path).parts[0] == "state" else "runs"


def _place(path: str, roots: dict[Root, Path]) -> Path:
    """The full path of a path in the backup, in the folders that stand for the roots."""
    return Path(roots[_root(path)], *PurePosixPath(path).parts[1:])


def _bring_all(
    staged: dict[Root, Path], roots: dict[Root, Path], spared: set[Path], say: Say
) -> None:
    """Put aside what is in each root, and bring what is staged into its place."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for root, path in roots.items():
        # Within the folder, as it may be a volume of its own.
        aside = path / f".replaced-{stamp}"
        if _put_aside(path, aside, spared):
            say(f"what was in {path} is now in {aside}; delete it when you don't need it")
        _bring(staged[root], path)


def _put_aside(path: Path, aside: Path, spared: set[Path]) -> bool:
    """Move what is there to `aside`; False where there is nothing."""
    contents = list(_contents(path, spared))
    if not contents:
        return False
    aside.mkdir(mode=_OWNER_ONLY)
    for content in contents:
        target = aside / content.relative_to(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content.rename(target)
    return True


def _bring(staged: Path, place: Path) -> None:
    """Move what is in a staged folder into another one."""
    for content in staged.iterdir():
        target = place / content.name
        is_folder = content.is_dir() and not content.is_symlink()
        # A folder that is still there is on the way to the other root.
        if target.is_dir() and is_folder:
            _bring(content, target)
        else:
            content.rename(target)
    staged.rmdir()


def _forget_again(profile: Profile, tombstones: Tombstones, say: Say) -> None:
    """Remove again what was forgotten before or after the backup was made."""
    result = apply(profile, tombstones)
    for line in result.lines:
        say(f"forgotten before, removed again: {line}")
    if result.notes:
        raise StageError(f"restore: correct this, and forget it again: {result.notes[0]}")
