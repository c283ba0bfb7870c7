"""`qinglan up` for real: it comes up, starts again what ends, keeps the data, leaves no process."""

import json
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
import yaml
from qinglan_process import RunningQinglan, own_environment
from waiting import processes_with, wait_until

from qinglan.ops.prefect.api import RetryingClient, call

ROOT = Path(__file__).parents[2]
PREFECT_FILE = ROOT / "qinglan" / "deployments" / "prefect.yaml"
DEPLOYED = yaml.safe_load(PREFECT_FILE.read_text(encoding="utf-8"))["deployments"]
WORKERS = {"qinglan": "qinglan-up", "qinglan-trainer": "qinglan-trainer-up"}
pytestmark = pytest.mark.slow
LOGIN = ("ann", "a-secret-of-this-test")


class Up(RunningQinglan):
    """A running `qinglan up` with state of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.family = list[psutil.Process]()
        # With a login, as on a machine that others use; tests/ops/test_ui_walkthrough.py has none.
        login = ":".join(LOGIN)
        env = own_environment(PREFECT_SERVER_API_AUTH_STRING=login, PREFECT_API_AUTH_STRING=login)
        super().__init__(
            folder / "up.log",
            "up",
            f"--set=paths.state={folder / 'state'}",
            *options,
            cwd=ROOT,
            env=env,
        )
        with ExitStack() as started:
            started.callback(self._kill)
            self.wait_for("Ctrl-C stops")
            self.family = self.process.children(recursive=True)
            api = RetryingClient(
                base_url=f"{self.address('Prefect')}/api", auth=LOGIN, trust_env=False, timeout=120
            )
            self.api = started.enter_context(api)
            self._started = started.pop_all()

    def address(self, name: str) -> str:
        match = re.search(rf"^{name} +(http://127\.0\.0\.1:\S+)$", self.output, re.MULTILINE)
        assert match, self.output
        return match[1]

    def at_work(self, pool: str) -> str:
        """A flow run that the server believes this pool's worker to be at work on; its id."""
        name = {"qinglan": "refresh/refresh", "qinglan-trainer": "train/train"}[pool]
        deployment = self.api.get(f"deployments/name/{name}").raise_for_status().json()["id"]
        # A crashed run goes on by itself: this one fails then, at once.
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2999-01-01T00:00:00Z"}}
        body = {"parameters": {"profile": "/no/such.yaml"}, "state": state}
        run: str = call(self.api, "POST", f"deployments/{deployment}/create_flow_run", body)["id"]
        call(
            self.api,
            "POST",
            f"flow_runs/{run}/set_state",
            {"state": {"type": "RUNNING"}, "force": True},
        )
        return run

    def states_of(self, run: str) -> list[str]:
        states = (
            self.api.get("flow_run_states/", params={"flow_run_id": run}).raise_for_status().json()
        )
        return [state["type"] for state in states]

    def close(self) -> None:
        self._started.close()

    def _kill(self) -> None:
        if self.process.poll() is None:
            self.family = self.process.children(recursive=True)
            self.process.kill()
            self.process.wait()
        psutil.wait_procs(self.family, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Up]:
    with ExitStack() as stack:
        # The usual ports are taken, if they were not before.
        for port in (4200, 5000):
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        up = Up(folder)
    yield up
    up.close()


def test_free_ports_are_taken_where_the_usual_ones_are_not(site: Up):
    assert re.search(r"^prefect: port 4200 is taken, so 42\d\d$", site.output, re.MULTILINE)
    assert re.search(r"^mlflow: port 5000 is taken, so 50\d\d$", site.output, re.MULTILINE)


def test_other_accounts_and_other_pages_are_kept_out(site: Up):
    pool = {"name": "p", "type": "process"}
    foreign = {"origin": "http://elsewhere.example"}
    url = str(site.api.base_url)
    with httpx2.Client(base_url=url, trust_env=False, timeout=120, headers=foreign) as anybody:
        assert anybody.get("csrf-token", params={"client": "anybody"}).status_code == 401
    with httpx2.Client(
        base_url=url, auth=LOGIN, trust_env=False, timeout=120, headers=foreign
    ) as page:
        assert page.post("work_pools/", json=pool).status_code == 403
        token = page.get("csrf-token", params={"client": "page"})
    # So our browser does not hand it over.
    assert "access-control-allow-origin" not in token.headers
    assert LOGIN[1] not in site.output
    assert (site.folder / "state" / "prefect").stat().st_mode & 0o077 == 0
    pages = site.api.get(site.api.base_url.join("/ui-settings")).json()
    # The new pages report to others.
    assert (pages["available_uis"], pages["v2_base_url"]) == (["v1"], None)


def test_all_flows_are_deployed_to_run_in_this_folder_and_each_pool_has_a_worker(site: Up):
    entries = {entry["name"]: entry for entry in call(site.api, "POST", "deployments/filter", {})}
    assert set(entries) == {deployment["name"] for deployment in DEPLOYED}
    for deployment in DEPLOYED:
        entry = entries[deployment["name"]]
        assert entry["work_pool_name"] == deployment["work_pool"]["name"]
        assert json.dumps(entry["pull_steps"]).count(str(ROOT)) == 1
        assert [schedule for schedule in entry["schedules"] if schedule["active"]] == []
    for pool, worker in WORKERS.items():
        (online,) = call(site.api, "POST", f"work_pools/{pool}/workers/filter", {})
        assert (online["name"], online["status"]) == (worker, "ONLINE")


def test_mlflow_and_the_simulators_answer(site: Up):
    with httpx2.Client(trust_env=False, timeout=60) as client:
        url = f"{site.address('MLflow')}/api/2.0/mlflow/experiments/search?max_results=1"
        assert client.get(url).status_code == 200
        body = {"query": "护眼叶黄素 不宜食用者", "top_k": 1}
        retrieved = client.post(site.address("RAG"), json=body)
        assert retrieved.json()["data"]["recall"][0]["id"]
        question = {
            "model": "simulated-rewriter",
            "messages": [{"role": "user", "content": "它多少钱？"}],
        }
        answer = client.post(f"{site.address('Teacher')}/chat/completions", json=question)
        assert answer.json()["choices"]
    simulators = processes_with("simulators", started_by=site.process.pid)
    assert {process.environ()["PREFECT_API_AUTH_STRING"] for process in simulators} == {""}, (
        "they need no key"
    )


def test_a_killed_worker_is_started_again_and_its_run_is_crashed(site: Up):
    lost = site.at_work("qinglan")
    unharmed = site.at_work("qinglan-trainer")
    (worker,) = processes_with("--pool=qinglan ", started_by=site.process.pid)
    worker.kill()
    wait_until(
        "the crash to be noted",
        lambda: "CRASHED" in site.states_of(lost),
        explain=lambda: site.output,
    )
    wait_until(
        "it to be said",
        lambda: f"/runs/flow-run/{lost}" in site.output,
        explain=lambda: site.output,
    )
    assert site.states_of(unharmed)[-1] == "RUNNING"
    assert "qinglan-up ended with status 137; starting it again in 1 s" in site.output


@pytest.mark.extended
def test_ctrl_c_leaves_no_process_and_keeps_the_data_and_so_does_kill_9(site: Up, folder: Path):
    """Last: it ends the site."""
    lost = site.at_work("qinglan-trainer")
    address = site.address("Prefect")
    family = site.process.children(recursive=True)
    site.process.send_signal(signal.SIGINT)
    assert site.process.wait(300) == 0
    assert psutil.wait_procs(family, timeout=30)[1] == []
    again = Up(folder, f"--prefect-port={address.rpartition(':')[2]}")
    try:
        assert again.address("Prefect") == address
        assert "CRASHED" in again.states_of(lost)
        assert "had crashed; it goes on" in again.output
        assert f"/runs/flow-run/{lost}" in again.output
        family = again.process.children(recursive=True)
        assert len(family) >= 12, "a supervisor each, and what it supervises"
        again.process.kill()
        again.process.wait()
        assert psutil.wait_procs(family, timeout=300)[1] == []
    finally:
        again.close()
