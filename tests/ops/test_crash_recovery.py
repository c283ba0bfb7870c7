"""Flow runs that are marked as crashed, and crashed ones that go on."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
from doubles import raising
from fake_prefect import api_of
from fake_ray import FakeRay
from fixture_types import ProfileOf
from prefect.server.events.filters import EventFilter
from prefect.server.schemas.filters import FlowRunFilter

from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.ops.prefect import crash_recovery
from qinglan.ops.prefect.automations import GOES_ON, site_automations
from qinglan.ops.prefect.crash_recovery import (
    crash_interrupted,
    crash_silent,
    recover_runs,
    requeue_crashed,
    stop_cancelled,
)
from qinglan.runs.run import note, open_run

NOW = datetime(2026, 11, 22, 6, 0, tzinfo=UTC)


class Events:
    """A server with old runs: one that fell silent, one that sends events, one that never sent
    any."""

    def __init__(self, server_was_there: bool, status: str) -> None:
        self._was_there = server_was_there
        self._status = status
        self.marked = list[str]()
        self.api = api_of(self._answer)

    def _answer(self, _: str, path: str, body: Any) -> Any:
        if path == "flow_runs/filter":
            assert body["flow_runs"]["start_time"]["before_"] == "2026-11-22T05:00:00+00:00"
            assert body["flow_runs"]["state"] == {
                "operator": "or_",
                "type": {"any_": ["RUNNING"]},
                "name": {"any_": ["Paused"]},
            }
            FlowRunFilter.model_validate(body["flow_runs"])
            names = {"f1": "train night", "f2": "train day", "f3": "train behind a proxy"}
            began = {"start_time": "2026-11-21T22:00:00+00:00"}
            return [{"id": run, "name": name} | began for run, name in names.items()]
        if path == "events/filter":
            EventFilter.model_validate(body["filter"])
            return {"events": [{}] if self._has(body["filter"]) else []}
        self.marked.append(path)
        return {"status": self._status}

    def _has(self, asked: Any) -> bool:
        if "resource" not in asked:
            return self._was_there
        (run,) = asked["resource"]["id"]
        if asked["event"] == {"name": ["prefect.flow-run.heartbeat"]}:
            assert asked["occurred"] == {
                "since": "2026-11-21T22:00:00+00:00",
                "until": "2026-11-22T05:00:00+00:00",
            }
            return not run.endswith("f3")
        return run.endswith("f2")


@pytest.mark.parametrize(
    ("server_was_there", "status", "lost"),
    [(True, "ACCEPT", ["train night"]), (True, "ABORT", []), (False, "ACCEPT", [])],
    ids=["silent for an hour", "ended meanwhile", "the server is only just back"],
)
def test_a_run_that_is_silent_for_an_hour_is_lost(
    server_was_there: bool, status: str, lost: list[str]
):
    server = Events(server_was_there, status)
    assert crash_silent(server.api, NOW) == lost
    assert server.marked == (["flow_runs/f1/set_state"] if server_was_there else [])


class Crashes:
    """A server with runs that crashed in their attempts 0 to 3, and the automation that lets them
    go on."""

    def __init__(
        self, profile: Profile, enabled: bool = True, status: str = "ACCEPT", state: str = "crashed"
    ) -> None:
        self._status = status
        self._state = state
        (again,) = [spec for spec in site_automations(profile) if spec["name"] == GOES_ON] or [None]
        self._automations = [again | {"enabled": enabled}] if again else []
        self.marked = list[tuple[str, str, bool]]()
        self.api = api_of(self._answer)

    def _answer(self, method: str, path: str, body: Any) -> Any:
        if method == "GET":
            return 404 if self._state == "gone" else {"state_id": self._state}
        if path == "automations/filter":
            assert body["automations"] == {"name": {"any_": [GOES_ON]}}
            return self._automations
        if path == "flow_runs/filter":
            assert body["flow_runs"]["end_time"]["before_"] == "2026-11-22T05:30:00+00:00"
            return [
                {"id": f"f{n}", "name": f"run {n}", "run_count": n, "state_id": "crashed"}
                for n in range(4)
            ]
        self.marked.append((path, body["state"]["name"], body["force"]))
        return {"status": self._status}


@pytest.mark.parametrize(
    ("retries", "server", "asked", "goes_on"),
    [
        (2, {}, [1, 2], ["run 1", "run 2"]),
        (2, {"status": "ABORT"}, [1, 2], []),
        (2, {"enabled": False}, [], []),
        (2, {"state": "begun by another worker"}, [], []),
        (2, {"state": "gone"}, [], []),
        (0, {}, [], []),
    ],
)
def test_a_crash_that_the_automation_missed_goes_on_while_tries_are_left(
    profile_of: ProfileOf,
    retries: int,
    server: dict[str, Any],
    asked: list[int],
    goes_on: list[str],
):
    crashes = Crashes(profile_of(automations={"crash_retries": retries}), **server)
    assert requeue_crashed(crashes.api, NOW) == goes_on
    assert crashes.marked == [(f"flow_runs/f{n}/set_state", "AwaitingRetry", False) for n in asked]


def test_interrupted_runs_crash_or_are_cancelled_and_one_that_a_process_runs_is_left_alone():
    runs = [{"id": f"run-{number}", "state_type": "RUNNING"} for number in range(201)]
    runs[7]["state_type"] = "CANCELLING"
    marked = dict[str, str]()

    def answer(_: str, path: str, body: Any) -> Any:
        if path.endswith("/set_state"):
            marked[path.split("/")[-2]] = body["state"]["type"]
            return {}
        assert body["work_pools"] == {"name": {"any_": ["qinglan-trainer"]}}
        condition = FlowRunFilter.model_validate(body["flow_runs"]).as_sql_filter()
        query = str(condition.compile(compile_kwargs={"literal_binds": True}))
        assert "flow_run.state_type IN ('PENDING', 'RUNNING', 'CANCELLING') OR " in query
        # A run that waits for a person's approval is paused.
        assert "flow_run.state_name IN ('Paused')" in query
        return runs

    argv = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    env = os.environ | {"PREFECT__FLOW_RUN_ID": "run-3"}
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, env=env) as busy:
        busy.stdout.readline()
        interrupted = crash_interrupted(api_of(answer), ["qinglan-trainer"])
        busy.stdin.close()
    assert len(interrupted) == len(marked) == 200
    assert "run-3" not in marked
    assert [run for run, state in marked.items() if state != "CRASHED"] == ["run-7"]
    assert marked["run-7"] == "CANCELLED"


def test_the_jobs_of_what_was_to_be_cancelled_are_stopped(
    ray: FakeRay, profile_of: ProfileOf, tmp_path: Path
):
    profile = profile_of(trainer={"ray_dashboard_url": ray.url})
    said = list[str]()
    flow_run = {"id": "f1", "name": "train night"}
    overrides = [f"trainer.ray_dashboard_url={ray.url}", f"paths.runs={profile.paths.runs}"]
    elsewhere = [*overrides, f"paths.runs={tmp_path / 'elsewhere'}"]
    cancelled = flow_run | {
        "parameters": {"profile": "embedded", "overrides": overrides, "changes": {"rl_steps": 3}}
    }

    def job_of(profile: Profile, flow_run_id: str) -> str:
        with open_run(profile, "train") as run:
            note(run, flow_run_id=flow_run_id)
        return f"qinglan-{run.id}-rl-verl-abcdefgh-1"

    # A run of this machine, without a cluster.
    job_of(profile_of(), "f1")
    own_job = job_of(profile, "f1")
    other_job = job_of(profile.model_copy(update={"name": "day"}), "f2")
    ray.jobs = {job: {"submission_id": job, "status": "RUNNING"} for job in (own_job, other_job)}
    stop_cancelled(cancelled, said.append)
    assert ray.stopped() == [own_job]
    assert said == [f"train night was cancelled: stopped Ray job {own_job}"]
    ray.is_down = True
    stop_cancelled(cancelled, said.append)
    assert "its Ray jobs may still be running: " in said[-1]
    stop_cancelled(flow_run | {"parameters": {"overrides": elsewhere}}, said.append)
    assert f"it has no run under {tmp_path / 'elsewhere'}, so no Ray job was stopped" in said[-1]
    stop_cancelled(flow_run | {"parameters": {}}, said.append)
    assert len(said) == 3, "a profile without a cluster has no job to stop"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (httpx2.ReadTimeout(""), "ReadTimeout"),
        (ConfigError("prefect.toml: can't be read"), "prefect.toml: can't be read"),
        (KeyError("status"), "'status'"),
    ],
)
def test_an_error_is_a_warning(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
):
    monkeypatch.setattr(crash_recovery, "find_server", raising(error))
    warnings = list[str]()
    recover_runs(profile_of(), warnings.append)
    assert warnings == [f"could not look for dead flow runs: {said}"]
