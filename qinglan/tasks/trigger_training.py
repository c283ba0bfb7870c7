"""Starts a training once enough good rows came in."""

from pathlib import Path
from typing import Any, cast

from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from qinglan.config import Profile
from qinglan.data import versions
from qinglan.ops.prefect.deployments import (
    TRAIN_DEPLOYMENT,
    Deployment,
    deployments_of,
    training_of,
)
from qinglan.ops.prefect.server import find_server
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.forms import RefreshChanges, overrides_of
from qinglan.tasks.stage import emit_run_event, stage_task


@stage_task("trigger-training")
def trigger_training(run: Run, published: StageResult) -> str | None:
    """Start the profile's training once `refresh.train_at_new_rows` good rows came in since the
    last one.

    It is not started while its deployment is paused.

    Returns:
        The id of the flow run that was started, None where none was.
    """
    profile = run.profile
    log = get_run_logger()
    train_at_new_rows = profile.refresh.train_at_new_rows
    version = versions.Version.read(published.path("version").parent)
    new_rows = versions.training_rows_since(profile, version)
    emit_run_event(
        "refresh.ready",
        run,
        {
            "version": version.id,
            "new_training_rows": new_rows,
            "train_at_new_rows": train_at_new_rows,
        },
    )
    if train_at_new_rows is None:
        return None
    news = f"{new_rows} good training rows came in since the last training"
    if new_rows < train_at_new_rows:
        log.info("%s; it starts at %d", news, train_at_new_rows)
        return None
    parameters = _training_parameters(run)
    deployment = _find_deployment(profile)
    if deployment is None or deployment.paused:
        command = f"`qinglan run train --profile {parameters['profile']} --from {run.id}`"
        log.warning("%s, but %s; start it with %s", news, _obstacle(deployment), command)
        return None
    queued_run = run_deployment(
        deployment.full_name,
        parameters=parameters,
        timeout=0,
        as_subflow=False,
        # One version is trained once, also where two refreshes of it end at the same moment.
        idempotency_key=f"train-{profile.tenant.id}-{version.id}",
    )
    started = cast(FlowRun, queued_run)
    # Noted now, and not when it ends: the next refresh may come before that.
    versions.note_training(profile, version.id, run.id)
    log.info("%s: queued flow run %s", news, started.name)
    return str(started.id)


def _training_parameters(run: Run) -> dict[str, Any]:
    """The parameters of the training's flow: this refresh's profile and settings, and its run."""
    refresh_parameters = flow_run.parameters or {}
    profile_name = str(refresh_parameters.get("profile", run.profile.name))
    if Path(profile_name).suffix in (".yaml", ".yml"):
        # An absolute path holds wherever the worker runs.
        profile_name = str(Path(profile_name).resolve())
    changes = refresh_parameters.get("changes", RefreshChanges())
    overrides = overrides_of(changes, refresh_parameters.get("overrides", ()))
    return {"profile": profile_name, "overrides": list(overrides), "source": run.id}


def _find_deployment(profile: Profile) -> Deployment | None:
    """The deployment of the profile's training; None where there is none, or no server."""
    server = find_server(profile.paths.state)
    if server is None:
        return None
    with server.client() as api:
        return training_of(deployments_of(api), profile)


def _obstacle(deployment: Deployment | None) -> str:
    """Why the training can't be started."""
    if deployment is None:
        return f"this Prefect server has no deployment `{TRAIN_DEPLOYMENT}`"
    hint = "resume it in Prefect's UI once someone has looked"
    return f"`{deployment.full_name}` is paused, as after an alarm: {hint}"
