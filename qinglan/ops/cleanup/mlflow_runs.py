"""MLflow's side: what registered models need, and runs that are no longer needed.

A run is marked as deleted, then its artifacts are removed, then its rows, so that what a kill leaves is found again. A
tracking server offers no way to delete rows: they stay marked until its operator runs `mlflow gc`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sqlalchemy.exc import SQLAlchemyError

from qinglan.config import Profile
from qinglan.errors import ConfigError, first_line
from qinglan.ops.cleanup.disposal import bytes_of
from qinglan.ops.cleanup.records import Kept, Removed
from qinglan.ops.cleanup.run_folders import age, is_past, named_in, read_folders, tracking_of

if TYPE_CHECKING:  # it takes seconds to import
    from mlflow import MlflowClient
    from mlflow.entities import Run

_SQLITE = "sqlite:///"


class Tracked:
    """What the profile's MLflow knows."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._uri = profile, profile.tracking_uri

    @property
    def _exists(self) -> bool:
        """MLflow would make a database that is not there."""
        return not self._uri.startswith(_SQLITE) or Path(self._uri.removeprefix(_SQLITE)).is_file()

    def require_database(self, runs: Path) -> None:
        """Check that a database which is not there was never used: the disk that it lies on may not be mounted.

        Raises:
            ConfigError: it is not there, though a run below `runs` was tracked in it.
        """
        if self._exists:
            return
        for each in read_folders(runs):
            mine = each.profile == self._profile.name and tracking_of(each.state) in (None, self._uri)
            if mine and each.state.get("mlflow_run_id"):
                raise ConfigError(
                    f"tracking.uri: {self._uri.removeprefix(_SQLITE)} is not there, though run {each.name} was tracked "
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
        days = self._profile.retention.mlflow_days
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
            experiment = self._client.get_experiment_by_name(self._profile.tracking.experiment)
            if experiment is None:
                return []
            search = partial(self._client.search_runs, [experiment.experiment_id], run_view_type=ViewType.ALL)
            found: list[Run] = _all_pages(search)
        mine, folder = self._profile.name, self._profile.paths.runs.resolve()  # not those of other sites
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
            get_artifact_repository(run.info.artifact_uri, tracking_uri=self._uri).delete_artifacts()
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
            raise ConfigError(f"tracking.uri: MLflow at {self._uri}: {first_line(error)}") from error

    @cached_property
    def _client(self) -> "MlflowClient":
        from qinglan.runs.tracking import open_client  # imports MLflow, which takes seconds

        return open_client(self._uri)


def _all_pages(search: Callable[..., Any]) -> list[Any]:
    found, token = [], None
    while token is None or token:
        page = search(max_results=1000, page_token=token)
        found += page
        token = page.token or ""
    return found
