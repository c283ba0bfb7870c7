"""Runs that Prefect's automations lost: which are marked as crashed, and which go on."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest

from qinglan.config import Profile
from qinglan.ops.prefect.automations.plan import GOES_ON, site_automations
from qinglan.ops.prefect.crash_recovery import crash_lost, requeue_crashed

ProfileOf = Callable[..., Profile]
NOW = datetime(2026, 11, 22, 6, 0, tzinfo=UTC)


class Events:
    """A server with old runs at work: one that fell silent, one that is heard of, one that never was."""

    def __init__(self, server_was_there: bool, status: str = "ACCEPT") -> None:
        self._was_there, self._status, self.marked = server_was_there, status, list[str]()
        self.api = httpx2.Client(base_url="http://test/api", transport=httpx2.MockTransport(self._answer))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path, body = request.url.path.removeprefix("/api/"), json.loads(request.content)
        if path == "flow_runs/filter":
            assert body["flow_runs"]["start_time"]["before_"] == "2026-11-22T05:00:00+00:00"
            wanted = {"operator": "or_", "type": {"any_": ["RUNNING"]}, "name": {"any_": ["Paused"]}}
            assert body["flow_runs"]["state"] == wanted
            names = {"f1": "train night", "f2": "train day", "f3": "train behind a proxy"}
            began = {"start_time": "2026-11-21T22:00:00+00:00"}
            return httpx2.Response(200, json=[{"id": run, "name": name} | began for run, name in names.items()])
        if path == "events/filter":
            return httpx2.Response(200, json={"events": [{}] if self._has(body["filter"]) else []})
        self.marked.append(path)
        return httpx2.Response(200, json={"status": self._status})

    def _has(self, asked: Any) -> bool:
        if "resource" not in asked:
            return self._was_there
        (run,) = asked["resource"]["id"]
        if asked["event"] == {"name": ["prefect.flow-run.heartbeat"]}:
            assert asked["occurred"] == {"since": "2026-11-21T22:00:00+00:00", "until": "2026-11-22T05:00:00+00:00"}
            return not run.endswith("f3")
        return run.endswith("f2")


def test_a_run_that_is_silent_for_an_hour_is_lost():
    server = Events(server_was_there=True)
    assert crash_lost(server.api, NOW) == ["train night"]
    assert server.marked == ["flow_runs/f1/set_state"]


def test_a_run_that_ended_meanwhile_is_not_lost():
    assert crash_lost(Events(server_was_there=True, status="ABORT").api, NOW) == []


def test_a_server_that_is_only_just_back_loses_nobody():
    server = Events(server_was_there=False)
    assert crash_lost(server.api, NOW) == []
    assert server.marked == []


class Crashes:
    """A server with crashed runs and the automation that lets them go on."""

    def __init__(
        self, profile: Profile, run_counts: Sequence[int], enabled: bool = True, status: str = "ACCEPT", state: str = ""
    ) -> None:
        self._run_counts, self._status, self._state = run_counts, status, state or "crashed"
        (again,) = [spec for spec in site_automations(profile) if spec["name"] == GOES_ON] or [None]
        self._automations = [again | {"enabled": enabled}] if again else []
        self.marked = list[tuple[str, str, bool]]()
        self.api = httpx2.Client(base_url="http://test/api", transport=httpx2.MockTransport(self._answer))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.removeprefix("/api/")
        if request.method == "GET":
            return (
                httpx2.Response(404) if self._state == "gone" else httpx2.Response(200, json={"state_id": self._state})
            )
        body = json.loads(request.content)
        if path == "automations/filter":
            assert body["automations"] == {"name": {"any_": [GOES_ON]}}
            return httpx2.Response(200, json=self._automations)
        if path == "flow_runs/filter":
            assert body["flow_runs"]["end_time"]["before_"] == "2026-11-22T05:30:00+00:00"
            runs = [
                {"id": f"f{n}", "name": f"run {n}", "run_count": n, "state_id": "crashed"} for n in self._run_counts
            ]
            return httpx2.Response(200, json=runs)
        self.marked.append((path, body["state"]["name"], body["force"]))
        return httpx2.Response(201, json={"status": self._status})


def test_a_crash_that_the_automation_missed_goes_on_while_tries_are_left(profile_of: ProfileOf):
    server = Crashes(profile_of(), range(4))
    assert requeue_crashed(server.api, NOW) == ["run 1", "run 2"]
    assert server.marked == [(f"flow_runs/f{n}/set_state", "AwaitingRetry", False) for n in (1, 2)]


@pytest.mark.parametrize(("retries", "enabled"), [(0, True), (2, False)])
def test_no_crash_goes_on_where_people_switched_that_off(profile_of: ProfileOf, retries: int, enabled: bool):
    server = Crashes(profile_of(automations={"crash_retries": retries}), [1], enabled)
    assert requeue_crashed(server.api, NOW) == []
    assert server.marked == []


@pytest.mark.parametrize(
    ("state", "status", "asked"),
    [("begun by another worker", "ACCEPT", 0), ("gone", "ACCEPT", 0), ("crashed", "ABORT", 1)],
)
def test_a_run_that_somebody_else_put_back_is_left_alone(profile_of: ProfileOf, state: str, status: str, asked: int):
    server = Crashes(profile_of(), [1], status=status, state=state)
    assert requeue_crashed(server.api, NOW) == []
    assert len(server.marked) == asked
