"""Runs as MLflow and Prefect recorded them: what registered models need, and runs that are no
longer needed.

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
from qinglan.ops.cleanup.folders import bytes_of, named_in, read_folders, tracking_of
from qinglan.ops.cleanup.records import CleanUp
from qinglan.ops.prefect.api import TAG, call, pages
from qinglan.ops.prefect.deployments import names_profile
from qinglan.ops.prefect.server import PrefectServer
from qinglan.registry.store import all_pages, is_missing_database, registry_of

if TYPE_CHECKING:  # it takes seconds to import
    from mlflow import MlflowClient
    from mlflow.entities import Run


def require_database(profile: Profile, runs: Path) -> None:
    """Raise `ConfigError` where a run below `runs` was tracked in a database that is not there, or
    not mounted."""
    uri = profile.tracking_uri
    for each in read_folders(runs) if is_missing_database(uri) else ():
        mine = each.profile == profile.name and tracking_of(each.state) in (None, uri)
        if mine and each.state.get("mlflow_run_id"):
            problem = f"is not there, though run {each.directory.name} was tracked in it"
            hint = "mount or restore it; if it is lost for good, `qinglan up` makes an empty one"
            raise ConfigError(f"tracking.uri: {uri.removeprefix('sqlite:///')} {problem}; {hint}")


def registered_versions(profile: Profile) -> dict[str, str]:
    """Of every version of every model: its label, and the tags and addresses, which name the runs
    it was made of."""
    if is_missing_database(profile.tracking_uri):
        return {}
    with registry_of(profile).asking() as client:
        found = all_pages(lambda token: client.search_model_versions("", page_token=token))
    said = (
        ("\n".join([*each.tags.values(), each.source or "", each.run_id or ""]), each)
        for each in found
    )
    return {f"version {each.version} of {each.name}": text for text, each in said}


def remove_tracked_runs(
    clean: CleanUp, kept_folders: Collection[str], registered: Iterable[str]
) -> None:
    """Remove MLflow's runs with their artifacts that neither a registered version nor a run folder
    that stays needs."""
    profile, days = clean.profile, clean.profile.retention.mlflow_days
    if days is None or is_missing_database(profile.tracking_uri):
        return
    references = "\n".join(registered)
    with registry_of(profile).asking() as client:
        for run_id, runs in _runs_by_id(client, profile):
            times = (time or 0 for run in runs for time in (run.info.start_time, run.info.end_time))
            ended = datetime.fromtimestamp(max(times, default=0) / 1000, UTC)
            if any(run.info.run_id in references for run in runs) or named_in(references, [run_id]):
                clean.note_kept("MLflow run", run_id, "a registered version was made of it")
            elif run_id in kept_folders:
                clean.note_kept("MLflow run", run_id, "its run folder stays")
            elif clean.is_past(ended, days):
                # The flow's run last, as it says whose they are.
                for run in sorted(runs, key=lambda run: "profile" in run.data.tags):
                    local = urlsplit(run.info.artifact_uri)
                    freed = (
                        bytes_of(Path(unquote(local.path))) if local.scheme in ("", "file") else 0
                    )
                    if not clean.dry_run:
                        _purge(client, run, profile.tracking_uri)
                    name, why = (
                        run.info.run_name or run.info.run_id,
                        f"ended {clean.age(ended)} ago",
                    )
                    clean.note_removed("MLflow run", name, why, freed)


def _runs_by_id(client: "MlflowClient", profile: Profile) -> "Iterable[tuple[str, list[Run]]]":
    """MLflow's runs of each run of this profile: the flow's, and one a stage, marked as deleted or
    not."""
    from mlflow.entities import ViewType

    if (experiment := client.get_experiment_by_name(profile.tracking.experiment)) is None:
        return ()
    ids, every = [experiment.experiment_id], ViewType.ALL
    found = all_pages(lambda token: client.search_runs(ids, run_view_type=every, page_token=token))
    mine, folder = profile.name, profile.paths.runs.resolve()  # not those of other sites
    groups: dict[str, tuple[str, list[Run]]] = {
        run.info.run_id: (run.data.tags["qinglan.run_id"], [])
        for run in found
        if run.data.tags.get("profile") == mine
        and Path(run.data.tags.get("run.directory", "")).parent == folder
    }
    for run in found:
        if group := groups.get(run.data.tags.get("mlflow.parentRunId", run.info.run_id)):
            group[1].append(run)
    return groups.values()


def _purge(client: "MlflowClient", run: "Run", uri: str) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    run_id, store, places = run.info.run_id, client._tracking_client.store, [run.info.experiment_id]
    of_run: dict[str, Any] = {"run_id": run_id, "locations": places, "include_spans": False}
    found = all_pages(lambda token: client.search_traces(page_token=token, **of_run))
    if traces := [each.info.trace_id for each in found]:
        client.delete_traces(places[0], trace_ids=traces)
    if run.info.lifecycle_stage != "deleted":
        client.delete_run(run_id)
    try:
        get_artifact_repository(run.info.artifact_uri, tracking_uri=uri).delete_artifacts()
    except Exception as error:  # every kind of store has its own
        raise ConfigError(
            f"MLflow's artifacts at {run.info.artifact_uri}: not deleted: {first_line(error)}"
        ) from error
    # As `mlflow gc` does it. The command itself would also delete every deleted experiment and
    # logged model of the database, other users' among them, whichever run ids it is given, and it
    # takes the runs in any order.
    if hasattr(store, "_hard_delete_run"):
        store._hard_delete_run(run_id)


def remove_flow_runs(clean: CleanUp, server: PrefectServer, days: float) -> None:
    """Delete this profile's flow runs that ended so many days ago, whether by a schedule or by
    hand."""
    try:
        with server.client() as api:
            for run in (
                each
                for each in _ended(api, clean.now - timedelta(days=days))
                if _is_of(each, clean.profile)
            ):
                if not clean.dry_run:
                    for artifact in pages(
                        api, "artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}}
                    ):
                        call(api, "DELETE", f"artifacts/{artifact['id']}", may_lack=True)
                    call(
                        api, "DELETE", f"flow_runs/{run['id']}", may_lack=True
                    )  # another clean-up may be quicker
                clean.note_removed("flow run", run["name"], f"ended {str(run['end_time'])[:10]}")
    except httpx2.HTTPError as error:
        raise ConfigError(
            f"Prefect at {server.api_url}: {first_line(error)}; named by {server.origin}"
        ) from error


def _ended(api: httpx2.Client, before: datetime) -> list[dict[str, Any]]:
    states = ["COMPLETED", "FAILED", "CANCELLED", "CRASHED"]
    ended: dict[str, Any] = {
        "state": {"type": {"any_": states}},
        "end_time": {"before_": before.isoformat()},
    }
    no_deployment, ours = (
        {"deployment_id": {"is_null_": True}},
        {"name": {"any_": list(get_args(FlowName))}},
    )
    found = pages(
        api, "flow_runs/filter", flow_runs=ended | {"tags": {"all_": [TAG]}}
    )  # whose deployment may be gone
    found += pages(api, "flow_runs/filter", flow_runs=ended | no_deployment, flows=ours)  # by hand
    return list({run["id"]: run for run in found}.values())


def _is_of(run: Mapping[str, Any], profile: Profile) -> bool:
    """Started by hand it has our parameters and their defaults; without a profile it is another
    project's."""
    is_ours = run["deployment_id"] or "profile" in run["parameters"]
    return bool(is_ours) and names_profile(str(run["parameters"].get("profile", EMBEDDED)), profile)
