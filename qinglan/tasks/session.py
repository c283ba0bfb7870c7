"""The surroundings of a flow: its run, its services, its MLflow run, and when it is skipped."""

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

from qinglan.clients.roles import Services
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
from qinglan.runs.tracking import Tracker
from qinglan.simulators.domains import embedded_knowledge_base, sample_of
from qinglan.simulators.services import embedded_services
from qinglan.tasks.attempts import digests_of
from qinglan.tasks.stage import flow_run_id, hiding_row_text, tracker_of
from qinglan.text import markdown_table

P = ParamSpec("P")
SKIPPED = "Skipped"
"""The state of a flow run that was not needed.

It is no failure: nobody is woken up because of it.
"""
_SEND_WITHIN_S = 10.0
_SOURCE_FLOWS: dict[str, tuple[FlowName, ...]] = {
    "train": ("pipeline", "refresh"),
    "evaluate": ("pipeline", "train"),
    "release": ("pipeline", "train", "evaluate"),
}
"""The flows that make the stages which a flow takes from an earlier run."""
_LOADED_LATE = ("prefect.flow_engine", "prefect.utilities.visualization", "scipy.special")
"""Modules that the first call of a flow would load."""


class Session(NamedTuple):
    """The surroundings of a flow."""

    run: run_folder.Run
    services: Services
    workbook: Path
    """A file or folder; with `data.sql`, where ingest keeps the database's rows."""
    source_named: bool = False
    """The user named the run to start from."""


def load_ahead(profile: Profile) -> None:
    """Do the slow first steps of every run, while its Prefect server starts.

    The process keeps the results, so the flow finds them done.
    """
    # Opens MLflow's database, or makes it.
    tracker_of(profile)
    for module in _LOADED_LATE:
        import_module(module)
    # A tuple, as other modules may be loaded meanwhile.
    for module in tuple(sys.modules):
        if module.startswith("qinglan.tasks."):
            digests_of(profile, module)
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
    """Check the profile, continue or start a run, and track it.

    Simulators start when an address is first asked for.

    Args:
        source: the earlier run to take stages from; the newest that fits if empty.

    Raises:
        RunLockedError: it is a refresh and another one of the tenant runs.
        QinglanError: something is wrong that would stop the run later.
    """
    close_to_others()
    # Otherwise collections scan what Prefect and MLflow have loaded, every second and at exit.
    gc.freeze()
    with ExitStack() as stack:
        stack.enter_context(hiding_row_text())
        profile = load_profile(profile_name, overrides)
        recover_runs(profile, get_run_logger().warning)
        stack.enter_context(explain_full_disk(flow, profile))
        prefect_id = flow_run_id()
        if flow == "refresh":
            stack.enter_context(refresh_lock(profile, prefect_id))
        require(profile, flow, get_run_logger().warning)
        opened_run = run_folder.open_run(
            profile,
            flow,
            fresh=fresh,
            continue_anyway=continue_anyway,
            source=source or None,
            flow_run_id=prefect_id,
        )
        run = _track(stack.enter_context(opened_run))
        get_run_logger().info(
            "run %s in %s, MLflow run %s", run.id, run.directory, run.mlflow_run_id
        )
        workbook, knowledge_base = _inputs(run.profile, run.directory)
        if knowledge_base:
            run = run.model_copy(update={"knowledge_base_sha256": sha256_of(knowledge_base)})
        stack.enter_context(_noting_its_end(run))
        services = stack.enter_context(embedded_services(run.profile, knowledge_base))
        yield Session(run, services, workbook, source_named=bool(source))


@contextmanager
def _noting_its_end(run: run_folder.Run) -> Iterator[None]:
    """Note in the run's folder and in MLflow how it ended."""
    tracker = tracker_of(run.profile)
    try:
        yield
    except BaseException as error:
        run_folder.note_end(run, error)
        tracker.end_run(run.mlflow_run_id, failed=True)
        raise
    run_folder.finish_run(run)
    tracker.end_run(run.mlflow_run_id)


def _inputs(profile: Profile, run_directory: Path) -> tuple[Path, Path | None]:
    """The workbook, and what the embedded RAG serves.

    A database's rows are kept with the run that asked for them.
    """
    sample = None
    if profile.data.sql:
        workbook = run_directory / "source.jsonl"
    elif profile.data.workbook == EMBEDDED:
        sample = sample_of(profile, "data.workbook")
        workbook = sample.workbook
    else:
        workbook = Path(profile.data.workbook)
    return workbook, embedded_knowledge_base(profile, sample)


# ---- the run in MLflow and Prefect ----


def _track(run: run_folder.Run) -> run_folder.Run:
    """The run with its MLflow run, continued or new; Prefect shows where both are kept."""
    tracker = tracker_of(run.profile)
    prefect_id = flow_run_id()
    if run.flow_run_id not in ("", prefect_id):
        _mark_superseded(run.flow_run_id, prefect_id)
    run = run_folder.note(run, flow_run_id=prefect_id, ended_by="")
    if not (run.mlflow_run_id and tracker.resume_run(run.mlflow_run_id)):
        run = _start_mlflow_run(run, tracker)
    tags = {"prefect.flow_run_id": prefect_id, "run.directory": str(run.directory)}
    tracker.set_tags(run.mlflow_run_id, tags)
    places = {
        "Run": run.id,
        "MLflow run": run.mlflow_run_id,
        "Tracking": run.profile.tracking_uri,
        "Directory": str(run.directory),
    }
    rows = [(name, f"`{place}`") for name, place in places.items()]
    table = markdown_table(("", ""), rows)
    create_markdown_artifact(f"{table}\n", key="run", description="Where this run is kept")
    return run


def _start_mlflow_run(run: run_folder.Run, tracker: Tracker) -> run_folder.Run:
    tags = {
        "profile": run.profile.name,
        "recipe": run.profile.recipe_name,
        "qinglan.run_id": run.id,
    }
    mlflow_run_id = tracker.start_run(f"{run.id} {run.flow} {run.profile.name}", tags)
    run = run_folder.note(run, mlflow_run_id=mlflow_run_id)
    tracker.log_params(run.mlflow_run_id, run.profile.model_dump(mode="json"))
    return run


def _mark_superseded(earlier_id: str, prefect_id: str) -> None:
    """Mark the flow run of the attempt before as crashed, in favour of the present one.

    Prefect can't know that its process has ended, but we hold the run's lock.
    """
    message = f"its process was killed; continued by flow run {prefect_id}"
    # Under the name `Crashed`, an automation would put it back into its queue.
    superseded = State(type=StateType.CRASHED, name="Superseded", message=message)
    # It may have run under another Prefect server.
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        state = client.read_flow_run(UUID(earlier_id)).state
        if state is None or not state.is_final() or state.name == "Crashed":
            client.set_flow_run_state(UUID(earlier_id), superseded, force=True)


def send_what_is_queued() -> None:
    """Send Prefect the logs and events that its threads still hold, while its server is there.

    Otherwise they are sent at exit, and where the run's own server has ended by then, Prefect
    retries for a minute.
    """
    APILogWorker.drain_all(timeout=_SEND_WITHIN_S)
    EventsWorker.drain_all(timeout=_SEND_WITHIN_S)


# ---- stages of an earlier run ----


def stages_of(session: Session, names: Sequence[str]) -> list[StageResult]:
    """Finished stages of an earlier run, now also in this one.

    The earlier run is the one that was named, or this profile's newest one that fits. A run that
    is continued uses the same one as before.

    Raises:
        ConfigError: there is no such run, it lacks a stage, or its scores can't be compared with
            this profile's.
    """
    run = session.run
    with removal_lock(run.directory.parent):
        directory, results = _find_stages(session, names)
        run_folder.note(run, source=directory)
        saved_results = [run_folder.save_stage(run, result) for result in results]
    get_run_logger().info("using %s of run %s", " + ".join(names), directory.name)
    return saved_results


def _find_stages(session: Session, names: Sequence[str]) -> tuple[Path, list[StageResult]]:
    """The folder of the run to take the stages from, and its results."""
    run = session.run
    identity = scoring_digest(run)
    if session.source_named and run.source:
        return run.source, run_folder.load_stages(run.source, names, identity)
    runs = run.directory.parent
    candidates = run_folder.runs_of(runs, run.profile.name, _SOURCE_FLOWS[run.flow])
    if run.source:
        candidates = [run.source, *candidates]
    newest_problem: ConfigError | None = None
    for directory in candidates:
        try:
            return directory, run_folder.load_stages(directory, names, identity)
        except ConfigError as problem:
            if newest_problem is None:
                newest_problem = problem
    hint = "run `qinglan run refresh` or `pipeline` first"
    if newest_problem:
        hint = f"the newest: {newest_problem}"
    raise ConfigError(
        f"no run of {run.profile.name} under {runs} has what `{run.flow}` needs "
        f"({', '.join(names)}); {hint}"
    )


# ---- a flow run that is not needed ----


def skip_if_running(work: Callable[P, Path]) -> Callable[P, Path]:
    """Decorate a flow's function: where another run holds the lock, the flow run is skipped.

    It ends in the state `SKIPPED`, which says so.
    """

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> Path:
        try:
            return work(*args, **kwargs)
        except RunLockedError as error:
            get_run_logger().warning("%s", error)
            # Prefect takes a state that a flow returns for the flow run's.
            return cast(Path, Completed(name=SKIPPED, message=str(error)))

    return run


def unless_skipped(state: State[Any]) -> Path:
    """A flow's result, for a caller who can do nothing without it.

    Raises:
        RunLockedError: the flow was skipped.
    """
    if state.name == SKIPPED:
        raise RunLockedError(state.message or SKIPPED)
    return cast(Path, state.result())
