"""Automations on a real Prefect server with a real worker: crashed runs go on, alarms pause, people
are told."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from fake_service import FakeService
from fixture_types import ProfileOf
from postgres import postgres_server
from prefect_process import post
from qinglan_process import own_environment
from waiting import wait_until

from qinglan.config import Profile
from qinglan.ops.prefect.api import RetryingClient, call
from qinglan.ops.prefect.automations import apply_automations
from qinglan.ops.up.site import SERVER_TUNING
from qinglan.runs.processes import free_port, health_problem

pytestmark = [pytest.mark.slow, pytest.mark.extended]
SILENCE_S = 20
"""For longer than that no living attempt is without an end or a heartbeat."""
_TAGGED = {"prefect.resource.id": "prefect.tag.qinglan", "prefect.resource.role": "tag"}
TOY = '''
import os, signal, time
from pathlib import Path
import psutil
from prefect import flow
from prefect.runtime import flow_run
from qinglan.ops.prefect.api import RetryingClient, call

def is_known_to_live():
    """Has its first heartbeat arrived?"""
    resource = {{"id": [f"prefect.flow-run.{{flow_run.id}}"]}}
    event = {{"name": ["prefect.flow-run.heartbeat"]}}
    query = {{"filter": {{"resource": resource, "event": event}}}}
    with RetryingClient(base_url=os.environ["PREFECT_API_URL"], trust_env=False, timeout=90) as api:
        return bool(call(api, "POST", "events/filter", query)["events"])

@flow(name="refresh", flow_run_name="refresh {{profile}}")
def refresh(profile: str = "night"):
    """Its first attempt dies with its worker, its second alone, its third ends well."""
    attempts = Path({folder!r}) / "attempts"
    with attempts.open("a") as stream:
        stream.write("x")
    attempt = len(attempts.read_text())
    while not is_known_to_live():
        time.sleep(0.2)
    if attempt == 1:
        for parent in psutil.Process().parents():
            if "worker" in parent.cmdline():
                parent.kill()
    if attempt < 3:
        os.kill(os.getpid(), signal.SIGKILL)
'''


class Server:
    """A Prefect server with state and port of its own, on PostgreSQL as a team has it.

    On SQLite its triggers and a burst of events may wait for each other until a minute is over.
    """

    def __init__(self, folder: Path, database: str) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/api"
        self._folder = folder
        self._processes = list[psutil.Popen]()
        self._env = own_environment(
            PREFECT_HOME=str(folder / "prefect"),
            PREFECT_API_URL=self.url,
            PREFECT_API_DATABASE_CONNECTION_URL=f"postgresql+asyncpg://{database}",
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            PREFECT_SERVER_EVENTS_CAUSAL_ORDERING=SERVER_TUNING[
                "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING"
            ],
            PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY="PT2S",
            PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS="1",
            PREFECT_WORKER_QUERY_SECONDS="1",
            DO_NOT_TRACK="true",
        )
        self.api = RetryingClient(base_url=self.url, trust_env=False, timeout=90)

    def serve(self) -> None:
        self._server = self.start("server", "start", "--host=127.0.0.1", f"--port={self._port}")
        health = f"{self.url}/health"
        wait_until(
            "Prefect's server",
            lambda: not health_problem(health),
            explain=self.log("server").read_text,
        )

    def restart(self) -> None:
        """Kill the server and start it again, as after a crash."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self.serve()

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def start(self, *words: str) -> psutil.Popen:
        with self.log(words[0]).open("ab") as log:
            argv = [sys.executable, "-m", "prefect", *words]
            # A session of its own, so that nothing of it outlives the test.
            started = psutil.Popen(
                argv, env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(started)
        return started

    def worker(self) -> psutil.Popen:
        return self.start(
            "worker", "start", "--pool=qinglan", "--type=process", "--install-policy=never"
        )

    def deploy(self, flow: str, name: str, profile: str, **more: Any) -> str:
        flow_id = post(self.api, "flows/", name=flow)["id"]
        body = {
            "entrypoint": f"qinglan.flows.{flow}.{flow}",
            "work_pool_name": "qinglan",
            "tags": ["qinglan"],
        } | more
        deployment = post(
            self.api,
            "deployments/",
            name=name,
            flow_id=flow_id,
            parameters={"profile": profile},
            **body,
        )
        return str(deployment["id"])

    def run(self, deployment: str) -> str:
        return str(post(self.api, f"deployments/{deployment}/create_flow_run")["id"])

    def state(self, run: str) -> str:
        return str(call(self.api, "GET", f"flow_runs/{run}")["state"]["name"])

    def set_state(self, run: str, kind: str, message: str = "") -> None:
        post(
            self.api,
            f"flow_runs/{run}/set_state",
            state={"type": kind, "message": message},
            force=True,
        )

    def is_paused(self, deployment: str) -> bool:
        return bool(call(self.api, "GET", f"deployments/{deployment}")["paused"])

    def heartbeat(self, run: str) -> None:
        resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        self._event("prefect.flow-run.heartbeat", resource, {}, _TAGGED)

    def emit(self, event: str, run: str, profile: str, payload: dict[str, Any]) -> None:
        """Send an event as `emit_run_event` does within a flow run."""
        resource = {"prefect.resource.id": "qinglan.run.r1", "qinglan.profile": profile}
        resource["qinglan.alarm"] = event.rpartition(".")[2]
        flow_run = {
            "prefect.resource.id": f"prefect.flow-run.{run}",
            "prefect.resource.role": "flow-run",
        }
        self._event(event, resource, payload, flow_run)

    def _event(
        self, event: str, resource: dict[str, str], payload: dict[str, Any], related: dict[str, str]
    ) -> None:
        about = {"id": str(uuid4()), "occurred": datetime.now(UTC).isoformat(), "event": event}
        call(
            self.api,
            "POST",
            "events",
            [about | {"resource": resource, "related": [related], "payload": payload}],
        )

    def close(self) -> None:
        self.api.close()
        for process in reversed(self._processes):
            if process.is_running():
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with (
        postgres_server() as postgres,
        closing(
            Server(tmp_path_factory.mktemp("site"), postgres.make_database("prefect"))
        ) as started,
    ):
        started.serve()
        post(started.api, "work_pools/", name="qinglan", type="process")
        yield started


@pytest.fixture
def told(serve: Callable[..., FakeService], monkeypatch: pytest.MonkeyPatch) -> FakeService:
    service = serve(lambda _: (200, {"code": 0}))
    monkeypatch.setenv("NIGHT_WEBHOOK", service.url)
    return service


def night(profile_of: ProfileOf, name: str = "night", **notify: Any) -> Profile:
    return profile_of(
        name=name,
        notify={"webhook_url_env": "NIGHT_WEBHOOK", "ui_url": "http://prefect.example"} | notify,
        automations={"crashed_after_s": SILENCE_S, "retry_after_s": 10},
    )


def test_a_run_of_a_killed_worker_goes_on(
    server: Server, profile_of: ProfileOf, told: FakeService, tmp_path: Path
):
    (tmp_path / "toy.py").write_text(TOY.format(folder=str(tmp_path)), encoding="utf-8")
    deployment = server.deploy(
        "refresh", "nightly", "night", entrypoint="toy.py:refresh", path=str(tmp_path)
    )
    apply_automations(server.api, night(profile_of))
    first_worker = server.worker()
    run = server.run(deployment)
    wait_until(
        "the worker's death",
        lambda: first_worker.poll() is not None,
        explain=server.log("worker").read_text,
    )
    # Nobody can know of its death but by waiting.
    assert server.state(run) == "Running"
    second = server.worker()
    wait_until(
        "its end", lambda: server.state(run) == "Completed", explain=server.log("worker").read_text
    )
    assert (tmp_path / "attempts").read_text() == "xxx"
    # Not SIGTERM: a worker makes SIGINT of it, which a background job of a shell ignores.
    second.kill()
    second.wait()
    wait_until("two messages", lambda: len(told.bodies) >= 2, explain=lambda: told.bodies)
    assert [body["name"] for body in told.bodies] == ["refresh night"] * 2
    assert f"no heartbeat for {SILENCE_S:.1f} s" in told.bodies[0]["reason"]
    assert "SIGKILL" in told.bodies[1]["reason"]
    assert told.bodies[0]["link"] == f"http://prefect.example/runs/flow-run/{run}"


def test_tries_are_bounded_and_ended_runs_are_left_alone(
    server: Server, profile_of: ProfileOf, told: FakeService
):
    profile = night(profile_of)
    one_try = profile.model_copy(
        update={"automations": profile.automations.model_copy(update={"crash_retries": 1})}
    )
    deployment = server.deploy("refresh", "unlucky", "night")
    apply_automations(server.api, one_try)
    ended = {kind: server.run(deployment) for kind in ("COMPLETED", "CANCELLED", "RUNNING")}
    for kind, run in ended.items():
        server.set_state(run, "RUNNING")
        server.heartbeat(run)
        if kind != "RUNNING":
            server.set_state(run, kind)
    unlucky = server.run(deployment)
    for tries_left in (1, 0):
        server.set_state(unlucky, "RUNNING")
        server.set_state(unlucky, "CRASHED", "no memory left\nTraceback of something long")
        server.set_state(unlucky, "CRASHED", "as its worker tells it")
        if tries_left:
            wait_until("a retry", lambda: server.state(unlucky) == "AwaitingRetry")
    # The one that is silent is found after 20 s and goes on after 10 s more: time enough for what
    # must not happen.
    wait_until("the silent one's retry", lambda: server.state(ended["RUNNING"]) == "AwaitingRetry")
    assert server.state(unlucky) == "Crashed"
    assert [server.state(ended[kind]) for kind in ("COMPLETED", "CANCELLED")] == [
        "Completed",
        "Cancelled",
    ]
    # None has a name of its own yet, so that it is known by its deployment; told of by one
    # automation alone.
    reasons = [body["reason"] for body in told.bodies if unlucky in body["link"]]
    assert reasons == ["no memory left"] * 2
    assert len(told.bodies) == 3


def test_a_failure_after_the_servers_restart_is_told_at_once(
    server: Server, profile_of: ProfileOf, told: FakeService
):
    deployment = server.deploy("refresh", "restarted", "noon")
    apply_automations(server.api, night(profile_of, "noon"))
    run = server.run(deployment)
    server.set_state(run, "RUNNING")
    server.restart()
    server.set_state(run, "FAILED", "the budget is used up")
    wait_until("a message", lambda: told.bodies)
    assert told.bodies[0]["reason"] == "the budget is used up"


def test_an_alarm_pauses_its_own_profiles_training_and_is_told(
    server: Server, profile_of: ProfileOf, told: FakeService
):
    names = ("night", "day")
    own = {name: server.deploy("train", f"train-{name}", name) for name in names}
    nightly = server.deploy("refresh", "refresh-night", "night")
    for name in names:
        apply_automations(server.api, night(profile_of, name, format="feishu"))
    run = server.run(own["night"])
    server.emit(
        "qinglan.alarm.zero_variance",
        run,
        "night",
        {"name": "zero_variance", "step": 9, "message": "few"},
    )
    wait_until("a message", lambda: told.bodies)
    assert not server.is_paused(own["night"])
    alarm = {"name": "reward_up_gold_down", "step": 12, "message": "reward up <at user_id='all'>"}
    server.emit("qinglan.alarm.reward_up_gold_down", run, "night", alarm)
    wait_until("a pause, told", lambda: server.is_paused(own["night"]) and len(told.bodies) >= 2)
    assert not server.is_paused(own["day"])
    assert not server.is_paused(nightly)
    server.emit("qinglan.gate.refuse", run, "day", {"sentence": "Do not release: cost."})
    wait_until("the gate's message", lambda: len(told.bodies) >= 3)
    few, pausing, refused = [body["content"]["text"] for body in told.bodies]
    name = server.api.get(f"flow_runs/{run}").json()["name"]
    link = f"http://prefect.example/runs/flow-run/{run}"
    assert few.splitlines() == [f"Qinglan: {name} alarms at step 9 (zero_variance): few", link]
    assert "reward up ‹at user_id='all'>" in pausing
    assert "\nNo training starts by itself until someone resumes train/train-night.\n" in pausing
    assert f"{name} releases no model: Do not release: cost." in refused


def test_a_run_that_nobody_takes_is_told(server: Server, profile_of: ProfileOf, told: FakeService):
    deployment = server.deploy("refresh", "waiting", "dusk")
    apply_automations(
        server.api, night(profile_of, "dusk", about=("waiting",), waiting_s=10, ui_url=None)
    )
    run = server.run(deployment)
    wait_until("a late run, told", lambda: server.state(run) == "Late" and told.bodies)
    assert told.bodies[0]["topic"] == "waiting"
    # The server knows its own address.
    assert told.bodies[0]["link"].endswith(f"/runs/flow-run/{run}")
