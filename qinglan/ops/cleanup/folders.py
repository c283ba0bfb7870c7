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
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qinglan.config import Profile, Retention
from qinglan.data.versions import LATEST, LOCK, last_training, tenant_folder, versions_of
from qinglan.errors import ArtifactError
from qinglan.ops.cleanup.records import Kept, Kind, Removed
from qinglan.runs.artifacts import MANIFEST
from qinglan.runs.disk_space import file_stats
from qinglan.runs.locks import is_held
from qinglan.runs.run import RUN_FILE, is_running, run_folders
from qinglan.runs.schema_version import check_version
from qinglan.training.engines.progress import TRACKER

PREFIX = ".removing-"
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_CHECKPOINT = re.compile(r"(checkpoint-|global_step_)\d+")
_SUPERSEDED = re.compile(r".+\.superseded-\d+")


@dataclass(frozen=True)
class RunFolder:
    directory: Path
    state: Mapping[str, Any]
    """run.json; empty where it can't be read, and then the profile is None."""
    active: datetime
    """When anything in it was last written."""

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
        files = {path for pattern in ("*.json", f"*/{MANIFEST}") for path in self.directory.glob(pattern)}
        return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(files))


@dataclass
class RunPlan:
    """What becomes of the run folders, by their names."""

    folders: dict[str, RunFolder]
    kept: dict[str, str] = field(default_factory=dict)
    """Why: those of other profiles too."""
    to_remove: dict[str, str] = field(default_factory=dict)


def plan(profile: Profile, running: Collection[str], registered: Mapping[str, str], now: datetime) -> RunPlan:
    """Decide about every run under `paths.runs`; `registered` has by a version's label the text that names its runs."""
    root = profile.paths.runs.resolve()
    found = RunPlan({each.directory.name: each for each in read_folders(root)})
    latest = (root / "latest").resolve().name
    needed = {name: label for label, references in registered.items() for name in named_in(references, found.folders)}
    newer: Counter[str] = Counter()  # finished runs by flow
    for name, each in found.folders.items():  # the newest first
        flow, keep = each.finished_flow, "is young enough"
        if not each.state:
            keep = f"{RUN_FILE} can't be read"
        elif each.profile != profile.name:
            keep = f"is of profile {each.profile}"
        elif name in needed:
            keep = f"{needed[name]} was made of it"
        elif name in running:
            keep = "is running"
        elif name == latest:
            keep = "is the latest"
        elif tracking_of(each.state) not in (None, profile.tracking_uri):
            keep = "was tracked in another MLflow, whose registry is not known here"
        elif flow is not None and not newer[flow]:
            keep = f"is the newest {flow}"
        elif why := _too_old(each, newer[flow or ""], profile.retention, now):
            found.to_remove[name] = why
        if name not in found.to_remove:
            found.kept[name] = keep
        if flow is not None and each.profile == profile.name:
            newer[flow] += 1
    _keep_what_is_used(found)
    return found


def read_folders(root: Path) -> Iterator[RunFolder]:
    """Every run below, the newest first."""
    for directory in run_folders(root):
        try:
            state = check_version(json.loads((directory / RUN_FILE).read_bytes()), directory / RUN_FILE)
        except FileNotFoundError:  # somebody deletes the run
            continue
        except (OSError, ValueError, AttributeError, ArtifactError):  # no object, or a newer Qinglan's
            state = {}
        yield RunFolder(directory, state, _last_written(directory))


def named_in(text: str, names: Collection[str]) -> set[str]:
    """Those of the runs that are named there."""
    own = {name for name in names if not RUN_ID.fullmatch(name) and name in text}  # of runs that were renamed
    return {name for name in RUN_ID.findall(text) if name in names} | own


def tracking_of(state: Mapping[str, Any]) -> str | None:
    """Where a run was tracked, by its own profile; None where it does not say."""
    with suppress(KeyError, TypeError):
        profile = state["profile"]
        return str(profile["tracking"]["uri"] or f"sqlite:///{Path(profile['paths']['state']).resolve() / 'mlflow.db'}")
    return None


def remove_runs(found: RunPlan, root: Path, *, dry_run: bool) -> Iterator[Removed]:
    """Set aside runs; call this and what follows with `removal_lock(exclusive=True)`."""
    for name, why in found.to_remove.items():
        try:
            with nullcontext() if dry_run else FileLock(root / name / ".lock").acquire(blocking=False):
                removed = _remove("run", root / name, why, root, dry_run=dry_run)
        except (Timeout, PermissionError):  # somebody has just continued it, or it is another user's
            found.kept[name] = "is running"
            continue
        yield removed


def remove_parts(
    found: RunPlan, root: Path, profile: Profile, now: datetime, *, dry_run: bool
) -> Iterator[Removed | OSError]:
    """Set aside parts of this profile's runs that stay and are not running; the error where one can't be moved."""
    days = {"checkpoint": profile.retention.checkpoint_days, "superseded": profile.retention.superseded_days}
    references = "\n".join(each.references for each in found.folders.values())
    for run in (found.folders[name] for name in found.kept):
        if run.profile != profile.name or is_running(run.directory):
            continue
        for kind, path, written in _parts_of(run):
            if path.relative_to(root).as_posix() in references or not is_past(written, days[kind], now):
                continue
            try:
                if not dry_run:  # verl's note which checkpoint is the newest must not outlive it
                    (path.parent / TRACKER).unlink(missing_ok=True)
                yield _remove(kind, path, f"last work on it {age(written, now)} ago", root, dry_run=dry_run)
            except OSError as error:
                yield error


def _parts_of(run: RunFolder) -> Iterator[tuple[Kind, Path, datetime]]:
    """The folders in a run that may go, and when they were last written."""
    for stage in _own_folders(run.directory):
        if _SUPERSEDED.fullmatch(stage.name):
            yield "superseded", stage, _last_written(stage)
        checkpoints = stage / "checkpoints"
        if run.finished_flow is not None and not checkpoints.is_symlink():
            found = (path for path in _own_folders(checkpoints) if _CHECKPOINT.fullmatch(path.name))
            yield from (("checkpoint", path, run.active) for path in found)


def remove_never_started(root: Path, profile: Profile, now: datetime, *, dry_run: bool) -> Iterator[Removed]:
    """Set aside folders of any profile's runs that never began, as on a full disk: nothing but a lock lies in them."""
    for each in _own_folders(root):
        made = datetime.fromtimestamp(each.stat().st_mtime, UTC)
        is_old = RUN_ID.fullmatch(each.name) and is_past(made, profile.retention.unfinished_days, now)
        is_empty = is_old and {entry.name for entry in each.iterdir()} <= {".lock", f"{RUN_FILE}.partial"}
        if is_empty and not is_running(each):
            yield _remove("run", each, f"never began, {age(made, now)} ago", root, dry_run=dry_run)


def _remove(kind: Kind, path: Path, why: str, root: Path, *, dry_run: bool) -> Removed:
    removed = Removed(kind=kind, name=path.relative_to(root).as_posix(), why=why, bytes=bytes_of(path))
    if not dry_run:
        set_aside(path, root)
    return removed


def _too_old(each: RunFolder, newer: int, policy: Retention, now: datetime) -> str | None:
    """Why it goes, if it does; `newer` counts the newer finished runs of its flow."""
    if each.finished_flow is None:
        interrupted = f"was interrupted {age(each.active, now)} ago"
        return interrupted if is_past(each.active, policy.unfinished_days, now) else None
    if is_past(each.active, policy.run_days, now):
        return f"finished {age(each.active, now)} ago"
    if policy.runs_per_flow is not None and newer >= policy.runs_per_flow:
        return f"{policy.runs_per_flow} newer runs of {each.finished_flow}"
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
    """Set aside old versions of the dataset that the text `references` does not name; each has its own splits."""
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
            else:
                why = f"made {age(datetime.fromisoformat(version.created), now)} ago"
                yield _remove("dataset", version.directory, why, root, dry_run=dry_run)


def remove_logs(profile: Profile, now: datetime, *, dry_run: bool) -> Iterator[Removed]:
    """Delete logs that nobody has written to for as long as `retention.log_days` says."""
    days, folder = profile.retention.log_days, profile.paths.state.resolve() / "logs"
    if days is None or not folder.is_dir():
        return
    for file in sorted(folder.glob("**/*.log*")):
        with suppress(FileNotFoundError):  # another profile's clean-up was quicker, or the log was renamed
            status = file.lstat()
            written = datetime.fromtimestamp(status.st_mtime, UTC)
            # `Processes` shares a lock on the log of each process that it started, for as long as that runs.
            if not stat.S_ISREG(status.st_mode) or not is_past(written, days, now) or is_held(file, shared=True):
                continue
            if not dry_run:
                file.unlink()
            name, old = file.relative_to(folder).as_posix(), f"last written {age(written, now)} ago"
            yield Removed(kind="log", name=name, why=old, bytes=freed_by(status))


def bytes_of(path: Path) -> int:
    """What the disk gets back once `path` is removed; a file that has another hard link gives nothing."""
    return sum(map(freed_by, file_stats(path)))


def freed_by(file: os.stat_result) -> int:
    return file.st_blocks * 512 if file.st_nlink == 1 else 0


def set_aside(path: Path, root: Path) -> Path:
    """Rename a folder so that it is no longer found; `root` is the folder above all, on the same file system."""
    return path.rename(root / f"{PREFIX}{'.'.join(path.relative_to(root).parts)}")


def delete(aside: Path) -> None:
    """Delete what was set aside, also where a file or folder is read-only."""
    for folder, _, _ in os.walk(aside):
        Path(folder).chmod(0o700)
    shutil.rmtree(aside)
