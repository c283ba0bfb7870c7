"""Which folders of runs and dataset versions and which logs stay, and why; and how a folder is removed.

Run ids are unique, and whatever uses a run's files names its id: the manifests of another run, a registered version's
tags. So a text search finds what is needed, also in manifests of other versions of Qinglan and after a move.

A folder is renamed first, so that a kill leaves no half of one under its own name, then deleted. It is renamed in its
own folder, as a full disk may have no space for another. Symbolic links are never followed.
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock, Timeout

from qinglan.config import Profile, Retention
from qinglan.data.versions import LATEST, LOCK, last_training, tenant_folder, versions_of
from qinglan.errors import ArtifactError
from qinglan.ops.cleanup.records import Kept, Removed
from qinglan.runs.artifacts import MANIFEST
from qinglan.runs.disk_space import file_stats
from qinglan.runs.locks import is_held
from qinglan.runs.run import RUN_FILE, is_running
from qinglan.runs.schema_version import check_version
from qinglan.training.engines.progress import TRACKER

PREFIX = ".removing-"
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_CHECKPOINT = re.compile(r"(checkpoint-|global_step_)\d+")
_SUPERSEDED = re.compile(r".+\.superseded-\d+")
_NAMING_FILES = (RUN_FILE, "*.json", f"*/{MANIFEST}")


@dataclass(frozen=True)
class RunFolder:
    """One run on disk."""

    name: str
    directory: Path
    state: Mapping[str, Any]
    """run.json; empty where it can't be read, and then the profile is None."""
    profile: str | None
    flow: str
    finished: bool
    active: datetime
    """When anything in it was last written."""

    @cached_property
    def references(self) -> str:
        """The text of run.json and the manifests, which names the runs that this one uses."""
        files = {path for pattern in _NAMING_FILES for path in self.directory.glob(pattern)}
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(files))


class RunPart(NamedTuple):
    """A folder in a run that stays."""

    kind: Literal["checkpoint", "superseded"]
    path: Path
    written: datetime


@dataclass
class RunPlan:
    """What becomes of the run folders."""

    folders: dict[str, RunFolder]
    kept: dict[str, str] = field(default_factory=dict)
    """By run, why: those of other profiles too."""
    to_remove: dict[str, str] = field(default_factory=dict)


def plan(profile: Profile, running: Collection[str], registered: Mapping[str, str], now: datetime) -> RunPlan:
    """Decide about every run under `paths.runs`.

    Args:
        running: names of runs that were running before `registered` was read.
        registered: for the label of each version, the text that names its runs.
    """
    root, policy = profile.paths.runs.resolve(), profile.retention
    found = RunPlan({each.name: each for each in read_folders(root)})
    finished: dict[str, list[str]] = {}
    for each in found.folders.values():  # the newest first
        if each.profile == profile.name and each.finished:
            finished.setdefault(each.flow, []).append(each.name)
    latest = (root / "latest").resolve().name
    needed = {
        run_id: label for label, references in registered.items() for run_id in named_in(references, found.folders)
    }
    for each in found.folders.values():
        if not each.state:
            found.kept[each.name] = f"{RUN_FILE} can't be read"
        elif each.profile != profile.name:
            found.kept[each.name] = f"is of profile {each.profile}"
        elif each.name in needed:
            found.kept[each.name] = f"{needed[each.name]} was made of it"
        elif each.name in running:
            found.kept[each.name] = "is running"
        elif each.name == latest:
            found.kept[each.name] = "is the latest"
        elif tracking_of(each.state) not in (None, profile.tracking_uri):
            found.kept[each.name] = "was tracked in another MLflow, whose registry is not known here"
        elif each.finished and finished[each.flow][0] == each.name:
            found.kept[each.name] = f"is the newest {each.flow}"
        elif why := _too_old(each, finished.get(each.flow, []), policy, now):
            found.to_remove[each.name] = why
        else:
            found.kept[each.name] = "is young enough"
    _keep_what_is_used(found)
    return found


def read_folders(root: Path) -> Iterator[RunFolder]:
    """Every run below, the newest first; links and what is about to be removed left out."""
    for path in sorted(root.glob(f"*/{RUN_FILE}"), reverse=True):
        directory = path.parent
        if directory.is_symlink() or directory.name.startswith("."):
            continue
        try:
            state = check_version(json.loads(path.read_text(encoding="utf-8")), path)
        except FileNotFoundError:  # somebody deletes the run
            continue
        except (OSError, ValueError, AttributeError, ArtifactError):  # no object, or a newer Qinglan's
            state = {}
        yield RunFolder(
            name=directory.name,
            directory=directory,
            state=state,
            profile=state.get("profile_name"),
            flow=str(state.get("flow", "")),
            finished=bool(state.get("finished")),
            active=_last_written(directory),
        )


def named_in(text: str, names: Collection[str]) -> set[str]:
    """Those of the runs that are named there."""
    own = {name for name in names if not RUN_ID.fullmatch(name) and name in text}  # of runs that were renamed
    return {name for name in RUN_ID.findall(text) if name in names} | own


def tracking_of(state: Mapping[str, Any]) -> str | None:
    """Where a run was tracked, by its own profile; None where it does not say."""
    try:
        profile = state["profile"]
        return str(profile["tracking"]["uri"] or f"sqlite:///{Path(profile['paths']['state']).resolve() / 'mlflow.db'}")
    except (KeyError, TypeError):
        return None


def remove_runs(found: RunPlan, root: Path, *, dry_run: bool) -> Iterator[Removed]:
    """Set aside runs; call this and what follows with `removal_lock(exclusive=True)`."""
    for name, why in found.to_remove.items():
        directory = found.folders[name].directory
        removed = Removed(kind="run", name=name, why=why, bytes=bytes_of(directory))
        if not dry_run:
            try:
                with FileLock(directory / ".lock").acquire(blocking=False):
                    set_aside(directory, root)
            except (Timeout, PermissionError):  # somebody has just continued it, or it is another user's
                found.kept[name] = "is running"
                continue
        yield removed


def parts(found: RunPlan, profile: Profile, now: datetime) -> Iterator[RunPart]:
    """What may be removed from this profile's runs that stay and are not running."""
    days = {"checkpoint": profile.retention.checkpoint_days, "superseded": profile.retention.superseded_days}
    references = "\n".join(each.references for each in found.folders.values())
    for name in found.kept:
        each = found.folders[name]
        if each.profile != profile.name or is_running(each.directory):
            continue
        stages = [path for path in _own_folders(each.directory) if _SUPERSEDED.fullmatch(path.name)]
        found_parts = [RunPart("superseded", path, _last_written(path)) for path in stages]
        if each.finished:
            for folder in sorted(each.directory.glob("*/checkpoints")):
                if not folder.is_symlink() and not folder.parent.is_symlink():
                    checkpoints = [path for path in _own_folders(folder) if _CHECKPOINT.fullmatch(path.name)]
                    found_parts += [RunPart("checkpoint", path, each.active) for path in checkpoints]
        for part in found_parts:
            is_named = part.path.relative_to(each.directory.parent).as_posix() in references
            if not is_named and is_past(part.written, days[part.kind], now):
                yield part


def remove_stillborn(root: Path, profile: Profile, now: datetime, *, dry_run: bool) -> Iterator[Removed]:
    """Set aside folders of any profile's runs that never began, as on a full disk: nothing but a lock lies in them."""
    for each in _own_folders(root):
        if not RUN_ID.fullmatch(each.name):
            continue
        left = {entry.name for entry in each.iterdir()} - {".lock", f"{RUN_FILE}.partial"}
        made = datetime.fromtimestamp(each.stat().st_mtime, UTC)
        if left or not is_past(made, profile.retention.unfinished_days, now) or is_running(each):
            continue
        removed = Removed(kind="run", name=each.name, why=f"never began, {age(made, now)} ago", bytes=bytes_of(each))
        if not dry_run:
            set_aside(each, root)
        yield removed


def remove_part(part: RunPart, root: Path, now: datetime, *, dry_run: bool) -> Removed:
    name, why = part.path.relative_to(root).as_posix(), f"last work on it {age(part.written, now)} ago"
    removed = Removed(kind=part.kind, name=name, why=why, bytes=bytes_of(part.path))
    if not dry_run:
        # verl's note which checkpoint is the newest must not outlive it.
        (part.path.parent / TRACKER).unlink(missing_ok=True)
        set_aside(part.path, root)
    return removed


def _too_old(each: RunFolder, beside: list[str], policy: Retention, now: datetime) -> str | None:
    if not each.finished:
        interrupted = f"was interrupted {age(each.active, now)} ago"
        return interrupted if is_past(each.active, policy.unfinished_days, now) else None
    if is_past(each.active, policy.run_days, now):
        return f"finished {age(each.active, now)} ago"
    if policy.runs_per_flow is not None and beside.index(each.name) >= policy.runs_per_flow:
        return f"{policy.runs_per_flow} newer runs of {each.flow}"
    return None


def _keep_what_is_used(found: RunPlan) -> None:
    """Runs named by one that stays stay too, and so on."""
    ahead = list(found.kept)
    while ahead:
        user = ahead.pop()
        for name in sorted(named_in(found.folders[user].references, found.to_remove.keys())):
            del found.to_remove[name]
            found.kept[name] = f"run {user} uses it"
            ahead.append(name)


def _own_folders(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sorted(Path(each.path) for each in entries if each.is_dir(follow_symlinks=False))
    return []


def _last_written(directory: Path) -> datetime:
    """Of what lies in it, and in the folders in it, which a running run may rename and remove meanwhile."""
    newest = 0.0
    for folder in (directory, *_own_folders(directory)):
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for each in entries:
                with suppress(FileNotFoundError):
                    if each.name != ".lock" and each.is_file(follow_symlinks=False):
                        newest = max(newest, each.stat(follow_symlinks=False).st_mtime)
    return datetime.fromtimestamp(newest, UTC)


def is_past(written: datetime, days: float | None, now: datetime) -> bool:
    return days is not None and now - written >= timedelta(days=days)


def age(written: datetime, now: datetime) -> str:
    days = (now - written).days
    return "1 day" if days == 1 else f"{max(0, days)} days"


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


def bytes_of(path: Path) -> int:
    """What the disk gets back once `path` is removed; a file that has another hard link gives nothing."""
    return sum(map(freed_by, file_stats(path)))


def freed_by(file: os.stat_result) -> int:
    return file.st_blocks * 512 if file.st_nlink == 1 else 0


def set_aside(path: Path, root: Path) -> Path:
    """Rename a folder so that it is no longer found; `root` is the folder above all, on the same file system."""
    aside = root / f"{PREFIX}{'.'.join(path.relative_to(root).parts)}"
    path.rename(aside)
    return aside


def delete(aside: Path) -> None:
    """Delete what was set aside, also where a file or folder is read-only."""
    for folder, _, _ in os.walk(aside):
        Path(folder).chmod(0o700)
    shutil.rmtree(aside)
