"""What surrounds a flow: its run, services and MLflow parent run, and when it is skipped."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, cast
from uuid import UUID

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from prefect.events.worker import EventsWorker
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogWorker
from prefect.states import Completed

from qinglan.clients.roles import Services, key_salt
from qinglan.config import EMBEDDED, FlowName, Profile, load_profile
from qinglan.errors import ConfigError, RunLockedError
from qinglan.evaluation.report.html import page_template
from qinglan.ops.prefect.crash_recovery import recover_runs
from qinglan.ops.preflight import require
from qinglan.recipes.keys import scoring_digest
from qinglan.runs import run as run_folder
from qinglan.runs.artifacts import StageResult, close_to_others, sha256_of
from qinglan.runs.disk_space import explain_full_disk
from qinglan.runs.locks import refresh_lock, removal_lock
from qinglan.simulators.domains import embedded_knowledge_base, sample_of
from qinglan.simulators.services import embedded_services
from qinglan.tasks.attempts import digests_of
from qinglan.tasks.stage import flow_run_id, hiding_row_text, tracker_of
from qinglan.text import markdown_table

P = ParamSpec("P")
SKIPPED = "Skipped"
"""The state of a flow run that was not needed, which is no failure: nobody is woken up because of
it."""


class Session(NamedTuple):
    """A flow's surroundings."""

    run: run_folder.Run
    services: Services
    workbook: Path
    """A file or folder; with `data.sql`, where ingest keeps the database's rows."""
    source_named: bool = False
    """The user named the run to start from."""


_SOURCE_FLOWS: dict[str, tuple[FlowName, ...]] = {
    "train": ("pipeline", "refresh"),
    "evaluate": ("pipeline", "train"),
    "release": ("pipeline", "train", "evaluate"),
}
"""Whose stages a flow takes where no run is named: those that make them."""


def load_ahead(profile: Profile) -> None:
    """Do what every run of a loaded flow does, while its Prefect server starts; the flow finds it
    done."""
    tracker_of(profile)  # opens, or makes, MLflow's database
    for name in ("prefect.flow_engine", "prefect.utilities.visualization", "scipy.special"):
        import_module(name)
    key_salt(profile, "teacher")
    for name in tuple(sys.modules):
        if name.startswith("qinglan.tasks."):
            digests_of(profile, name)
    page_template()


@contextmanager
def open_session(
    profile_name: str,
    overrides: Sequence[str],
    flow: FlowName,
    *,
    fresh: bool,
    continue_anyway: bool = False,
    source: str = "",
) -> Iterator[Session]:
    """Check the profile, continue or start a run, track it; simulators start when an address is
    first asked for.

    `source` is the earlier run to take stages from; the newest that fits if empty. RunLockedError
    where it is a refresh and another one of the tenant runs; another QinglanError where something
    is wrong that would stop the run later.
    """
    close_to_others()
    gc.freeze()  # so that collections do not scan what Prefect and MLflow have loaded, every second and at exit
    with ExitStack() as stack:
        stack.enter_context(hiding_row_text())
        profile = load_profile(profile_name, overrides)
        recover_runs(profile, get_run_logger().warning)
        stack.enter_context(explain_full_disk(flow, profile))
        prefect_id = flow_run_id()
        if flow == "refresh":
            stack.enter_context(refresh_lock(profile, prefect_id))
        require(profile, flow, get_run_logger().warning)
        opening = run_folder.open_run(
            profile,
            flow,
            fresh=fresh,
            continue_anyway=continue_anyway,
            source=source or None,
            flow_run_id=prefect_id,
        )
        run = _track(stack.enter_context(opening))
        tracker = tracker_of(run.profile)
        get_run_logger().info(
            "run %s in %s, MLflow run %s", run.id, run.directory, run.mlflow_run_id
        )
        workbook, knowledge_base = _inputs(run.profile, run.directory)
        if knowledge_base:
            run = run.model_copy(update={"knowledge_base_sha256": sha256_of(knowledge_base)})
        try:
            with embedded_services(run.profile, knowledge_base) as services:
                yield Session(run, services, workbook, bool(source))
        except BaseException as error:
            run_folder.note_end(run, error)
            tracker.end_run(run.mlflow_run_id, failed=True)
            raise
        run_folder.finish_run(run)
        tracker.end_run(run.mlflow_run_id)


def stages_of(session: Session, names: Sequence[str]) -> list[StageResult]:
    """Finished stages of the run that was named, or of this profile's newest one that fits; now
    also in this run.

    A run that is continued uses the same source as before. ConfigError where there is no such run,
    it lacks a stage, or its scores can't be compared with this profile's.
    """
    run = session.run
    with removal_lock(run.directory.parent):
        directory, results = _find_stages(session, names)
        run_folder.note(run, source=directory)
        kept = [run_folder.save_stage(run, result) for result in results]
    get_run_logger().info("using %s of run %s", " + ".join(names), directory.name)
    return kept


def _find_stages(session: Session, names: Sequence[str]) -> tuple[Path, list[StageResult]]:
    run, identity = session.run, scoring_digest(session.run)
    if session.source_named and run.source:
        return run.source, run_folder.load_stages(run.source, names, identity)
    runs, newest_problem = run.directory.parent, None
    pinned = [run.source] if run.source else []
    for directory in [
        *pinned,
        *run_folder.runs_of(runs, run.profile.name, _SOURCE_FLOWS[run.flow]),
    ]:
        try:
            return directory, run_folder.load_stages(directory, names, identity)
        except ConfigError as problem:
            newest_problem = newest_problem or problem
    hint = (
        f"the newest: {newest_problem}"
        if newest_problem
        else "run `qinglan run refresh` or `pipeline` first"
    )
    needed = f"what `{run.flow}` needs ({', '.join(names)})"
    raise ConfigError(f"no run of {run.profile.name} under {runs} has {needed}; {hint}")


def _inputs(profile: Profile, run_directory: Path) -> tuple[Path, Path | None]:
    """The workbook, and what the embedded RAG serves; a database's rows are kept with the run that
    asked for them."""
    from_sample = profile.data.workbook == EMBEDDED and profile.data.sql is None
    sample = sample_of(profile, "data.workbook") if from_sample else None
    own = run_directory / "source.jsonl" if profile.data.sql else Path(profile.data.workbook)
    return sample.workbook if sample else own, embedded_knowledge_base(profile, sample)


def _track(run: run_folder.Run) -> run_folder.Run:
    tracker, prefect_id = tracker_of(run.profile), flow_run_id()
    if run.flow_run_id not in ("", prefect_id):
        _mark_crashed(
            run.flow_run_id, f"its process was killed; continued by flow run {prefect_id}"
        )
    run = run_folder.note(run, flow_run_id=prefect_id, ended_by="")
    if not (run.mlflow_run_id and tracker.resume_run(run.mlflow_run_id)):
        tags = {
            "profile": run.profile.name,
            "recipe": run.profile.recipe_name,
            "qinglan.run_id": run.id,
        }
        run = run_folder.note(
            run, mlflow_run_id=tracker.start_run(f"{run.id} {run.flow} {run.profile.name}", tags)
        )
        tracker.log_params(run.mlflow_run_id, run.profile.model_dump(mode="json"))
    tracker.set_tags(
        run.mlflow_run_id, {"prefect.flow_run_id": prefect_id, "run.directory": str(run.directory)}
    )
    tracked = {"MLflow run": run.mlflow_run_id, "Tracking": run.profile.tracking_uri}
    known = {"Run": run.id} | tracked | {"Directory": str(run.directory)}
    table = markdown_table(("", ""), ((name, f"`{value}`") for name, value in known.items()))
    create_markdown_artifact(f"{table}\n", key="run", description="Where this run is kept")
    return run


def _mark_crashed(prefect_id: str, message: str) -> None:
    """For the attempt before: Prefect can't know that its process has ended, but we hold the run's
    lock.

    By another name than `Crashed`, or an automation would put it back into its queue.
    """
    flow_run, superseded = (
        UUID(prefect_id),
        State(type=StateType.CRASHED, name="Superseded", message=message),
    )
    # It may have run under another Prefect server.
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        state = client.read_flow_run(flow_run).state
        if state is None or not state.is_final() or state.name == "Crashed":
            client.set_flow_run_state(flow_run, superseded, force=True)


def send_what_is_queued() -> None:
    """Send Prefect the logs and events that its threads still hold, while its server is there.

    Otherwise they are sent at exit, and where the run's own server has ended by then, Prefect
    retries for a minute.
    """
    APILogWorker.drain_all(timeout=10.0)
    EventsWorker.drain_all(timeout=10.0)


def skip_if_running(work: Callable[P, Path]) -> Callable[P, Path]:
    """For a flow's function: where another run holds the lock, end the flow run with that in its
    state."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> Path:
        try:
            return work(*args, **kwargs)
        except RunLockedError as error:
            get_run_logger().warning("%s", error)
            return cast(Path, Completed(name=SKIPPED, message=str(error)))

    return run


def unless_skipped(state: State[Any]) -> Path:
    """A flow's result, for a caller who can do nothing without it; RunLockedError where the flow
    was skipped."""
    if state.name == SKIPPED:
        raise RunLockedError(state.message or SKIPPED)
    return cast(Path, state.result())
