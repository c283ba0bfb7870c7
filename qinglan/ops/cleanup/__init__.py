"""`qinglan clean-up`: what nobody needs any more goes, by the profile's `retention`; the ledger is never touched.

Only this profile's own. What is in the registry decides first: where it can't be read, no run and nothing in MLflow
is removed. Each kind of thing is looked at by itself, so that one that can't be reached does not hold up the others.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from qinglan.config import Profile
from qinglan.errors import QinglanError, first_line
from qinglan.ops.cleanup.datasets import remove_datasets
from qinglan.ops.cleanup.disposal import delete, deleting
from qinglan.ops.cleanup.logs import remove_logs
from qinglan.ops.cleanup.mlflow_runs import Group, Registered, Tracked
from qinglan.ops.cleanup.prefect_runs import remove_flow_runs
from qinglan.ops.cleanup.records import Cleaned, Kept, Removed
from qinglan.ops.cleanup.run_folders import (
    Plan,
    age,
    is_past,
    kept_of,
    named_in,
    names_at_work,
    parts,
    plan,
    remove_part,
    remove_runs,
    remove_stillborn,
)
from qinglan.ops.prefect.server import find_server
from qinglan.runs.locks import removal_lock

__all__ = ["Cleaned", "Kept", "Removed", "clean_up"]

Say = Callable[[str], object]


@dataclass
class _Sweep:
    """A clean-up under way."""

    profile: Profile
    dry_run: bool
    now: datetime
    say: Say
    removed: list[Removed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tell(self, removed: Removed) -> None:
        """Count it."""
        self.removed.append(removed)
        self.say(f"{'would remove ' if self.dry_run else ''}{removed.line}")

    def delete(self, folder: Path) -> None:
        """Whatever can't be deleted now is tried again next time."""
        with self.noting():
            delete(folder)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Go on after what can't be done, and say so."""
        try:
            yield
        except (QinglanError, OSError) as error:
            self.notes.append(first_line(error))
            self.say(f"not removed: {self.notes[-1]}")


def clean_up(profile: Profile, *, dry_run: bool, say: Say, now: datetime | None = None) -> Cleaned:
    """Remove what the profile's `retention` lets go.

    Args:
        dry_run: only say what would go.
        say: gets a line for each thing.
        now: what ages count to; this moment if not given.
    """
    sweep = _Sweep(profile, dry_run, now or datetime.now(UTC), say)
    with sweep.noting():
        _runs(sweep)
    if (days := profile.retention.flow_run_days) is not None:
        with sweep.noting():
            if server := find_server(profile.paths.state):
                for removed in remove_flow_runs(server, profile, days, sweep.now, dry_run=dry_run):
                    sweep.tell(removed)
    with sweep.noting():
        for removed in remove_logs(profile, sweep.now, dry_run=dry_run):
            sweep.tell(removed)
    return Cleaned(
        profile=profile.name,
        dry_run=dry_run,
        removed=tuple(sweep.removed),
        kept=tuple(sweep.kept),
        notes=tuple(sweep.notes),
    )


def _runs(sweep: _Sweep) -> None:
    """Run folders, then the datasets and MLflow's runs that none of those that stay needs."""
    root, tracked = sweep.profile.paths.runs.resolve(), Tracked(sweep.profile)
    root.mkdir(parents=True, exist_ok=True)
    try:
        with removal_lock(root, exclusive=True):
            tracked.require_database(root)
            at_work = names_at_work(root)
            registered = tracked.registered()
            found = plan(sweep.profile, at_work, {each.label: each.told for each in registered}, sweep.now)
            for removed in remove_runs(found, root, dry_run=sweep.dry_run):
                sweep.tell(removed)
            _parts(sweep, found, root)
            with sweep.noting():
                for removed in remove_stillborn(root, sweep.profile, sweep.now, dry_run=sweep.dry_run):
                    sweep.tell(removed)
    finally:
        _delete_set_aside(sweep, root)
    sweep.kept += kept_of(found, sweep.profile)
    told = "\n".join([found.folders[name].told for name in found.kept] + [each.told for each in registered])
    with sweep.noting():
        _datasets(sweep, told)
    with sweep.noting():
        _mlflow(sweep, tracked, found, registered)


def _parts(sweep: _Sweep, found: Plan, root: Path) -> None:
    """One that can't be moved does not hold up the others."""
    with sweep.noting():
        for part in parts(found, sweep.profile, sweep.now):
            with sweep.noting():
                sweep.tell(remove_part(part, root, sweep.now, dry_run=sweep.dry_run))


def _delete_set_aside(sweep: _Sweep, root: Path) -> None:
    """By whichever profile's clean-up, now or earlier; runs begin meanwhile."""
    if sweep.dry_run:
        return
    with sweep.noting(), deleting(root) as doomed:
        for aside in doomed:
            sweep.delete(aside)


def _datasets(sweep: _Sweep, told: str) -> None:
    for what, aside in remove_datasets(sweep.profile, told, sweep.now, dry_run=sweep.dry_run):
        if isinstance(what, Kept):
            sweep.kept.append(what)
        elif what:
            sweep.tell(what)
        if aside:
            sweep.delete(aside)


def _mlflow(sweep: _Sweep, tracked: Tracked, found: Plan, registered: list[Registered]) -> None:
    days = sweep.profile.retention.mlflow_days
    if days is None:
        return
    told, holding = "\n".join(each.told for each in registered), {each.mlflow_run_id for each in registered}
    for group in tracked.groups():
        if why := _why_kept(group, found, told, holding):
            sweep.kept.append(Kept(kind="mlflow_run", name=group.run_id, why=why))
        elif is_past(group.ended, days, sweep.now):
            for removed in tracked.remove(group, f"ended {age(group.ended, sweep.now)} ago", dry_run=sweep.dry_run):
                sweep.tell(removed)


def _why_kept(group: Group, found: Plan, told: str, holding: set[str]) -> str:
    if group.ids & holding or named_in(told, [group.run_id]):
        return "a registered version was made of it"
    return "its run folder stays" if group.run_id in found.kept else ""
