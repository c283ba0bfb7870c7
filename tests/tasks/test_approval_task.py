"""Waiting for a person, and the end of the wait."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from fixture_types import ProfileOf
from prefect.states import Crashed, Running, State
from pydantic import ValidationError

from qinglan.registry.approval import WAITING_FILE
from qinglan.runs.run import Run, open_run
from qinglan.tasks import approval


class AskedError(Exception):
    """Stands for the end of the wait."""


def no_form() -> ValidationError:
    """Prefect's error where the flow run goes on although nobody has filled in the form."""
    with pytest.raises(ValidationError) as refused:
        approval.ApprovalForm.model_validate({})
    return refused.value


class Prefect:
    """A server as far as a wait sees it: what each pause ends with."""

    api_url = "http://x/api"

    def __init__(self, *ends: BaseException) -> None:
        self.ends = list(ends)
        self.keys: list[str] = []
        self.pauses_s: list[int] = []
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
    """A gate that asks, with its log and its events."""

    def __init__(self, run: Run, prefect: Prefect) -> None:
        self.run = run
        self.prefect = prefect
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, _run: Run, payload: dict[str, Any]) -> None:
        self.events.append((event, payload))

    def ask(self) -> Any:
        stage: Any = SimpleNamespace(
            run=self.run, directory=self.run.stage_directory("gate"), say=self.said.append
        )
        answer = approval.ask(stage, "Release it.", "text", Path("w"))
        assert not (stage.directory / WAITING_FILE).exists()
        return answer


Make = Callable[..., Waits]


@pytest.fixture
def waiting(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with open_run(profile_of(), "release") as run:

        def make(*ends: BaseException) -> Waits:
            waits = Waits(run, Prefect(*ends))
            context = SimpleNamespace(
                flow_run=SimpleNamespace(id=uuid4()), parameters={"profile": "my profile.yaml"}
            )
            client = nullcontext(waits.prefect)
            monkeypatch.setattr(approval, "FlowRunContext", SimpleNamespace(get=lambda: context))
            monkeypatch.setattr(approval, "get_client", lambda **_: client)
            monkeypatch.setattr(approval, "pause_flow_run", waits.prefect.pause)
            monkeypatch.setattr(approval, "url_for", lambda *_: "http://x")
            monkeypatch.setattr(approval, "emit_run_event", waits.emit)
            return waits

        yield make


def test_every_attempt_asks_anew(waiting: Make):
    waits = waiting(AskedError(), AskedError())
    # A flow run that counts as crashed can't be paused.
    waits.prefect.before = Crashed()
    for _ in range(2):
        with pytest.raises(AskedError):
            waits.ask()
    assert waits.prefect.before.is_running()
    assert len(set(waits.prefect.keys)) == 2
    assert (
        f"qinglan release approve {waits.run.id} --profile 'my profile.yaml' --reviewer NAME"
        in waits.said[-1]
    )
    assert [event for event, _ in waits.events] == ["gate.waiting"] * 2
    assert waits.events[0][1]["command"] in waits.said[-1]


def test_a_run_that_goes_on_without_an_answer_before_the_time_is_up_asks_again(waiting: Make):
    waits = waiting(no_form(), AskedError())
    with pytest.raises(AskedError):
        waits.ask()
    assert len(set(waits.prefect.keys)) == 2
    assert "asking again" in waits.said[-1]
    assert len(waits.events) == 1, "people were told already"


def test_ctrl_c_ends_a_wait(waiting: Make):
    with pytest.raises(KeyboardInterrupt):
        waiting(KeyboardInterrupt()).ask()


def test_nobody_answered_once_the_time_is_up(waiting: Make, monkeypatch: pytest.MonkeyPatch):
    now = datetime.now(UTC) + timedelta(days=1)
    times = [now, now + timedelta(days=1)]
    monkeypatch.setattr(approval, "datetime", SimpleNamespace(now=lambda zone: times.pop(0)))
    waits = waiting(no_form())
    assert waits.ask() is None
    pause_s = waits.prefect.pauses_s[0]
    assert pause_s > timedelta(days=7).total_seconds(), "Prefect must not end it first"
