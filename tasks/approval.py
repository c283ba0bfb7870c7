"""Ask a person whether a model may be released, and wait: for days, over restarts of Prefect's server."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext
from prefect.flow_runs import pause_flow_run
from prefect.input import RunInput
from prefect.states import Running
from prefect.utilities.urls import url_for
from pydantic import ValidationError

from qinglan.formats import duration
from qinglan.prefect_server import without_login
from qinglan.registry.approval import WAITING_FILE, Approval, Waiting
from tasks.events import tell
from tasks.stage import Stage

_POLL_S = 5
_MARGIN_S = 30 * 86_400
"""Prefect takes a pause that is over for a failure, and people are told of it; so its pause is longer than our wait, by
more than a server is away, or a machine asleep."""


class ApprovalForm(RunInput):
    """The form in Prefect's UI."""

    approve: bool
    """Release it?"""
    reviewer: str
    """Your name."""
    comment: str = ""


def ask(stage: Stage, question: str, description: str, workbook: Path) -> Approval | None:
    """Wait for a person's answer, for `gate.approval_timeout_s`; None where nobody gave one in time.

    Args:
        question: what is to be approved, in a sentence.
        description: Markdown that stands above the form.
        workbook: what to read before answering.
    """
    context = FlowRunContext.get()
    assert context and context.flow_run
    flow_run, timeout_s = context.flow_run, max(1, int(stage.run.profile.gate.approval_timeout_s))
    until = datetime.now(UTC) + timedelta(seconds=timeout_s)
    with get_client(sync_client=True) as client:
        api_url = without_login(str(client.api_url))
    waiting = Waiting(
        flow_run_id=flow_run.id,
        api_url=api_url.rstrip("/"),
        page=without_login(url_for("flow-run", flow_run.id) or ""),
        until=until.isoformat(timespec="seconds"),
        workbook=workbook,
    )
    waiting.write(stage.directory)
    stage.say(f"waiting up to {duration(timeout_s)} for a person to approve: {question}")
    stage.say(f"read {workbook}")
    profile = (context.parameters or {}).get("profile", stage.run.profile.name)
    command = shlex.join(["qinglan", "release", "approve", stage.run.id, "--profile", str(profile), "--reviewer"])
    stage.say(f"then answer at {waiting.page} (Resume), or: {command} NAME")
    told = {"sentence": question, "until": waiting.until, "command": f"{command} NAME", "workbook": str(workbook)}
    tell("gate.waiting", stage.run, told)
    try:
        with _looked_after(flow_run.id, until):
            form = _wait(stage, description, until, timeout_s + _MARGIN_S)
    finally:
        (stage.directory / WAITING_FILE).unlink(missing_ok=True)
    return Approval(approve=form.approve, reviewer=form.reviewer, comment=form.comment) if form else None


def _wait(stage: Stage, description: str, until: datetime, pause_s: int) -> ApprovalForm | None:
    while True:
        try:
            return pause_flow_run(
                ApprovalForm.with_initial_data(description=description),
                timeout=pause_s,
                poll_interval=_POLL_S,
                # A key of its own each time: Prefect's Retry is the same flow run, which keeps the earlier form.
                key=f"approval-{uuid4().hex}",
            )
        except ValidationError:  # it runs again, but nobody has filled in the form
            if datetime.now(UTC) >= until:
                return None
            stage.say("the flow run went on without an answer, as one does that was taken for crashed; asking again")


@contextmanager
def _looked_after(flow_run_id: UUID, until: datetime) -> Iterator[None]:
    over = Event()
    watch = Thread(target=copy_context().run, args=[_look_after, flow_run_id, until, over], daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join(_POLL_S)  # else it may still take what ends right now for what waits


def _look_after(flow_run_id: UUID, until: datetime, over: Event) -> None:
    """Let the flow run go on where the time is up, or where it was taken for crashed. A server away is asked again."""
    while not over.wait(_POLL_S):
        with suppress(httpx.HTTPError), get_client(sync_client=True) as client:
            _look(client, flow_run_id, until)


def _look(client: SyncPrefectClient, flow_run_id: UUID, until: datetime) -> None:
    state = client.read_flow_run(flow_run_id).state
    if state is None:
        return
    if state.is_paused():
        # A model that nobody looked at is no failure.
        if datetime.now(UTC) >= until:
            client.set_flow_run_state(flow_run_id, Running(message="Nobody approved in time"))
    elif state.is_crashed() or state.is_scheduled():
        # No sign of life came through, for whatever reason, and it may be about to go on in another process. But while
        # it is not paused, no answer is taken.
        client.set_flow_run_state(flow_run_id, Running(message="Its process lives, and waits for a person"))
