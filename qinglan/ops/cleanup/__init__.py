"""`qinglan clean-up`: removes what is no longer needed, by the profile's `retention`; the ledger is never touched.

Where the registry can't be read, no run and nothing in MLflow is removed. Each kind is cleaned up by itself, so that an
error in one does not stop the others.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from qinglan.config import Profile
from qinglan.data.versions import tenant_folder
from qinglan.errors import QinglanError, first_line
from qinglan.ops.cleanup.disposal import delete, deleting
from qinglan.ops.cleanup.mlflow_runs import RegistryEntry, Tracked
from qinglan.ops.cleanup.prefect_runs import remove_flow_runs
from qinglan.ops.cleanup.records import Cleaned, Kept, Removed
from qinglan.ops.cleanup.run_folders import (
    RunPlan,
    age,
    is_past,
    named_in,
    parts,
    plan,
    read_folders,
    remove_part,
    remove_runs,
    remove_stillborn,
)
from qinglan.ops.cleanup.state_folder import remove_datasets, remove_logs
from qinglan.ops.prefect.server import find_server
from qinglan.runs.locks import removal_lock
from qinglan.runs.run import is_running

__all__ = ["Cleaned", "Kept", "Removed", "clean_up"]

Say = Callable[[str], object]


@dataclass
class _CleanUp:
    profile: Profile
    dry_run: bool
    now: datetime
    say: Say
    removed: list[Removed] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterable[Removed]) -> None:
        """Count and print each thing, which `found` removes as it goes on."""
        for removed in found:
            self.removed.append(removed)
            self.say(f"{'would remove ' if self.dry_run else ''}{removed.line}")

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
    clean = _CleanUp(profile, dry_run, now or datetime.now(UTC), say)
    with clean.noting():
        _runs(clean)
    if (days := profile.retention.flow_run_days) is not None:
        with clean.noting():
            if server := find_server(profile.paths.state):
                clean.add(remove_flow_runs(server, profile, days, clean.now, dry_run=dry_run))
    with clean.noting():
        clean.add(remove_logs(profile, clean.now, dry_run=dry_run))
    return Cleaned(
        profile=profile.name,
        dry_run=dry_run,
        removed=tuple(clean.removed),
        kept=tuple(clean.kept),
        notes=tuple(clean.notes),
    )


def _runs(clean: _CleanUp) -> None:
    """Run folders, then the datasets and MLflow's runs that none of those that stay needs."""
    root, tracked = clean.profile.paths.runs.resolve(), Tracked(clean.profile)
    root.mkdir(parents=True, exist_ok=True)
    try:
        with removal_lock(root, exclusive=True):
            tracked.require_database(root)
            # Before the registry is read: a run that ends meanwhile may register its model after that.
            running = {each.name for each in read_folders(root) if is_running(each.directory)}
            registered = tracked.registered()
            found = plan(clean.profile, running, {each.label: each.references for each in registered}, clean.now)
            clean.add(remove_runs(found, root, dry_run=clean.dry_run))
            with clean.noting():
                for part in parts(found, clean.profile, clean.now):
                    with clean.noting():  # one that can't be moved does not stop the others
                        clean.add([remove_part(part, root, clean.now, dry_run=clean.dry_run)])
            with clean.noting():
                clean.add(remove_stillborn(root, clean.profile, clean.now, dry_run=clean.dry_run))
    finally:
        _delete_set_aside(clean, root)
    for name, why in found.kept.items():
        if found.folders[name].profile in (clean.profile.name, None):
            clean.kept.append(Kept(kind="run", name=name, why=why))
    references = "\n".join(
        [found.folders[name].references for name in found.kept] + [each.references for each in registered]
    )
    with clean.noting():
        _datasets(clean, references)
    with clean.noting():
        _mlflow(clean, tracked, found, registered)


def _delete_set_aside(clean: _CleanUp, root: Path) -> None:
    """What this or any earlier clean-up has set aside, of any profile; runs may begin meanwhile."""
    if clean.dry_run or not root.is_dir():
        return
    with clean.noting(), deleting(root) as doomed:
        for aside in doomed:
            with clean.noting():  # what can't be deleted now is tried again next time
                delete(aside)


def _datasets(clean: _CleanUp, references: str) -> None:
    try:
        for each in remove_datasets(clean.profile, references, clean.now, dry_run=clean.dry_run):
            if isinstance(each, Kept):
                clean.kept.append(each)
            else:
                clean.add([each])
    finally:
        _delete_set_aside(clean, tenant_folder(clean.profile).resolve())


def _mlflow(clean: _CleanUp, tracked: Tracked, found: RunPlan, registered: list[RegistryEntry]) -> None:
    days = clean.profile.retention.mlflow_days
    if days is None:
        return
    references, holding = "\n".join(each.references for each in registered), {each.mlflow_run_id for each in registered}
    for group in tracked.groups():
        if group.ids & holding or named_in(references, [group.run_id]):
            why = "a registered version was made of it"
            clean.kept.append(Kept(kind="mlflow_run", name=group.run_id, why=why))
        elif group.run_id in found.kept:
            clean.kept.append(Kept(kind="mlflow_run", name=group.run_id, why="its run folder stays"))
        elif is_past(group.ended, days, clean.now):
            why = f"ended {age(group.ended, clean.now)} ago"
            clean.add(tracked.remove(group, why, dry_run=clean.dry_run))
