"""Starts a training when enough good rows came in."""

from pathlib import Path
from typing import Any, cast

from prefect.client.schemas.objects import FlowRun
from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from qinglan.data import versions
from qinglan.ops.prefect.deployments import TRAIN_DEPLOYMENT, deployments_of, training_of
from qinglan.ops.prefect.server import find_server
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run
from qinglan.tasks.forms import RefreshChanges, overrides_of
from qinglan.tasks.stage import emit_run_event, stage_task


@stage_task("trigger-training")
def trigger_training(run: Run, published: StageResult) -> str | None:
    """Start the profile's training once `refresh.train_at_new_rows` good rows came in since the
    last one; not while its deployment is paused. Returns the id of the flow run that was started,
    None where none was."""
    profile, log = run.profile, get_run_logger()
    needed = profile.refresh.train_at_new_rows
    version = versions.Version.read(published.path("version").parent)
    new = versions.training_rows_since(profile, version)
    emit_run_event(
        "refresh.ready",
        run,
        {"version": version.id, "new_training_rows": new, "train_at_new_rows": needed},
    )
    if needed is None:
        return None
    if new < needed:
        log.info(
            "%d good training rows came in since the last training; it starts at %d", new, needed
        )
        return None
    given = flow_run.parameters or {}
    named = str(given.get("profile", profile.name))
    if Path(named).suffix in (".yaml", ".yml"):
        named = str(Path(named).resolve())  # a path holds wherever the worker runs
    overrides = overrides_of(given.get("changes", RefreshChanges()), given.get("overrides", ()))
    asked: dict[str, Any] = {"profile": named, "overrides": list(overrides), "source": run.id}
    deployment = None
    if server := find_server(profile.paths.state):
        with server.client() as api:
            deployment = training_of(deployments_of(api), profile)
    if deployment is None or deployment.paused:
        problem = f"this Prefect server has no deployment `{TRAIN_DEPLOYMENT}`"
        if deployment:
            hint = "resume it in Prefect's UI once someone has looked"
            problem = f"`{deployment.full_name}` is paused, as after an alarm: {hint}"
        command = f"`qinglan run train --profile {asked['profile']} --from {run.id}`"
        text = "%d good training rows came in since the last training, but %s; start it with %s"
        log.warning(text, new, problem, command)
        return None
    # One version is trained once, also where two refreshes of it end at the same moment.
    key = f"train-{profile.tenant.id}-{version.id}"
    queued = run_deployment(
        deployment.full_name, parameters=asked, timeout=0, as_subflow=False, idempotency_key=key
    )
    started = cast(FlowRun, queued)
    versions.note_training(profile, version.id, run.id)
    log.info(
        "%d good training rows came in since the last training: queued flow run %s",
        new,
        started.name,
    )
    return str(started.id)
