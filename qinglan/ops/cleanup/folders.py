"""Which folders of runs and dataset versions and which logs stay, and why; and how a folder is
removed.

Run ids are unique, and whatever uses a run's files names its id: the manifests of another run, a
registered version's tags. So a text search finds what is needed, also in manifests of other
versions of Qinglan and after a move. A folder is renamed first, so that a kill leaves no half of
one under its own name, then deleted. Links are never followed.
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
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qinglan.data.versions import LOCK, last_training, tenant_folder, versions_of
from qinglan.errors import ArtifactError
from qinglan.ops.cleanup.records import CleanUp, Kind
from qinglan.runs.artifacts import MANIFEST
from qinglan.runs.disk_space import file_stats
from qinglan.runs.locks import is_held
from qinglan.runs.run import RUN_FILE, is_running, run_folders
from qinglan.runs.schema_version import check_version
from qinglan.training.engines.progress import TRACKER

_PREFIX = ".removing-"
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
        files = {
            path for pattern in ("*.json", f"*/{MANIFEST}") for path in self.directory.glob(pattern)
        }
        return "\n".join(
            path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)
        )


@dataclass
class RunPlan:
    """What becomes of the run folders, by their names."""

    folders: dict[str, RunFolder]
    kept: dict[str, str] = field(default_factory=dict)
    """Why: those of other profiles too."""
    to_remove: dict[str, str] = field(default_factory=dict)


def plan(
    clean: CleanUp, root: Path, running: Collection[str], registered: Mapping[str, str]
) -> RunPlan:
    """Decide about every run under `root`; `registered` has by a version's label the text that
    names its runs."""
    profile = clean.profile
    found = RunPlan({each.directory.name: each for each in read_folders(root)})
    latest = (root / "latest").resolve().name
    needed = {
        name: label
        for label, references in registered.items()
        for name in named_in(references, found.folders)
    }
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
        elif why := _too_old(clean, each, newer[flow or ""]):
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
            state = check_version(
                json.loads((directory / RUN_FILE).read_bytes()), directory / RUN_FILE
            )
        except FileNotFoundError:  # somebody deletes the run
            continue
        except (
            OSError,
            ValueError,
            AttributeError,
            ArtifactError,
        ):  # no object, or a newer Qinglan's
            state = {}
        yield RunFolder(directory, state, _last_written(directory))


def named_in(text: str, names: Collection[str]) -> set[str]:
    """Those of the runs that are named there."""
    own = {
        name for name in names if not RUN_ID.fullmatch(name) and name in text
    }  # of runs that were renamed
    return {name for name in RUN_ID.findall(text) if name in names} | own


def tracking_of(state: Mapping[str, Any]) -> str | None:
    """Where a run was tracked, by its own profile; None where it does not say."""
    with suppress(KeyError, TypeError):
        profile = state["profile"]
        return str(
            profile["tracking"]["uri"]
            or f"sqlite:///{Path(profile['paths']['state']).resolve() / 'mlflow.db'}"
        )
    return None


def remove_runs(clean: CleanUp, found: RunPlan, root: Path) -> None:
    """Set aside runs; call this and what follows with `removal_lock(exclusive=True)`."""
    for name, why in found.to_remove.items():
        try:
            with (
                nullcontext()
                if clean.dry_run
                else FileLock(root / name / ".lock").acquire(blocking=False)
            ):
                _remove(clean, "run", root / name, why, root)
        except (
            Timeout,
            PermissionError,
        ):  # somebody has just continued it, or it is another user's
            found.kept[name] = "is running"


def remove_parts(clean: CleanUp, found: RunPlan, root: Path) -> None:
    """Set aside parts of this profile's runs that stay and are not running."""
    retention = clean.profile.retention
    days = {"checkpoint": retention.checkpoint_days, "superseded stage": retention.superseded_days}
    references = "\n".join(each.references for each in found.folders.values())
    for run in (found.folders[name] for name in found.kept):
        if run.profile != clean.profile.name or is_running(run.directory):
            continue
        for kind, path, written in _parts_of(run):
            if path.relative_to(root).as_posix() in references or not clean.is_past(
                written, days[kind]
            ):
                continue
            with clean.noting():
                if (
                    not clean.dry_run
                ):  # verl's note which checkpoint is the newest must not outlive it
                    (path.parent / TRACKER).unlink(missing_ok=True)
                _remove(clean, kind, path, f"last work on it {clean.age(written)} ago", root)


def _parts_of(run: RunFolder) -> Iterator[tuple[Kind, Path, datetime]]:
    """The folders in a run that may go, and when they were last written."""
    for stage in _own_folders(run.directory):
        if _SUPERSEDED.fullmatch(stage.name):
            yield "superseded stage", stage, _last_written(stage)
        checkpoints = stage / "checkpoints"
        if run.finished_flow is not None and not checkpoints.is_symlink():
            for path in _own_folders(checkpoints):
                if _CHECKPOINT.fullmatch(path.name):
                    yield "checkpoint", path, run.active


def remove_never_started(clean: CleanUp, root: Path) -> None:
    """Set aside folders of any profile's runs that never began, as on a full disk: nothing but a
    lock lies in them."""
    for each in _own_folders(root):
        made = datetime.fromtimestamp(each.stat().st_mtime, UTC)
        is_old = RUN_ID.fullmatch(each.name) and clean.is_past(
            made, clean.profile.retention.unfinished_days
        )
        is_empty = is_old and {entry.name for entry in each.iterdir()} <= {
            ".lock",
            f"{RUN_FILE}.partial",
        }
        if is_empty and not is_running(each):
            _remove(clean, "run", each, f"never began, {clean.age(made)} ago", root)


def _remove(clean: CleanUp, kind: Kind, path: Path, why: str, root: Path) -> None:
    """Rename a folder so that it is no longer found; `root` is the folder above all, on the same
    file system."""
    freed_bytes = bytes_of(path)
    if not clean.dry_run:
        path.rename(root / f"{_PREFIX}{'.'.join(path.relative_to(root).parts)}")
    clean.note_removed(kind, path.relative_to(root).as_posix(), why, freed_bytes)


def _too_old(clean: CleanUp, each: RunFolder, newer: int) -> str | None:
    """Why it goes, if it does; `newer` counts the newer finished runs of its flow."""
    retention = clean.profile.retention
    if each.finished_flow is None:
        interrupted = f"was interrupted {clean.age(each.active)} ago"
        return interrupted if clean.is_past(each.active, retention.unfinished_days) else None
    if clean.is_past(each.active, retention.run_days):
        return f"finished {clean.age(each.active)} ago"
    if retention.runs_per_flow is not None and newer >= retention.runs_per_flow:
        return f"{retention.runs_per_flow} newer runs of {each.finished_flow}"
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
    """Of what lies in it, and in the folders in it, which a running run may rename and remove
    meanwhile."""
    newest = 0.0
    for folder in (directory, *_own_folders(directory)):
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for each in entries:
                with suppress(FileNotFoundError):
                    if each.name != ".lock" and each.is_file(follow_symlinks=False):
                        newest = max(newest, each.stat(follow_symlinks=False).st_mtime)
    return datetime.fromtimestamp(newest, UTC)


def remove_datasets(clean: CleanUp, references: str) -> None:
    """Set aside old versions of the dataset that the text `references` does not name; the newest
    has all splits."""
    profile, days = clean.profile, clean.profile.retention.dataset_days
    root = tenant_folder(profile).resolve()
    if not root.is_dir() or days is None:
        return
    with FileLock(root / LOCK):  # no version is published meanwhile
        versions, trained = versions_of(profile), last_training(profile)
        kept: dict[str, str] = {}
        for version in versions:
            if version is versions[0]:
                kept[version.id] = "is the newest"
            elif trained and trained.version == version.id:
                kept[version.id] = "was trained on last"
            elif version.id in references:
                kept[version.id] = "a run or a registered model uses it"
            elif not clean.is_past(datetime.fromisoformat(version.created), days):
                kept[version.id] = "is young enough"
        # A version that stays can still be compared with its parent.
        origins = {version.parent for version in versions if version.id in kept}
        for version in versions:
            if why := kept.get(version.id) or (
                "one that stays came of it" if version.id in origins else ""
            ):
                clean.note_kept("dataset version", version.id, why)
            else:
                made = f"made {clean.age(datetime.fromisoformat(version.created))} ago"
                _remove(clean, "dataset version", version.directory, made, root)


def remove_logs(clean: CleanUp) -> None:
    """Delete logs that nobody has written to for as long as `retention.log_days` says."""
    folder = clean.profile.paths.state.resolve() / "logs"
    for file in sorted(folder.glob("**/*.log*")):
        with suppress(
            FileNotFoundError
        ):  # another profile's clean-up was quicker, or the log was renamed
            status = file.lstat()
            written = datetime.fromtimestamp(status.st_mtime, UTC)
            is_old = stat.S_ISREG(status.st_mode) and clean.is_past(
                written, clean.profile.retention.log_days
            )
            # `Processes` shares a lock on the log of each process that it started, for as long as
            # that runs.
            if not is_old or is_held(file, shared=True):
                continue
            if not clean.dry_run:
                file.unlink()
            name = file.relative_to(folder).as_posix()
            clean.note_removed(
                "log", name, f"last written {clean.age(written)} ago", _freed_by(status)
            )


def bytes_of(path: Path) -> int:
    """What the disk gets back once `path` is removed; a file that has another hard link gives
    nothing."""
    return sum(map(_freed_by, file_stats(path)))


def _freed_by(file: os.stat_result) -> int:
    return file.st_blocks * 512 if file.st_nlink == 1 else 0


def delete_set_aside(clean: CleanUp, root: Path) -> None:
    """What this or any earlier clean-up has set aside, also one that was killed, of any profile."""
    if clean.dry_run or not root.is_dir():
        return
    # Two clean-ups find the same things, so the second waits until the first is done.
    with clean.noting(), FileLock(root / ".deletion.lock"):
        for aside in sorted(root.glob(f"{_PREFIX}*")):
            with clean.noting():  # what can't be deleted now is tried again next time
                if aside.is_dir() and not aside.is_symlink():
                    for folder, _, _ in os.walk(aside):
                        Path(folder).chmod(0o700)  # else what is in a read-only one stays
                    shutil.rmtree(aside)
