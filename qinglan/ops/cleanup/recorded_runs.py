"""Runs as MLflow and Prefect recorded them: what models need, and runs that are no longer needed.

In MLflow a run is marked as deleted, then its artifacts are removed, then its rows, so that what a
kill leaves is found again. A tracking server offers no way to delete rows: they stay marked until
its operator runs `mlflow gc`. Prefect deletes a flow run's task runs and logs with it, but not its
artifacts.
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote, urlsplit

import httpx2

from qinglan.config import EMBEDDED, FlowName, Profile
from qinglan.errors import ConfigError, first_line
from qinglan.ops.cleanup.folders import bytes_of, read_folders
from qinglan.ops.cleanup.records import CleanUp
from qinglan.ops.cleanup.runs import named_in, tracking_of
from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.ops.prefect.deployments import names_profile
from qinglan.ops.prefect.server import PrefectServer
from qinglan.registry.store import all_pages, is_missing_database, registry_of

# MLflow takes seconds to import.
if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def require_database(profile: Profile, runs: Path) -> None:
    """Raise `ConfigError` where the database that a run was tracked in is not there.

    It may not be mounted. The runs are those of the profile below the folder `runs`.
    """
    uri = profile.tracking_uri
    if not is_missing_database(uri):
        return
    for run in read_folders(runs):
        is_own = run.profile == profile.name and tracking_of(run.state) in (None, uri)
        if is_own and run.state.get("mlflow_run_id"):
            problem = f"is not there, though run {run.directory.name} was tracked in it"
            hint = "mount or restore it; if it is lost for good, `qinglan up` makes an empty one"
            raise ConfigError(f"tracking.uri: {uri.removeprefix('sqlite:///')} {problem}; {hint}")


def registered_versions(profile: Profile) -> dict[str, str]:
    """The labels of every version of every model, with the text that names its runs.

    The text holds the version's tags and addresses.
    """
    if is_missing_database(profile.tracking_uri):
        return {}
    with registry_of(profile).asking() as client:
        versions = all_pages(lambda token: client.search_model_versions("", page_token=token))
    texts = {}
    for version in versions:
        references = [*version.tags.values(), version.source or "", version.run_id or ""]
        texts[f"version {version.version} of {version.name}"] = "\n".join(references)
    return texts


def remove_tracked_runs(
    clean: CleanUp, kept_folders: Collection[str], registered: Iterable[str]
) -> None:
    """Remove MLflow's runs with their artifacts.

    Those stay that a registered version or a run folder which stays needs.
    """
    profile = clean.profile
    days = profile.retention.mlflow_days
    if days is None or is_missing_database(profile.tracking_uri):
        return
    references = "\n".join(registered)
    with registry_of(profile).asking() as client:
        for run_id, mlflow_runs in _runs_by_id(client, profile):
            is_in_registry = any(run.info.run_id in references for run in mlflow_runs)
            if is_in_registry or named_in(references, [run_id]):
                clean.note_kept("MLflow run", run_id, "a registered version was made of it")
            elif run_id in kept_folders:
                clean.note_kept("MLflow run", run_id, "its run folder stays")
            elif clean.is_past(_end_of(mlflow_runs), days):
                _remove_tracked_run(clean, client, mlflow_runs)


def _end_of(mlflow_runs: Iterable["Run"]) -> datetime:
    """The time when the last of MLflow's runs of one run began or ended."""
    newest_ms = 0
    for run in mlflow_runs:
        newest_ms = max(newest_ms, run.info.start_time or 0, run.info.end_time or 0)
    return datetime.fromtimestamp(newest_ms / 1000, UTC)


def _remove_tracked_run(clean: CleanUp, client: "MlflowClient", mlflow_runs: list["Run"]) -> None:
    reason = f"ended {clean.age(_end_of(mlflow_runs))} ago"
    # The flow's run last, as it says whose they are.
    for run in sorted(mlflow_runs, key=lambda run: "profile" in run.data.tags):
        artifacts = urlsplit(run.info.artifact_uri)
        is_local = artifacts.scheme in ("", "file")
        freed_bytes = bytes_of(Path(unquote(artifacts.path))) if is_local else 0
        if not clean.dry_run:
            _purge(client, run, clean.profile.tracking_uri)
        clean.note_removed("MLflow run", run.info.run_name or run.info.run_id, reason, freed_bytes)


def _runs_by_id(client: "MlflowClient", profile: Profile) -> "Iterable[tuple[str, list[Run]]]":
    """MLflow's runs of each run of this profile: the flow's, and one a stage.

    Those that are marked as deleted are among them.
    """
    from mlflow.entities import ViewType

    experiment = client.get_experiment_by_name(profile.tracking.experiment)
    if experiment is None:
        return ()
    found_runs = all_pages(
        lambda token: client.search_runs(
            [experiment.experiment_id], run_view_type=ViewType.ALL, page_token=token
        )
    )
    # Other sites may have a profile of this name too.
    folder = profile.paths.runs.resolve()
    groups: dict[str, tuple[str, list[Run]]] = {}
    for run in found_runs:
        tags = run.data.tags
        is_of_this_site = Path(tags.get("run.directory", "")).parent == folder
        if tags.get("profile") == profile.name and is_of_this_site:
            groups[run.info.run_id] = (tags["qinglan.run_id"], [])
    for run in found_runs:
        flow_run_id = run.data.tags.get("mlflow.parentRunId", run.info.run_id)
        if flow_run_id in groups:
            _, group_runs = groups[flow_run_id]
            group_runs.append(run)
    return groups.values()


def _purge(client: "MlflowClient", run: "Run", uri: str) -> None:
    """Delete a run with its traces, artifacts and rows."""
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    run_id = run.info.run_id
    experiment_id = run.info.experiment_id
    traces = all_pages(
        lambda token: client.search_traces(
            run_id=run_id, locations=[experiment_id], include_spans=False, page_token=token
        )
    )
    if traces:
        client.delete_traces(experiment_id, trace_ids=[trace.info.trace_id for trace in traces])
    if run.info.lifecycle_stage != "deleted":
        client.delete_run(run_id)
    try:
        get_artifact_repository(run.info.artifact_uri, tracking_uri=uri).delete_artifacts()
    # Every kind of store has errors of its own.
    except Exception as error:
        problem = f"not deleted: {first_line(error)}"
        raise ConfigError(f"MLflow's artifacts at {run.info.artifact_uri}: {problem}") from error
    # As `mlflow gc` does it. The command itself would also delete every deleted experiment and
    # logged model of the database, other users' among them, whichever run ids it is given, and it
    # takes the runs in any order.
    store = client._tracking_client.store
    if hasattr(store, "_hard_delete_run"):
        store._hard_delete_run(run_id)


def remove_flow_runs(clean: CleanUp, server: PrefectServer, days: float) -> None:
    """Delete this profile's flow runs that ended so many days ago.

    It does not matter whether a schedule or a user started them.
    """
    before = clean.now - timedelta(days=days)
    try:
        with server.client() as api:
            for run in _ended(api, before):
                if _is_of(run, clean.profile):
                    if not clean.dry_run:
                        _delete_flow_run(api, run["id"])
                    reason = f"ended {str(run['end_time'])[:10]}"
                    clean.note_removed("flow run", run["name"], reason)
    except httpx2.HTTPError as error:
        problem = f"{first_line(error)}; named by {server.origin}"
        raise ConfigError(f"Prefect at {server.api_url}: {problem}") from error


def _delete_flow_run(api: httpx2.Client, flow_run_id: str) -> None:
    # Another clean-up may be quicker.
    artifacts = {"flow_run_id": {"any_": [flow_run_id]}}
    for artifact in pages(api, "artifacts/filter", artifacts=artifacts):
        call(api, "DELETE", f"artifacts/{artifact['id']}", may_lack=True)
    call(api, "DELETE", f"flow_runs/{flow_run_id}", may_lack=True)


def _ended(api: httpx2.Client, before: datetime) -> list[dict[str, Any]]:
    """Flow runs that ended before a time and may be ours."""
    states = ["COMPLETED", "FAILED", "CANCELLED", "CRASHED"]
    ended: dict[str, Any] = {
        "state": {"type": {"any_": states}},
        "end_time": {"before_": before.isoformat()},
    }
    # Runs of our deployments have their tag, even where the deployment is gone. What users start by
    # hand has no deployment.
    tagged = ended | {"tags": {"all_": [TAG]}}
    by_hand = ended | {"deployment_id": {"is_null_": True}}
    our_flows = {"name": {"any_": list(get_args(FlowName))}}
    runs = pages(api, "flow_runs/filter", flow_runs=tagged)
    runs += pages(api, "flow_runs/filter", flow_runs=by_hand, flows=our_flows)
    return list({run["id"]: run for run in runs}.values())


def _is_of(run: Mapping[str, Any], profile: Profile) -> bool:
    """Tell whether a flow run is one of this profile.

    Started by hand it has our parameters and their defaults; without a profile it is another
    project's.
    """
    parameters = run["parameters"]
    if not run["deployment_id"] and "profile" not in parameters:
        return False
    return names_profile(str(parameters.get("profile", EMBEDDED)), profile)
