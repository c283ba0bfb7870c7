"""Folders that a clean-up reads and removes; which dataset versions and logs stay, and why.

A folder is renamed first, so that a kill leaves no half of one under its own name, then deleted.
Links are never followed.
"""

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock

from qinglan.data.versions import LOCK, Version, last_training, tenant_folder, versions_of
from qinglan.errors import ArtifactError
from qinglan.ops.cleanup.records import CleanUp, Kind
from qinglan.runs.artifacts import MANIFEST
from qinglan.runs.disk_space import BLOCK_BYTES, file_stats
from qinglan.runs.locks import is_held
from qinglan.runs.run import LOCK_FILE, RUN_FILE, run_folders
from qinglan.runs.schema_version import check_version

_PREFIX = ".removing-"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and what is written in it about the run."""

    directory: Path
    state: Mapping[str, Any]
    """run.json; empty where it can't be read, and then the profile is None."""
    active: datetime
    """The time when anything in it was last written."""

    @property
    def profile(self) -> str | None:
        return self.state.get("profile_name")

    @property
    def finished_flow(self) -> str | None:
        """The flow of a finished run; None of one that may go on."""
        return str(self.state.get("flow", "")) if self.state.get("finished") else None

    @cached_property
    def references(self) -> str:
        """The text of run.json and the manifests, which names the runs that this one uses."""
        files = {*self.directory.glob("*.json"), *self.directory.glob(f"*/{MANIFEST}")}
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)]
        return "\n".join(texts)


def read_folders(root: Path) -> Iterator[RunFolder]:
    """Every run below a folder, the newest first."""
    for directory in run_folders(root):
        run_file = directory / RUN_FILE
        try:
            state = check_version(json.loads(run_file.read_bytes()), run_file)
        except FileNotFoundError:
            # Somebody deletes the run.
            continue
        except (OSError, ValueError, AttributeError, ArtifactError):
            # It is damaged, holds no object, or a newer Qinglan has written it.
            state = {}
        yield RunFolder(directory, state, last_written(directory))


def own_folders(folder: Path) -> list[Path]:
    """The folders in a folder, links excepted; none where it is not there."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        paths = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(paths)
    return []


def last_written(directory: Path) -> datetime:
    """The time when a file in it, or in the folders in it, was last written.

    A running run may rename and remove them meanwhile.
    """
    newest_s = 0.0
    for folder in (directory, *own_folders(directory)):
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                newest_s = max(newest_s, _written_s(entry))
    return datetime.fromtimestamp(newest_s, UTC)


def _written_s(entry: os.DirEntry[str]) -> float:
    """The time when a file was last written; 0 of a lock, and of what is no file or gone."""
    with suppress(FileNotFoundError):
        if entry.name != LOCK_FILE and entry.is_file(follow_symlinks=False):
            return entry.stat(follow_symlinks=False).st_mtime
    return 0.0


def set_aside(clean: CleanUp, kind: Kind, path: Path, reason: str, root: Path) -> None:
    """Rename a folder so that it is no longer found.

    `root` is the folder above all, on the same file system.
    """
    freed_bytes = bytes_of(path)
    inner_path = path.relative_to(root)
    if not clean.dry_run:
        path.rename(root / f"{_PREFIX}{'.'.join(inner_path.parts)}")
    clean.note_removed(kind, inner_path.as_posix(), reason, freed_bytes)


def delete_set_aside(clean: CleanUp, root: Path) -> None:
    """Delete what this or any earlier clean-up of any profile has set aside, also a killed one."""
    if clean.dry_run or not root.is_dir():
        return
    # Two clean-ups find the same things, so the second waits until the first is done.
    with clean.noting(), FileLock(root / ".deletion.lock"):
        for aside in sorted(root.glob(f"{_PREFIX}*")):
            # What can't be deleted now is tried again next time.
            with clean.noting():
                if aside.is_dir() and not aside.is_symlink():
                    _delete(aside)


def _delete(folder: Path) -> None:
    # What lies in a read-only folder could not be deleted.
    for inner_folder, _, _ in os.walk(folder):
        Path(inner_folder).chmod(0o700)
    shutil.rmtree(folder)


def remove_datasets(clean: CleanUp, references: str) -> None:
    """Set aside old versions of the dataset that the text `references` does not name.

    The newest stays: it has all splits.
    """
    profile = clean.profile
    root = tenant_folder(profile).resolve()
    days = profile.retention.dataset_days
    if not root.is_dir() or days is None:
        return
    # No version is published meanwhile.
    with FileLock(root / LOCK):
        versions = versions_of(profile)
        reasons = _reasons_to_keep(clean, versions, references, days)
        # A version that stays can still be compared with its parent.
        parents = {version.parent for version in versions if version.id in reasons}
        for version in versions:
            if version.id in reasons:
                clean.note_kept("dataset version", version.id, reasons[version.id])
            elif version.id in parents:
                clean.note_kept("dataset version", version.id, "one that stays came of it")
            else:
                reason = f"made {clean.age(datetime.fromisoformat(version.created))} ago"
                set_aside(clean, "dataset version", version.directory, reason, root)


def _reasons_to_keep(
    clean: CleanUp, versions: list[Version], references: str, days: float
) -> dict[str, str]:
    """Why versions stay for their own sake, by their ids; `versions` has the newest first."""
    training = last_training(clean.profile)
    reasons: dict[str, str] = {}
    for version in versions:
        if version is versions[0]:
            reasons[version.id] = "is the newest"
        elif training and training.version == version.id:
            reasons[version.id] = "was trained on last"
        elif version.id in references:
            reasons[version.id] = "a run or a registered model uses it"
        elif not clean.is_past(datetime.fromisoformat(version.created), days):
            reasons[version.id] = "is young enough"
    return reasons


def remove_logs(clean: CleanUp) -> None:
    """Delete logs that nobody has written to for as long as `retention.log_days` says."""
    folder = clean.profile.paths.state.resolve() / "logs"
    for file in sorted(folder.glob("**/*.log*")):
        # Another profile's clean-up may be quicker, or the log may be renamed.
        with suppress(FileNotFoundError):
            _remove_log(clean, file, folder)


def _remove_log(clean: CleanUp, file: Path, folder: Path) -> None:
    status = file.lstat()
    written = datetime.fromtimestamp(status.st_mtime, UTC)
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file or not clean.is_past(written, clean.profile.retention.log_days):
        return
    # `Processes` shares a lock on the log of each process that it started, for as long as that
    # runs.
    if is_held(file, shared=True):
        return
    if not clean.dry_run:
        file.unlink()
    name = file.relative_to(folder).as_posix()
    reason = f"last written {clean.age(written)} ago"
    clean.note_removed("log", name, reason, _freed_by(status))


def bytes_of(path: Path) -> int:
    """The bytes that the disk gets back once `path` is removed.

    A file that has another hard link gives nothing.
    """
    return sum(map(_freed_by, file_stats(path)))


def _freed_by(file: os.stat_result) -> int:
    return file.st_blocks * BLOCK_BYTES if file.st_nlink == 1 else 0
