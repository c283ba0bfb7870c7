"""`qinglan clean-up`: removes what is no longer needed, by the profile's `retention`.

The ledger is never touched. Where the registry can't be read, no run and nothing in MLflow is
removed. Each kind is cleaned up by itself, so that an error in one does not stop the others.
"""

from datetime import UTC, datetime

from qinglan.config import Profile
from qinglan.data.versions import tenant_folder
from qinglan.ops.cleanup import folders, recorded_runs, runs
from qinglan.ops.cleanup.records import CleanUp
from qinglan.ops.prefect.server import find_server
from qinglan.runs.locks import removal_lock
from qinglan.runs.processes import Say
from qinglan.runs.run import is_running, run_folders


def clean_up(profile: Profile, *, dry_run: bool, say: Say, now: datetime | None = None) -> CleanUp:
    """Remove what the profile's `retention` no longer keeps.

    Ages count to `now`, by default this moment.
    """
    clean = CleanUp(profile, dry_run, say, now or datetime.now(UTC))
    with clean.noting():
        _remove_runs(clean)
    flow_run_days = profile.retention.flow_run_days
    if flow_run_days is not None:
        with clean.noting():
            server = find_server(profile.paths.state)
            if server is not None:
                recorded_runs.remove_flow_runs(clean, server, flow_run_days)
    with clean.noting():
        folders.remove_logs(clean)
    return clean


def _remove_runs(clean: CleanUp) -> None:
    """Remove run folders, then the datasets and MLflow's runs that no run which stays needs."""
    profile = clean.profile
    root = profile.paths.runs.resolve()
    root.mkdir(parents=True, exist_ok=True)
    try:
        with removal_lock(root, exclusive=True):
            recorded_runs.require_database(profile, root)
            # Before the registry is read: a run that ends meanwhile may register its model after
            # that.
            running_names = {
                directory.name for directory in run_folders(root) if is_running(directory)
            }
            registered = recorded_runs.registered_versions(profile)
            plan = runs.plan(clean, root, running_names, registered)
            runs.remove_runs(clean, plan, root)
            with clean.noting():
                runs.remove_parts(clean, plan, root)
            with clean.noting():
                runs.remove_never_started(clean, root)
    finally:
        folders.delete_set_aside(clean, root)
    for name, reason in plan.to_keep.items():
        # A run whose run.json can't be read has no profile.
        if plan.folders[name].profile in (profile.name, None):
            clean.note_kept("run", name, reason)
    texts_of_runs = [plan.folders[name].references for name in plan.to_keep]
    references = "\n".join([*texts_of_runs, *registered.values()])
    with clean.noting():
        try:
            folders.remove_datasets(clean, references)
        finally:
            folders.delete_set_aside(clean, tenant_folder(profile).resolve())
    with clean.noting():
        recorded_runs.remove_tracked_runs(clean, plan.to_keep, registered.values())
