"""Runs as MLflow and Prefect recorded them: what registered models need, and runs that are no longer needed.

MLflow: a run is marked as deleted, then its artifacts are removed, then its rows, so that what a kill leaves is found
again. A tracking server offers no way to delete rows: they stay marked until its operator runs `mlflow gc`.

Prefect: the server deletes a flow run's task runs and logs with it, but not its artifacts. Events it removes by itself
after a week.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote, urlsplit

import httpx2
from sqlalchemy.exc import SQLAlchemyError

from qinglan.config import EMBEDDED, FlowName, Profile, load_profile
from qinglan.errors import ConfigError, QinglanError, first_line
from qinglan.ops.cleanup.folders import age, bytes_of, is_past, named_in, read_folders, tracking_of
from qinglan.ops.cleanup.records import Kept, Removed
from qinglan.ops.prefect.api import TAG, pages
from qinglan.ops.prefect.server import PrefectServer

if TYPE_CHECKING:  # it takes seconds to import
    from mlflow import MlflowClient
    from mlflow.entities import Run

_SQLITE = "sqlite:///"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@dataclass
class Tracked:
    """What the profile's MLflow knows."""

    profile: Profile

    @property
    def _exists(self) -> bool:
        """MLflow would make a database that is not there."""
        return (
            not self.profile.tracking_uri.startswith(_SQLITE)
            or Path(self.profile.tracking_uri.removeprefix(_SQLITE)).is_file()
        )

    def require_database(self, runs: Path) -> None:
        """Check that a database which is not there was never used: the disk that it lies on may not be mounted.

        Raises:
            ConfigError: it is not there, though a run below `runs` was tracked in it.
        """
        if self._exists:
            return
        uri = self.profile.tracking_uri
        for each in read_folders(runs):
            mine = each.profile == self.profile.name and tracking_of(each.state) in (None, uri)
            if mine and each.state.get("mlflow_run_id"):
                raise ConfigError(
                    f"tracking.uri: {uri.removeprefix(_SQLITE)} is not there, though run {each.name} was tracked "
                    "in it; mount or restore it; if it is lost for good, `qinglan up` makes an empty one"
                )

    def registered(self) -> dict[str, str]:
        """Of every version of every model: its label, and the tags and addresses, which name the runs it was made of.

        Raises:
            ConfigError: it can't be read, so nothing may be removed.
        """
        if not self._exists:
            return {}
        with self._asking():
            found = _all_pages(partial(self._client.search_model_versions, ""))
        return {
            f"version {version.version} of {version.name}": "\n".join(
                [*version.tags.values(), version.source or "", version.run_id or ""]
            )
            for version in found
        }

    def remove_runs(
        self, kept_folders: Collection[str], registered: Iterable[str], now: datetime, *, dry_run: bool
    ) -> Iterator[Removed | Kept]:
        """Remove runs with their artifacts that neither a registered version nor a run folder that stays needs.

        Args:
            registered: for each version, the text that names its runs.
        """
        days = self.profile.retention.mlflow_days
        if days is None or not self._exists:
            return
        references = "\n".join(registered)
        for run_id, runs in self._runs_by_id():
            times = (time or 0 for run in runs for time in (run.info.start_time, run.info.end_time))
            ended = datetime.fromtimestamp(max(times, default=0) / 1000, UTC)
            if any(run.info.run_id in references for run in runs) or named_in(references, [run_id]):
                yield Kept(kind="mlflow_run", name=run_id, why="a registered version was made of it")
            elif run_id in kept_folders:
                yield Kept(kind="mlflow_run", name=run_id, why="its run folder stays")
            elif is_past(ended, days, now):
                # The flow's run last, as it says whose they are.
                for run in sorted(runs, key=lambda run: "profile" in run.data.tags):
                    local = urlsplit(run.info.artifact_uri)
                    freed = bytes_of(Path(unquote(local.path))) if local.scheme in ("", "file") else 0
                    if not dry_run:
                        with self._asking():
                            self._purge(run)
                    name, why = run.info.run_name or run.info.run_id, f"ended {age(ended, now)} ago"
                    yield Removed(kind="mlflow_run", name=name, why=why, bytes=freed)

    def _runs_by_id(self) -> "list[tuple[str, list[Run]]]":
        """MLflow's runs of each run of this profile: the flow's, and one a stage, marked as deleted or not."""
        from mlflow.entities import ViewType

        with self._asking():
            experiment = self._client.get_experiment_by_name(self.profile.tracking.experiment)
            if experiment is None:
                return []
            search = partial(self._client.search_runs, [experiment.experiment_id], run_view_type=ViewType.ALL)
            found: list[Run] = _all_pages(search)
        mine, folder = self.profile.name, self.profile.paths.runs.resolve()  # not those of other sites
        groups: dict[str, tuple[str, list[Run]]] = {
            run.info.run_id: (run.data.tags["qinglan.run_id"], [])
            for run in found
            if run.data.tags.get("profile") == mine and Path(run.data.tags.get("run.directory", "")).parent == folder
        }
        for run in found:
            if group := groups.get(run.data.tags.get("mlflow.parentRunId", run.info.run_id)):
                group[1].append(run)
        return list(groups.values())

    def _purge(self, run: "Run") -> None:
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        run_id, store = run.info.run_id, self._client._tracking_client.store
        if run.info.lifecycle_stage != "deleted":
            self._client.delete_run(run_id)
        try:
            get_artifact_repository(run.info.artifact_uri, tracking_uri=self.profile.tracking_uri).delete_artifacts()
        except Exception as error:  # every kind of store has its own
            problem = first_line(error)
            raise ConfigError(f"MLflow's artifacts at {run.info.artifact_uri}: not deleted: {problem}") from error
        # As `mlflow gc` does it. The command itself would also delete every deleted experiment and logged model of the
        # database, other users' among them, whichever run ids it is given, and it takes the runs in any order.
        if hasattr(store, "_hard_delete_run"):
            store._hard_delete_run(run_id)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (MlflowException, SQLAlchemyError) as error:
            raise ConfigError(f"tracking.uri: MLflow at {self.profile.tracking_uri}: {first_line(error)}") from error

    @cached_property
    def _client(self) -> "MlflowClient":
        from qinglan.runs.tracking import open_client  # imports MLflow, which takes seconds

        return open_client(self.profile.tracking_uri)


def _all_pages(search: Callable[..., Any]) -> list[Any]:
    found, token = [], None
    while token is None or token:
        page = search(max_results=1000, page_token=token)
        found += page
        token = page.token or ""
    return found


def remove_flow_runs(
    server: PrefectServer, profile: Profile, days: float, now: datetime, *, dry_run: bool
) -> Iterator[Removed]:
    """Delete this profile's flow runs that ended so many days ago, whether by a schedule or by hand.

    Raises:
        ConfigError: the server can't be reached, or refuses.
    """
    before = now - timedelta(days=days)
    try:
        with server.client() as api:
            for run in _ended(api, before):
                if not _is_of(run, profile):
                    continue
                if not dry_run:
                    for artifact in pages(api, "artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}}):
                        _delete(api, f"artifacts/{artifact['id']}")
                    _delete(api, f"flow_runs/{run['id']}")
                yield Removed(kind="flow_run", name=run["name"], why=f"ended {str(run['end_time'])[:10]}")
    except httpx2.HTTPError as error:
        raise ConfigError(f"Prefect at {server.shown_url}: {first_line(error)}; named by {server.origin}") from error


def _ended(api: httpx2.Client, before: datetime) -> list[dict[str, Any]]:
    ended = {"state": {"type": {"any_": list(_ENDED)}}, "end_time": {"before_": before.isoformat()}}
    deployed = {"flow_runs": ended, "deployments": {"tags": {"all_": [TAG]}}}
    by_hand = {
        "flow_runs": ended | {"deployment_id": {"is_null_": True}},
        "flows": {"name": {"any_": list(get_args(FlowName))}},
    }
    found = [run for query in (deployed, by_hand) for run in pages(api, "flow_runs/filter", **query)]
    return list({run["id"]: run for run in found}.values())


def _is_of(run: Mapping[str, Any], profile: Profile) -> bool:
    """Prefect keeps all parameters with a flow run, the deployment's own among them.

    Started by hand it has ours with their defaults; without a profile it is another project's of the same name.
    """
    if not run["deployment_id"] and "profile" not in run["parameters"]:
        return False
    given = str(run["parameters"].get("profile", EMBEDDED))
    if given == profile.name:
        return True
    try:
        return load_profile(given).name == profile.name
    except QinglanError:  # that profile was removed
        return False


def _delete(api: httpx2.Client, address: str) -> None:
    response = api.delete(address)
    if response.status_code != httpx2.codes.NOT_FOUND:  # another clean-up was quicker
        response.raise_for_status()
