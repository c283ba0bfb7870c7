"""The shipped deployments on a real server: deployed without a question, typos refused, one line
for a mistake."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect_process import NO_SCHEDULER, post, prefect_process
from qinglan_process import own_environment

from qinglan.config import load_profile
from qinglan.ops.prefect.api import RetryingClient, call
from qinglan.ops.prefect.deploy import deploy_command, find_deployments
from qinglan.ops.up.site import WORK_POOLS, Site
from qinglan.runs.locks import refresh_lock
from qinglan.runs.processes import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Server:
    """A Prefect server with everything deployed; its flows run without a worker."""

    def __init__(self, folder: Path, site: Site, api: RetryingClient) -> None:
        self.folder = folder
        self.api = api
        self.env = own_environment(**site.prefect_env)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *argv]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1200,
        )

    def deployments(self) -> dict[str, dict[str, Any]]:
        deployments = post(self.api, "deployments/filter")
        return {deployment["name"]: deployment for deployment in deployments}

    def deploy(self, state: str) -> list[str]:
        """Run `qinglan deploy` with this state folder; the lines about schedules."""
        process = self.run("qinglan.cli", "deploy", "--set", f"paths.state={self.folder / state}")
        assert process.returncode == 0, process.stdout + process.stderr
        return [line for line in process.stdout.splitlines() if line.startswith("schedule ")]

    def switch(self, deployment: str, active: bool) -> None:
        entry = self.deployments()[deployment]
        url = f"deployments/{entry['id']}/schedules/{entry['schedules'][0]['id']}"
        call(self.api, "PATCH", url, {"active": active})

    def is_on(self, deployment: str) -> bool:
        (schedule,) = self.deployments()[deployment]["schedules"]
        return bool(schedule["active"])

    def state_of(self, flow: str, **parameters: Any) -> dict[str, Any]:
        """The last state of a flow that is run to its end as a worker does it."""
        path = f"deployments/{self.deployments()[flow]['id']}/create_flow_run"
        run_id = post(self.api, path, parameters=parameters)["id"]
        self.run("prefect", "flow-run", "execute", run_id)
        state: dict[str, Any] = call(self.api, "GET", f"flow_runs/{run_id}")["state"]
        return state


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    site = Site(folder / "state", "sqlite:///unused.db", prefect_port=free_port())
    Path(site.prefect_env["PREFECT_HOME"]).mkdir(parents=True)
    with prefect_process(site, folder / "logs", **NO_SCHEDULER) as api:
        server = Server(folder, site, api)
        for pool in WORK_POOLS:
            post(server.api, "work_pools/", name=pool, type="process")
        deployed = server.run(*deploy_command(find_deployments(), server.env).argv[2:])
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        assert "?" not in deployed.stdout
        yield server


@pytest.mark.extended
def test_a_switch_and_a_pause_survive_deployments_from_any_machine_even_killed_ones(server: Server):
    server.switch("refresh", active=True)
    train = server.deployments()["train"]
    post(server.api, f"deployments/{train['id']}/pause_deployment")
    stays_on = "schedule refresh/refresh/nightly stays on, as it "
    assert server.deploy("one") == [f"{stays_on}is on the server; prefect.yaml has it off"]
    argv = [
        sys.executable,
        "-m",
        "qinglan.cli",
        "deploy",
        "--set",
        f"paths.state={server.folder / 'one'}",
    ]
    updated = server.deployments()["train"]["updated"]
    with subprocess.Popen(argv, cwd=ROOT, env=server.env, stdin=subprocess.DEVNULL) as deploying:
        while server.deployments()["train"]["updated"] == updated:
            assert deploying.poll() is None
        deploying.kill()
    assert server.is_on("refresh")
    assert server.deployments()["train"]["paused"]
    assert server.deploy("another") == [f"{stays_on}was switched by hand"]
    server.switch("refresh", active=False)
    assert server.deploy("one") == []
    assert not server.is_on("refresh")


def test_a_mistake_is_one_line_in_the_runs_state(server: Server):
    state = server.state_of("refresh", overrides=["data.limti=3"])
    assert state["type"] == "FAILED"
    assert "unknown key `data.limti`; did you mean `limit`?" in state["message"]
    assert "\n" not in state["message"]


def test_a_refresh_beside_another_is_skipped(server: Server):
    paths = [f"paths.{name}={server.folder / name}" for name in ("runs", "state")]
    with refresh_lock(load_profile("embedded", paths)):
        state = server.state_of("refresh", overrides=paths)
    assert (state["type"], state["name"]) == ("COMPLETED", "Skipped")
    assert f"is running already (process {os.getpid()}" in state["message"]
    assert not list((server.folder / "runs").glob("2*"))
