"""Folders of runs: which of them stay, and why; the others are set aside.

Run ids are unique, and whatever uses a run's files names its id: the manifests of another run, a
registered version's tags. So a text search finds what is needed, also in manifests of other
versions of Qinglan and after a move.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from qinglan.ops.cleanup.folders import (
    RunFolder,
    last_written,
    own_folders,
    read_folders,
    set_aside,
)
from qinglan.ops.cleanup.records import CleanUp, Kind
from qinglan.runs.run import LOCK_FILE, RUN_FILE, is_running
from qinglan.training.engines.progress import TRACKER

_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")
_CHECKPOINT = re.compile(r"(checkpoint-|global_step_)\d+")
_SUPERSEDED = re.compile(r".+\.superseded-\d+")


@dataclass
class RunPlan:
    """The decision about each run folder, by its name."""

    folders: dict[str, RunFolder]
    to_keep: dict[str, str] = field(default_factory=dict)
    """Reasons why runs stay, those of other profiles too."""
    to_remove: dict[str, str] = field(default_factory=dict)
    """Reasons why runs go."""


def plan(
    clean: CleanUp, root: Path, running_names: Collection[str], registered: Mapping[str, str]
) -> RunPlan:
    """Decide about every run under `root`.

    `registered` has by a version's label the text that names its runs.
    """
    run_plan = RunPlan({run.directory.name: run for run in read_folders(root)})
    uses = _uses(root, run_plan.folders, running_names, registered)
    # The newest run comes first, so these count the newer finished runs by flow.
    newer_counts: Counter[str] = Counter()
    for name, run in run_plan.folders.items():
        flow = run.finished_flow
        newer_count = 0 if flow is None else newer_counts[flow]
        reason_to_keep = _reason_to_keep(clean, run, uses, newer_count)
        reason_to_remove = None
        if reason_to_keep is None:
            reason_to_remove = _reason_to_remove(clean, run, newer_count)
        if reason_to_remove is None:
            run_plan.to_keep[name] = reason_to_keep or "is young enough"
        else:
            run_plan.to_remove[name] = reason_to_remove
        if flow is not None and run.profile == clean.profile.name:
            newer_counts[flow] += 1
    _keep_what_is_used(run_plan)
    return run_plan


def _uses(
    root: Path,
    names: Collection[str],
    running_names: Collection[str],
    registered: Mapping[str, str],
) -> dict[str, str]:
    """The uses of runs that no other run makes of them, by the runs' names."""
    # A later use is a stronger reason than an earlier one.
    uses = {(root / "latest").resolve().name: "is the latest"}
    uses.update(dict.fromkeys(running_names, "is running"))
    for label, references in registered.items():
        uses.update(dict.fromkeys(named_in(references, names), f"{label} was made of it"))
    return uses


def _reason_to_keep(
    clean: CleanUp, run: RunFolder, uses: Mapping[str, str], newer_count: int
) -> str | None:
    """Why a run stays whatever its age; None where its age decides.

    `newer_count` counts the newer finished runs of its flow.
    """
    profile = clean.profile
    if not run.state:
        return f"{RUN_FILE} can't be read"
    if run.profile != profile.name:
        return f"is of profile {run.profile}"
    if run.directory.name in uses:
        return uses[run.directory.name]
    if tracking_of(run.state) not in (None, profile.tracking_uri):
        return "was tracked in another MLflow, whose registry is not known here"
    if run.finished_flow is not None and newer_count == 0:
        return f"is the newest {run.finished_flow}"
    return None


def _reason_to_remove(clean: CleanUp, run: RunFolder, newer_count: int) -> str | None:
    """Why a run that nothing else keeps goes; None where it is young enough.

    `newer_count` counts the newer finished runs of its flow.
    """
    retention = clean.profile.retention
    age = clean.age(run.active)
    if run.finished_flow is None:
        is_given_up = clean.is_past(run.active, retention.unfinished_days)
        return f"was interrupted {age} ago" if is_given_up else None
    if clean.is_past(run.active, retention.run_days):
        return f"finished {age} ago"
    if retention.runs_per_flow is not None and newer_count >= retention.runs_per_flow:
        return f"{retention.runs_per_flow} newer runs of {run.finished_flow}"
    return None


def _keep_what_is_used(run_plan: RunPlan) -> None:
    """Keep the runs that are named by one that stays, and so on."""
    unvisited = list(run_plan.to_keep)
    while unvisited:
        user = unvisited.pop()
        references = run_plan.folders[user].references
        for name in sorted(named_in(references, run_plan.to_remove.keys())):
            del run_plan.to_remove[name]
            run_plan.to_keep[name] = f"run {user} uses it"
            unvisited.append(name)


def named_in(text: str, names: Collection[str]) -> set[str]:
    """The runs, out of these, that a text names."""
    ids = {run_id for run_id in _RUN_ID.findall(text) if run_id in names}
    # The folder of a run may have been renamed.
    other_names = {name for name in names if not _RUN_ID.fullmatch(name) and name in text}
    return ids | other_names


def tracking_of(state: Mapping[str, Any]) -> str | None:
    """The MLflow that a run was tracked in, by its own profile; None where it does not say."""
    with suppress(KeyError, TypeError):
        profile = state["profile"]
        uri = profile["tracking"]["uri"]
        if uri:
            return str(uri)
        return f"sqlite:///{Path(profile['paths']['state']).resolve() / 'mlflow.db'}"
    return None


def remove_runs(clean: CleanUp, run_plan: RunPlan, root: Path) -> None:
    """Set aside runs; call this and what follows with `removal_lock(exclusive=True)`."""
    for name, reason in run_plan.to_remove.items():
        directory = root / name
        try:
            with _run_lock(clean, directory):
                set_aside(clean, "run", directory, reason, root)
        except (Timeout, PermissionError):
            # Somebody has just continued it, or it is another user's.
            run_plan.to_keep[name] = "is running"


@contextmanager
def _run_lock(clean: CleanUp, directory: Path) -> Iterator[None]:
    """Hold a run's lock, but write nothing in a dry run; raises Timeout where the run runs."""
    if clean.dry_run:
        yield
        return
    with FileLock(directory / LOCK_FILE).acquire(blocking=False):
        yield


def remove_parts(clean: CleanUp, run_plan: RunPlan, root: Path) -> None:
    """Set aside parts of this profile's runs that stay and are not running."""
    retention = clean.profile.retention
    days = {"checkpoint": retention.checkpoint_days, "superseded stage": retention.superseded_days}
    references = "\n".join(run.references for run in run_plan.folders.values())
    for name in run_plan.to_keep:
        run = run_plan.folders[name]
        if run.profile != clean.profile.name or is_running(run.directory):
            continue
        for kind, path, written in _parts_of(run):
            is_used = path.relative_to(root).as_posix() in references
            if is_used or not clean.is_past(written, days[kind]):
                continue
            with clean.noting():
                if not clean.dry_run:
                    # verl's note which checkpoint is the newest must not outlive it.
                    (path.parent / TRACKER).unlink(missing_ok=True)
                set_aside(clean, kind, path, f"last work on it {clean.age(written)} ago", root)


def _parts_of(run: RunFolder) -> Iterator[tuple[Kind, Path, datetime]]:
    """The folders in a run that may go, and when they were last written."""
    for stage in own_folders(run.directory):
        if _SUPERSEDED.fullmatch(stage.name):
            yield "superseded stage", stage, last_written(stage)
        checkpoints = stage / "checkpoints"
        # An unfinished run may go on from its checkpoints.
        if run.finished_flow is None or checkpoints.is_symlink():
            continue
        for path in own_folders(checkpoints):
            if _CHECKPOINT.fullmatch(path.name):
                yield "checkpoint", path, run.active


def remove_never_started(clean: CleanUp, root: Path) -> None:
    """Set aside folders of any profile's runs that never began, as on a full disk.

    Nothing but a lock lies in them.
    """
    days = clean.profile.retention.unfinished_days
    for folder in own_folders(root):
        made_at = datetime.fromtimestamp(folder.stat().st_mtime, UTC)
        if not _RUN_ID.fullmatch(folder.name) or not clean.is_past(made_at, days):
            continue
        names = {path.name for path in folder.iterdir()}
        if names <= {LOCK_FILE, f"{RUN_FILE}.partial"} and not is_running(folder):
            set_aside(clean, "run", folder, f"never began, {clean.age(made_at)} ago", root)
