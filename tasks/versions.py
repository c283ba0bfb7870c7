"""Publishing a dataset as a version, and training when enough good rows came in."""

from pathlib import Path
from typing import Any, cast

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from qinglan.config import Profile
from qinglan.data import versions
from qinglan.ops.automations import TRAIN_DEPLOYMENT, Deployment, deployments_of, training_of
from qinglan.ops.prefect_server import find_server
from qinglan.runs.artifacts import Artifact, StageResult
from qinglan.runs.run import Run
from qinglan.tasks.events import tell
from qinglan.tasks.forms import overrides_in
from qinglan.tasks.stage import Outcome, Stage, perform, tracker_of


@task(name="publish", task_run_name="publish", cache_policy=NO_CACHE)
def publish_dataset(run: Run, dataset: StageResult) -> StageResult:
    """Keep the dataset as an immutable version with its data card; the same content again is the same version."""
    profile = run.profile

    def work(stage: Stage) -> Outcome:
        inputs, pins = dataset.details.get("inputs", dataset.key), dataset.details.get("pins", "")
        version = versions.publish(profile, dataset.run_id, dataset.artifacts, inputs=inputs, pins=pins)
        _log_dataset(stage.run, stage.mlflow_run_id, version, "published")
        stage.say(f"version {version.id} in {version.directory}")
        if version.drift:
            log = get_run_logger()
            (log.warning if version.drift.warnings else log.info)("publish: %s", version.drift.sentence)
        files = {"version": versions.VERSION_FILE, "card": versions.CARD, "card_data": versions.CARD_DATA}
        return Outcome(
            dataset.rows_out,
            dataset.rows_out,
            artifacts={name: Artifact.of(version.directory / file) for name, file in files.items()},
            metrics=_drift_metrics(version),
            details={"version": version.id, "parent": version.parent},
        )

    depends_on = {
        "files": {name: artifact.sha256 for name, artifact in dataset.artifacts.items()},
        "folder": str(versions.tenant_folder(profile)),
    }
    published = perform(run, "publish", depends_on, work)
    version = versions.Version.read(published.path("version").parent)
    _log_dataset(run, run.mlflow_run_id, version, "published")
    card = published.path("card").read_text(encoding="utf-8")
    create_markdown_artifact(card, key="data-card", description=f"Dataset version {version.id}")
    return published


@task(name="trigger-training", task_run_name="trigger-training", cache_policy=NO_CACHE)
def trigger_training(run: Run, published: StageResult) -> str | None:
    """Start the profile's training once `refresh.train_at_new_rows` good rows came in since the last one; not while its
    deployment is paused.

    Returns:
        The id of the flow run that was started; None where none was.
    """
    profile, log = run.profile, get_run_logger()
    needed = profile.refresh.train_at_new_rows
    version = versions.Version.read(published.path("version").parent)
    new = versions.training_rows_since(profile, version)
    tell("refresh.ready", run, {"version": version.id, "new_training_rows": new, "train_at_new_rows": needed})
    if needed is None:
        return None
    if new < needed:
        log.info("%d good training rows came in since the last training; it starts at %d", new, needed)
        return None
    asked = _parameters(run)
    deployment = _training_deployment(profile)
    if deployment is None or deployment.paused:
        name = deployment.full_name if deployment else TRAIN_DEPLOYMENT
        log.warning(
            "%d good training rows came in since the last training, but %s; start it with `qinglan run train --profile "
            "%s --from %s`",
            new,
            f"`{name}` is paused, as after an alarm: resume it in Prefect's UI once someone has looked"
            if deployment
            else f"this Prefect server has no deployment `{name}`",
            asked["profile"], run.id,
        )  # fmt: skip
        return None
    # One version is trained once, also where two refreshes of it end at the same moment.
    key = f"train-{profile.tenant.id}-{version.id}"
    started = cast(
        FlowRun,
        run_deployment(deployment.full_name, parameters=asked, timeout=0, as_subflow=False, idempotency_key=key),
    )
    versions.note_training(profile, version.id, run.id)
    log.info("%d good training rows came in since the last training: started flow run %s", new, started.name)
    return str(started.id)


@task(name="note-training", task_run_name="note-training", cache_policy=NO_CACHE)
def note_training(run: Run, dataset: StageResult) -> None:
    """Remember which dataset version this run trained on: from now on, new rows count from there."""
    version_id = versions.version_of(dataset.artifacts)
    versions.note_training(run.profile, version_id, run.id)
    directory = versions.tenant_folder(run.profile) / version_id
    if (directory / versions.VERSION_FILE).exists():
        _log_dataset(run, run.mlflow_run_id, versions.Version.read(directory), "training")


def _log_dataset(run: Run, mlflow_run_id: str, version: versions.Version, context: str) -> None:
    tracker_of(run.profile).log_dataset(
        mlflow_run_id, version.tenant, version.id, version.directory, context, version.counts
    )


def _training_deployment(profile: Profile) -> Deployment | None:
    if (server := find_server(profile.paths.state)) is None:
        return None
    with server.client() as api:
        return training_of(deployments_of(api), profile)


def _drift_metrics(version: versions.Version) -> dict[str, float]:
    if version.drift is None:
        return {}
    sides = (("new", version.drift.arrivals), ("all", version.drift.whole))
    return {f"drift_{side}/{name}": d.excess for side, shift in sides for name, d in shift.distances.items()}


def _parameters(run: Run) -> dict[str, Any]:
    """What this flow was started with, for a training on its dataset; a path holds wherever the worker runs."""
    asked = flow_run.parameters or {}
    profile = str(asked.get("profile", run.profile.name))
    if Path(profile).suffix in (".yaml", ".yml"):
        profile = str(Path(profile).resolve())
    return {"profile": profile, "overrides": list(overrides_in(asked)), "source": run.id}
