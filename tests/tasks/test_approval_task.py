"""Waiting for a person: what ends the wait, and what does not."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed, Failed, Paused, Pending, Running, State
from pydantic import ValidationError

from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.runs.run import Run, open_run
from qinglan.serving.registry.approval import WAITING_FILE
from qinglan.tasks import approval

FLOW_RUN = uuid4()
ROOM = timedelta(hours=1)


class AskedError(Exception):
    """Stands for the end of the wait."""


def no_form() -> ValidationError:
    """As Prefect says that the flow run goes on although nobody has filled in the form."""
    with pytest.raises(ValidationError) as refused:
        approval.ApprovalForm.model_validate({})
    return refused.value


class Prefect:
    """A server as far as a wait sees it: what each pause ends with."""

    api_url = "http://x/api"

    def __init__(self, *ends: BaseException) -> None:
        self.ends, self.keys, self.pauses_s = list(ends), list[str](), list[int]()
        self.before: State[Any] = Running()
        """The flow run's state when it is about to wait."""

    def read_flow_run(self, _: object) -> Any:
        return SimpleNamespace(state=self.before)

    def set_flow_run_state(self, _: object, state: State[Any]) -> None:
        self.before = state

    def pause(self, _: object, *, key: str, timeout: int, poll_interval: int) -> None:
        self.keys.append(key)
        self.pauses_s.append(timeout)
        raise self.ends.pop(0)


class Waits:
    """A gate that asks; what it said, and what people were told."""

    def __init__(self, run: Run, prefect: Prefect) -> None:
        self.run, self.prefect = run, prefect
        self.said, self.told = list[str](), list[tuple[str, dict[str, Any]]]()

    def ask(self) -> Any:
        stage: Any = SimpleNamespace(run=self.run, directory=self.run.stage_directory("gate"), say=self.said.append)
        answer = approval.ask(stage, "Release it.", "text", Path("w"))
        assert not (stage.directory / WAITING_FILE).exists()
        return answer


@pytest.fixture
def waits(profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Waits]]:
    with open_run(profile_of(), "release") as run:

        def make(*ends: BaseException) -> Waits:
            made = Waits(run, Prefect(*ends))
            context = SimpleNamespace(flow_run=SimpleNamespace(id=FLOW_RUN), parameters={"profile": "my profile.yaml"})
            client = made.prefect
            monkeypatch.setattr(approval, "FlowRunContext", SimpleNamespace(get=lambda: context))
            monkeypatch.setattr(approval, "get_client", lambda **_: nullcontext(client))
            monkeypatch.setattr(approval, "pause_flow_run", made.prefect.pause)
            monkeypatch.setattr(approval, "url_for", lambda *_: "http://x")
            monkeypatch.setattr(
                approval, "emit_run_event", lambda event, _, payload: made.told.append((event, payload))
            )
            return made

        yield make


def test_every_attempt_asks_anew(waits: Callable[..., Waits]):
    made = waits(AskedError(), AskedError())
    made.prefect.before = Crashed()  # which can't be paused
    for _ in range(2):
        with pytest.raises(AskedError):
            made.ask()
    assert made.prefect.before.is_running()
    assert len(set(made.prefect.keys)) == 2
    assert f"qinglan release approve {made.run.id} --profile 'my profile.yaml' --reviewer NAME" in made.said[-1]
    assert [event for event, _ in made.told] == ["gate.waiting"] * 2
    assert made.told[0][1]["command"] in made.said[-1]


def test_a_run_that_goes_on_without_an_answer_before_the_time_is_up_asks_again(waits: Callable[..., Waits]):
    made = waits(no_form(), AskedError())
    with pytest.raises(AskedError):
        made.ask()
    assert len(set(made.prefect.keys)) == 2
    assert "asking again" in made.said[-1]
    assert len(made.told) == 1  # people were told already


def test_a_wait_that_was_ended_says_so(waits: Callable[..., Waits]):
    with pytest.raises(KeyboardInterrupt):  # a Ctrl-C of the user's
        waits(KeyboardInterrupt()).ask()
    made = waits(KeyboardInterrupt())
    watch: Any = approval._Watch(FLOW_RUN, datetime.now(UTC) + ROOM, ended_as="Cancelled")
    wait: Any = approval._wait
    with pytest.raises(StageError, match="gate: the flow run became Cancelled while it waited for a person"):
        wait(made, "text", watch, 60)


def test_nobody_answered_once_the_time_is_up(waits: Callable[..., Waits], monkeypatch: pytest.MonkeyPatch):
    now = datetime.now(UTC) + timedelta(days=1)
    clock = SimpleNamespace(now=lambda zone: times.pop(0))
    times = [now, now + ROOM * 24]
    monkeypatch.setattr(approval, "datetime", clock)
    made = waits(no_form())
    assert made.ask() is None
    assert made.prefect.pauses_s[0] > 7 * ROOM.total_seconds() * 24  # Prefect must not end it first


class Server:
    """One flow run's states, as they are read one after the other."""

    api_url = "http://x/api"

    def __init__(self, *states: State[Any] | Exception) -> None:
        self.states, self.asked = list(states), list[str | None]()
        self.over = Event()

    def read_flow_run(self, _: object) -> Any:
        state = self.states.pop(0)
        if not self.states:
            self.over.set()
        if isinstance(state, Exception):
            raise state
        return SimpleNamespace(state=state)

    def set_flow_run_state(self, flow_run: object, state: State[Any]) -> None:
        assert flow_run == FLOW_RUN and state.is_running()
        self.asked.append(state.message)
        if len(self.asked) == 1:
            raise httpx.ReadError("restarting again")


@pytest.mark.parametrize(
    ("states", "time_left", "done"),
    [
        (
            [httpx.ConnectError("restarting"), ValueError("no JSON"), Running(), Paused(), Paused()],
            -ROOM,
            ["Nobody approved in time"] * 2,
        ),
        (
            [Paused(), Crashed(), Crashed(), AwaitingRetry(), Pending(), Cancelling()],
            ROOM,
            ["Its process lives, and waits for a person"] * 3,
        ),
        ([Paused(), Cancelled(), Cancelled()], ROOM, ["Ctrl-C", "Cancelled"]),
        ([Paused(), Failed(), Failed()], ROOM, ["Ctrl-C", "Failed"]),
        ([Paused(), *[Cancelling()] * 12], ROOM, ["Ctrl-C", "Cancelling"]),
    ],
    ids=["the time is up", "taken for crashed", "cancelled", "failed", "not ended by a worker"],
)
def test_a_wait_goes_on_until_the_time_is_up_or_somebody_ended_it(
    monkeypatch: pytest.MonkeyPatch, states: list[State[Any] | Exception], time_left: timedelta, done: list[str]
):
    server = Server(*states)
    monkeypatch.setattr(approval, "get_client", lambda **_: nullcontext(server))
    monkeypatch.setattr(approval, "_POLL_S", 0.01)
    monkeypatch.setattr(approval, "interrupt_main", lambda: server.asked.append("Ctrl-C"))
    watch: Any = approval._Watch(FLOW_RUN, datetime.now(UTC) + time_left, over=server.over)
    watch.run()
    assert not server.states
    assert [*server.asked, *filter(None, [watch.ended_as])] == done
