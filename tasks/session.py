"""What surrounds a flow: its run, its services, its MLflow parent run, and how its errors are shown."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.artifacts import MANIFEST, StageResult
from qinglan.config import EMBEDDED, Profile, load_profile
from qinglan.embedded.sample import write_sample
from qinglan.embedded.services import Services, embedded_services
from qinglan.errors import ConfigError, QinglanError
from qinglan.preflight import FlowName, require
from qinglan.runs import Run, find_run, finish_run, note_mlflow_run, open_run, runs_of
from tasks.stage import flow_run_id, tracker_of


@dataclass(frozen=True)
class Session:
    """A flow's surroundings."""

    run: Run
    services: Services
    workbook: Path
    knowledge_base: Path | None
    """The file that the embedded RAG serves; None for a live service."""


@contextmanager
def open_session(profile_name: str, overrides: Sequence[str], flow: FlowName, *, fresh: bool) -> Iterator[Session]:
    """Check the profile, continue or start a run, start the stand-ins, track it all.

    Raises:
        QinglanError: something is wrong that would stop the run later.
    """
    _tidy_logs()
    profile = load_profile(profile_name, overrides)
    require(profile, flow)
    with open_run(profile, flow, fresh=fresh) as opened:
        run = _track(opened)
        tracker = tracker_of(run.profile)
        log = get_run_logger()
        log.info("run %s in %s, MLflow run %s", run.id, run.directory, run.mlflow_run_id)
        workbook, knowledge_base = _inputs(run.profile)
        try:
            with embedded_services(run.profile, knowledge_base or Path()) as services:
                live = run.profile.rag.url != EMBEDDED
                yield Session(run, services, workbook, None if live else knowledge_base)
        except BaseException:
            tracker.end_run(run.mlflow_run_id, failed=True)
            raise
        finish_run(run)
        tracker.end_run(run.mlflow_run_id)


def stages_of(session: Session, source: str | None, names: Sequence[str]) -> list[StageResult]:
    """Finished stages of an earlier run; of this profile's newest run that has them if none is named.

    Raises:
        ConfigError: no such run, or it lacks a stage.
    """
    runs, own = session.run.directory.parent, session.run.directory
    if source:
        directories = [find_run(runs, source)]
    else:
        directories = [d for d in runs_of(runs, session.run.profile.name) if d != own]
    for directory in directories:
        manifests = [directory / name / MANIFEST for name in names]
        if all(manifest.exists() for manifest in manifests):
            results = [StageResult.model_validate_json(m.read_text(encoding="utf-8")) for m in manifests]
            for artifact in (artifact for result in results for artifact in result.artifacts.values()):
                artifact.verify()
            return results
    raise ConfigError(
        f"no finished {' + '.join(names)} in {source or f'any run of {session.run.profile.name} under {runs}'}; "
        "run `qinglan run refresh` or `qinglan run pipeline` first"
    )


def _inputs(profile: Profile) -> tuple[Path, Path]:
    data, rag = profile.data.workbook, profile.rag.knowledge_base
    if EMBEDDED not in (data, rag):
        return Path(data), Path(rag)
    sample = write_sample(profile.paths.state / "sample", profile.embedded)
    return (
        sample.workbook if data == EMBEDDED else Path(data),
        sample.knowledge_base if rag == EMBEDDED else Path(rag),
    )


def _track(run: Run) -> Run:
    tracker, prefect_id = tracker_of(run.profile), flow_run_id()
    if not run.mlflow_run_id:
        tags = {"profile": run.profile.name, "recipe": run.profile.recipe, "qinglan.run_id": run.id}
        run = note_mlflow_run(run, tracker.start_run(run.id, tags))
        tracker.log_params(run.mlflow_run_id, run.profile.model_dump(mode="json"))
    tracker.set_tags(run.mlflow_run_id, {"prefect.flow_run_id": prefect_id, "run.directory": str(run.directory)})
    markdown = (
        f"| | |\n| --- | --- |\n| Run | `{run.id}` |\n| MLflow run | `{run.mlflow_run_id}` |\n"
        f"| Tracking | `{run.profile.tracking_uri}` |\n| Directory | `{run.directory}` |\n"
    )
    create_markdown_artifact(markdown, key="run", description="Where this run is kept")
    return run


class _ShortUserErrors(logging.Filter):
    """A user's mistake is one line; only a bug deserves a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], QinglanError):
            text = str(record.exc_info[1])
            # The end of a log, which follows in some messages, is shown once, by the task.
            record.msg = text.splitlines()[0] if record.name == "prefect.flow_runs" else text
            record.args = ()
            record.exc_info = record.exc_text = None
        return True


class _NoBatchChatter(logging.Filter):
    """Prefect says of every task that it finished; a stage says so itself, and batches need not."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Finished in state Completed", "Finished in state Failed"))


def _tidy_logs() -> None:
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.flow_engine", "prefect.task_engine"):
        logger = logging.getLogger(name)
        if not any(isinstance(f, _ShortUserErrors) for f in logger.filters):
            logger.addFilter(_ShortUserErrors())
            logger.addFilter(_NoBatchChatter())
