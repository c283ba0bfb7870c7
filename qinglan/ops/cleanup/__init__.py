"""`qinglan clean-up`: removes what is no longer needed, by the profile's `retention`; the ledger is
never touched.

Where the registry can't be read, no run and nothing in MLflow is removed. Each kind is cleaned up
by itself, so that an error in one does not stop the others.
"""

from datetime import UTC, datetime

from qinglan.config import Profile
from qinglan.data.versions import tenant_folder
from qinglan.ops.cleanup import folders, recorded_runs
from qinglan.ops.cleanup.records import CleanUp
from qinglan.ops.prefect.server import find_server
from qinglan.runs.locks import removal_lock
from qinglan.runs.processes import Say
from qinglan.runs.run import is_running


def clean_up(profile: Profile, *, dry_run: bool, say: Say, now: datetime | None = None) -> CleanUp:
    """Remove what the profile's `retention` no longer keeps; ages count to `now`, by default this
    moment."""
    clean = CleanUp(profile, dry_run, say, now or datetime.now(UTC))
    with clean.noting():
        _remove_runs(clean)
    if (days := profile.retention.flow_run_days) is not None:
        with clean.noting():
            if server := find_server(profile.paths.state):
                recorded_runs.remove_flow_runs(clean, server, days)
    with clean.noting():
        folders.remove_logs(clean)
    return clean


def _remove_runs(clean: CleanUp) -> None:
    """Run folders, then the datasets and MLflow's runs that none of those that stay needs."""
    profile = clean.profile
    root = profile.paths.runs.resolve()
    root.mkdir(parents=True, exist_ok=True)
    try:
        with removal_lock(root, exclusive=True):
            recorded_runs.require_database(profile, root)
            # Before the registry is read: a run that ends meanwhile may register its model after
            # that.
            running = {
                each.directory.name
                for each in folders.read_folders(root)
                if is_running(each.directory)
            }
            registered = recorded_runs.registered_versions(profile)
            found = folders.plan(clean, root, running, registered)
            folders.remove_runs(clean, found, root)
            with clean.noting():
                folders.remove_parts(clean, found, root)
            with clean.noting():
                folders.remove_never_started(clean, root)
    finally:
        folders.delete_set_aside(clean, root)
    for name, why in found.kept.items():
        if found.folders[name].profile in (profile.name, None):  # None: run.json can't be read
            clean.note_kept("run", name, why)
    references = "\n".join(
        [*(found.folders[name].references for name in found.kept), *registered.values()]
    )
    with clean.noting():
        try:
            folders.remove_datasets(clean, references)
        finally:
            folders.delete_set_aside(clean, tenant_folder(profile).resolve())
    with clean.noting():
        recorded_runs.remove_tracked_runs(clean, found.kept, registered.values())
