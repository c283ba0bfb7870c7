"""`qinglan clean-up`: removes what is no longer needed, by the profile's `retention`; the ledger is never touched.

Where the registry can't be read, no run and nothing in MLflow is removed. Each kind is cleaned up by itself, so that an
error in one does not stop the others.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from qinglan.config import Profile
from qinglan.data.versions import tenant_folder
from qinglan.errors import QinglanError, first_line
from qinglan.ops.cleanup import folders
from qinglan.ops.cleanup.folders import delete
from qinglan.ops.cleanup.recorded_runs import (
    registered_versions,
    remove_flow_runs,
    remove_tracked_runs,
    require_database,
)
from qinglan.ops.cleanup.records import Cleaned, Kept, Removed
from qinglan.ops.prefect.server import find_server
from qinglan.runs.locks import removal_lock
from qinglan.runs.processes import Say
from qinglan.runs.run import is_running


@dataclass
class _CleanUp:
    profile: Profile
    now: datetime
    say: Say
    done: Cleaned

    def add(self, found: Iterable[Removed | Kept | OSError]) -> None:
        """Note each thing, and print those that `found` removes as it goes on."""
        for each in found:
            if isinstance(each, OSError):
                self.note(each)
            elif isinstance(each, Kept):
                self.done.kept.append(each)
            else:
                self.done.removed.append(each)
                self.say(f"{'would remove ' if self.done.dry_run else ''}{each.line}")

    def note(self, error: Exception) -> None:
        self.done.notes.append(first_line(error))
        self.say(f"not removed: {self.done.notes[-1]}")

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Go on after what can't be done, and say so."""
        try:
            yield
        except (QinglanError, OSError) as error:
            self.note(error)


def clean_up(profile: Profile, *, dry_run: bool, say: Say, now: datetime | None = None) -> Cleaned:
    """Remove what the profile's `retention` no longer keeps; ages count to `now`, by default this moment."""
    clean = _CleanUp(profile, now or datetime.now(UTC), say, Cleaned(profile=profile.name, dry_run=dry_run))
    with clean.noting():
        _runs(clean)
    if (days := profile.retention.flow_run_days) is not None:
        with clean.noting():
            if server := find_server(profile.paths.state):
                clean.add(remove_flow_runs(server, profile, days, clean.now, dry_run=dry_run))
    with clean.noting():
        clean.add(folders.remove_logs(profile, clean.now, dry_run=dry_run))
    return clean.done


def _runs(clean: _CleanUp) -> None:
    """Run folders, then the datasets and MLflow's runs that none of those that stay needs."""
    profile, now, dry_run = clean.profile, clean.now, clean.done.dry_run
    root = profile.paths.runs.resolve()
    root.mkdir(parents=True, exist_ok=True)
    try:
        with removal_lock(root, exclusive=True):
            require_database(profile, root)
            # Before the registry is read: a run that ends meanwhile may register its model after that.
            running = {each.directory.name for each in folders.read_folders(root) if is_running(each.directory)}
            registered = registered_versions(profile)
            found = folders.plan(profile, running, registered, now)
            clean.add(folders.remove_runs(found, root, dry_run=dry_run))
            with clean.noting():
                clean.add(folders.remove_parts(found, root, profile, now, dry_run=dry_run))
            with clean.noting():
                clean.add(folders.remove_never_started(root, profile, now, dry_run=dry_run))
    finally:
        _delete_set_aside(clean, root)
    mine = (profile.name, None)  # None: run.json can't be read
    clean.add(Kept(kind="run", name=n, why=why) for n, why in found.kept.items() if found.folders[n].profile in mine)
    references = "\n".join([*(found.folders[name].references for name in found.kept), *registered.values()])
    with clean.noting():
        try:
            clean.add(folders.remove_datasets(profile, references, now, dry_run=dry_run))
        finally:
            _delete_set_aside(clean, tenant_folder(profile).resolve())
    with clean.noting():
        clean.add(remove_tracked_runs(profile, found.kept, registered.values(), now, dry_run=dry_run))


def _delete_set_aside(clean: _CleanUp, root: Path) -> None:
    """What this or any earlier clean-up has set aside, also one that was killed, of any profile."""
    if clean.done.dry_run or not root.is_dir():
        return
    # Two clean-ups find the same things, so the second waits until the first is done.
    with clean.noting(), FileLock(root / ".deletion.lock"):
        for aside in sorted(root.glob(f"{folders.PREFIX}*")):
            with clean.noting():  # what can't be deleted now is tried again next time
                if aside.is_dir() and not aside.is_symlink():
                    delete(aside)
