"""Prefect events about a run, for automations: Qinglan's own (qinglan/ops/prefect/automations/) and the users'."""

from typing import Any

from prefect.events import emit_event

from qinglan.runs.run import Run


def emit_run_event(event: str, run: Run, payload: dict[str, Any], **labels: str) -> None:
    """Emit `qinglan.EVENT` about the run; flow run, flow and deployment become related resources by themselves."""
    about = {"profile": run.profile.name, "tenant": run.profile.tenant.id} | labels
    emit_event(
        f"qinglan.{event}",
        resource={"prefect.resource.id": f"qinglan.run.{run.id}", "prefect.resource.name": run.id}
        | {f"qinglan.{label}": value for label, value in about.items()},
        payload=payload,
    )
