"""Ask a person whether a model may be released, and wait: for days if needed, and over a restart of
the server."""

import shlex
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
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

from qinglan.errors import StageError
from qinglan.ops.prefect.server import without_login
from qinglan.registry.approval import WAITING_FILE, Approval, Waiting
from qinglan.runs.artifacts import write_json
from qinglan.runs.schema_version import dump_record
from qinglan.tasks.stage import Stage, emit_run_event
from qinglan.text import duration

_POLL_S = 5
_CHECKS_WHILE_CANCELLING = 12
"""A minute: a worker searches every 15 seconds for flow runs to cancel, and gives each half a
minute to end."""
_MARGIN_S = 30 * 86_400
"""Prefect treats a pause that is over as a failure and sends a notification; so its pause is longer
than our wait, by more than a machine is asleep."""


class ApprovalForm(RunInput):
    """The form in Prefect's UI."""

    approve: bool
    """Release it?"""
    reviewer: str
    """Your name."""
    comment: str = ""


def ask(stage: Stage, question: str, description: str, workbook: Path) -> Approval | None:
    """Wait for a person's answer, for `gate.approval_timeout_s`; None where nobody gave one in
    time.

    The question is a sentence, the description Markdown above the form, and the workbook what to
    read before answering. StageError where somebody cancelled the flow run, or ended it by hand.
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
    write_json(stage.directory / WAITING_FILE, dump_record(waiting))
    stage.say(f"waiting up to {duration(timeout_s)} for a person to approve: {question}")
    stage.say(f"read {workbook}")
    profile = (context.parameters or {}).get("profile", stage.run.profile.name)
    words = [
        "qinglan",
        "release",
        "approve",
        stage.run.id,
        "--profile",
        str(profile),
        "--reviewer",
        "NAME",
    ]
    command = shlex.join(words)
    stage.say(f"then answer at {waiting.page} (Resume), or: {command}")
    emit_run_event(
        "gate.waiting",
        stage.run,
        {
            "sentence": question,
            "until": waiting.until,
            "command": command,
            "workbook": str(workbook),
        },
    )
    watch = _Watch(flow_run.id, until)
    try:
        with watch.running():
            form = _wait(stage, description, watch, timeout_s + _MARGIN_S)
    finally:
        (stage.directory / WAITING_FILE).unlink(missing_ok=True)
    return (
        Approval(approve=form.approve, reviewer=form.reviewer, comment=form.comment)
        if form
        else None
    )


def _wait(stage: Stage, description: str, watch: "_Watch", pause_s: int) -> ApprovalForm | None:
    while True:
        with get_client(sync_client=True) as client:
            watch.check(client)  # what counts as crashed can't be paused
        try:
            form = ApprovalForm.with_initial_data(description=description)
            # A key of its own each time: Prefect's Retry is the same flow run, which keeps the
            # earlier form.
            key = f"approval-{uuid4().hex}"
            return pause_flow_run(form, timeout=pause_s, poll_interval=_POLL_S, key=key)
        except ValidationError:  # it runs again, but nobody has filled in the form
            if datetime.now(UTC) >= watch.until:
                return None
            stage.say(
                "the flow run went on without an answer, as one does that was taken for crashed; asking again"
            )
        except KeyboardInterrupt:
            if not watch.ended_as:
                raise
            raise StageError(
                f"gate: the flow run became {watch.ended_as} while it waited for a person"
            ) from None


@dataclass
class _Watch:
    """Watches a flow run that waits: only an answer ends a pause of Prefect."""

    flow_run_id: UUID
    until: datetime
    ended_as: str = ""
    """The state in which somebody ended the flow run while it waited; the pause is left by Ctrl-C
    then."""
    over: Event = field(default_factory=Event)
    _checks_at_its_end: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = Thread(target=copy_context().run, args=[self.run], daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            thread.join(_POLL_S)  # else it may still take what ends right now for what waits

    def run(self) -> None:
        """Check until it is over. A server that does not respond is asked again."""
        while not self.over.wait(_POLL_S):
            with suppress(httpx.HTTPError, ValueError), get_client(sync_client=True) as client:
                self.check(client)

    def check(self, client: SyncPrefectClient) -> None:
        """Let it go on where the time is up or where it was taken for crashed; leave it where it
        has ended."""
        state = client.read_flow_run(self.flow_run_id).state
        if state is None:
            return
        if state.is_paused():
            # A model that nobody reviewed is no failure.
            if datetime.now(UTC) >= self.until:
                client.set_flow_run_state(
                    self.flow_run_id, Running(message="Nobody approved in time")
                )
        elif state.is_crashed() or state.is_scheduled():
            # No heartbeat came through, for whatever reason, and it may be about to go on in
            # another process. But while it is not paused, no answer is taken.
            client.set_flow_run_state(
                self.flow_run_id, Running(message="Its process runs and waits for a person")
            )
        elif state.is_cancelling() or state.is_final():
            self._checks_at_its_end += 1
            # Where there is a worker, ending the process is its business.
            if self._checks_at_its_end >= (
                _CHECKS_WHILE_CANCELLING if state.is_cancelling() else 2
            ):
                self.ended_as = str(state.name)
                self.over.set()
                interrupt_main()
