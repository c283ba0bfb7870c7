"""Ask a person whether a model may be released, and wait.

The wait may last days, and outlasts a restart of Prefect's server.
"""

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
"""Checks that a flow run which is being cancelled is left to the worker: a minute.

A worker searches every 15 seconds for flow runs to cancel, and gives each half a minute to end.
"""
_CHECKS_AFTER_ITS_END = 2
_MARGIN_S = 30 * 86_400
"""Seconds by which Prefect's pause is longer than our wait: more than a machine is asleep.

Prefect treats a pause that is over as a failure and sends a notification.
"""


class ApprovalForm(RunInput):
    """The form in Prefect's UI."""

    approve: bool
    """Release it?"""
    reviewer: str
    """Your name."""
    comment: str = ""


def ask(stage: Stage, question: str, description: str, workbook: Path) -> Approval | None:
    """Wait for a person's answer, for `gate.approval_timeout_s`.

    Args:
        question: a sentence.
        description: the Markdown above the form.
        workbook: what to read before answering.

    Returns:
        None where nobody gave an answer in time.

    Raises:
        StageError: somebody cancelled the flow run, or ended it by hand.
    """
    context = FlowRunContext.get()
    assert context and context.flow_run
    flow_run_id = context.flow_run.id
    timeout_s = max(1, int(stage.run.profile.gate.approval_timeout_s))
    until = datetime.now(UTC) + timedelta(seconds=timeout_s)
    waiting = _waiting(flow_run_id, until, workbook)
    # `qinglan release approve` reads it.
    write_json(stage.directory / WAITING_FILE, dump_record(waiting))
    stage.say(f"waiting up to {duration(timeout_s)} for a person to approve: {question}")
    profile_name = (context.parameters or {}).get("profile", stage.run.profile.name)
    _ask_people(stage, waiting, question, str(profile_name))
    watch = _Watch(flow_run_id, until)
    try:
        with watch.running():
            form = _wait(stage, description, watch, timeout_s + _MARGIN_S)
    finally:
        (stage.directory / WAITING_FILE).unlink(missing_ok=True)
    if form is None:
        return None
    return Approval(approve=form.approve, reviewer=form.reviewer, comment=form.comment)


def _waiting(flow_run_id: UUID, until: datetime, workbook: Path) -> Waiting:
    with get_client(sync_client=True) as client:
        api_url = without_login(str(client.api_url))
    return Waiting(
        flow_run_id=flow_run_id,
        api_url=api_url.rstrip("/"),
        page=without_login(url_for("flow-run", flow_run_id) or ""),
        until=until.isoformat(timespec="seconds"),
        workbook=workbook,
    )


def _ask_people(stage: Stage, waiting: Waiting, question: str, profile_name: str) -> None:
    """Tell people where to answer: in Prefect's log and by an event for automations."""
    run = stage.run
    approve = ["qinglan", "release", "approve", run.id]
    command = shlex.join([*approve, "--profile", profile_name, "--reviewer", "NAME"])
    stage.say(f"read {waiting.workbook}")
    stage.say(f"then answer at {waiting.page} (Resume), or: {command}")
    emit_run_event(
        "gate.waiting",
        run,
        {
            "sentence": question,
            "until": waiting.until,
            "command": command,
            "workbook": str(waiting.workbook),
        },
    )


def _wait(stage: Stage, description: str, watch: "_Watch", pause_s: int) -> ApprovalForm | None:
    """Pause the flow run until its form is filled in; None where nobody did so in time."""
    while True:
        with get_client(sync_client=True) as client:
            # A flow run that counts as crashed can't be paused.
            watch.check(client)
        try:
            form = ApprovalForm.with_initial_data(description=description)
            # A key of its own each time: Prefect's Retry is the same flow run, which keeps the
            # earlier form.
            key = f"approval-{uuid4().hex}"
            return pause_flow_run(form, timeout=pause_s, poll_interval=_POLL_S, key=key)
        except ValidationError:
            # The flow run goes on, but nobody has filled in the form.
            if datetime.now(UTC) >= watch.until:
                return None
            stage.say(
                "the flow run went on without an answer, "
                "as one does that was taken for crashed; asking again"
            )
        except KeyboardInterrupt:
            if not watch.ended_as:
                raise
            raise StageError(
                f"gate: the flow run became {watch.ended_as} while it waited for a person"
            ) from None


@dataclass
class _Watch:
    """Watches a flow run that waits, as only an answer ends a pause of Prefect."""

    flow_run_id: UUID
    until: datetime
    ended_as: str = ""
    """The state in which somebody ended the flow run while it waited.

    The pause is then left by Ctrl-C.
    """
    over: Event = field(default_factory=Event)
    _checks_at_its_end: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch in a thread of its own, as long as the block runs."""
        # Prefect finds its settings, such as the server's address, in the context.
        in_context = copy_context().run
        thread = Thread(target=in_context, args=[self.run], daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.over.set()
            # Otherwise it may still take a flow run that ends right now for one that waits.
            thread.join(_POLL_S)

    def run(self) -> None:
        """Check until it is over."""
        while not self.over.wait(_POLL_S):
            # A server that does not respond is asked again.
            with suppress(httpx.HTTPError, ValueError), get_client(sync_client=True) as client:
                self.check(client)

    def check(self, client: SyncPrefectClient) -> None:
        """Let the flow run go on where the time is up or where it was taken for crashed.

        Where it has ended, the wait is left.
        """
        state = client.read_flow_run(self.flow_run_id).state
        if state is None:
            return
        if state.is_paused():
            if datetime.now(UTC) >= self.until:
                # A model that nobody reviewed is no failure.
                self._let_go_on(client, "Nobody approved in time")
        elif state.is_crashed() or state.is_scheduled():
            # No heartbeat came through, for whatever reason, and it may be about to go on in
            # another process. But while it is not paused, no answer is taken.
            self._let_go_on(client, "Its process runs and waits for a person")
        elif state.is_cancelling() or state.is_final():
            # Where there is a worker, ending the process is its business.
            patience = _CHECKS_AFTER_ITS_END
            if state.is_cancelling():
                patience = _CHECKS_WHILE_CANCELLING
            self._checks_at_its_end += 1
            if self._checks_at_its_end >= patience:
                self.ended_as = str(state.name)
                self.over.set()
                interrupt_main()

    def _let_go_on(self, client: SyncPrefectClient, message: str) -> None:
        client.set_flow_run_state(self.flow_run_id, Running(message=message))
