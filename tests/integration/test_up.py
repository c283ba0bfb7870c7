"""`qinglan up` for real: servers, work pool, deployments and worker come up, refuse typos, and leave no process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]
WITHIN_S = 300.0
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Up:
    """A running `qinglan up` with state and ports of its own."""

    def __init__(self, folder: Path) -> None:
        self.prefect_port, self.mlflow_port = free_port(), free_port()
        self.api = f"http://127.0.0.1:{self.prefect_port}/api"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        argv = [sys.executable, "-m", "qinglan.cli", "up", "--set", f"paths.state={folder / 'state'}"]
        argv += [f"--prefect-port={self.prefect_port}", f"--mlflow-port={self.mlflow_port}"]
        self._output = (folder / "up.log").open("wb")
        self.process = psutil.Popen(argv, cwd=ROOT, env=self.env, stdout=self._output, stderr=subprocess.STDOUT)
        self.log = folder / "up.log"
        wait_until(lambda: "Ctrl-C stops" in self.log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        self.family = self.process.children(recursive=True)

    def prefect(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = self.env | {"PREFECT_API_URL": self.api, "PREFECT_HOME": str(self.log.parent / "client")}
        argv = [sys.executable, "-m", "prefect", *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()
        psutil.wait_procs(self.family, timeout=60)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"))
    yield up
    up.close()


def deployments(site: Up) -> dict[str, dict[str, Any]]:
    found = httpx.post(f"{site.api}/deployments/filter", json={}, trust_env=False, timeout=60).raise_for_status().json()
    return {deployment["name"]: deployment for deployment in found}


def test_all_flows_are_deployed_and_run_in_this_folder(site: Up):
    found = deployments(site)
    assert set(found) == {"pipeline", "refresh", "train", "evaluate", "compare", "release"}
    for deployment in found.values():
        assert deployment["work_pool_name"] == "qinglan"
        assert deployment["parameters"] == {"profile": "embedded"}
        assert json.dumps(deployment["pull_steps"]).count(str(ROOT)) == 1
    (nightly,) = found["refresh"]["schedules"]
    assert (nightly["active"], nightly["schedule"]["timezone"]) == (False, "Asia/Shanghai")


@pytest.mark.parametrize(
    ("parameter", "complaint"),
    [("profil=embedded", "not found on the deployment"), ("fresh=perhaps", "not of type 'boolean'")],
)
def test_a_typo_in_a_run_is_refused(site: Up, parameter: str, complaint: str):
    done = site.prefect("deployment", "run", "refresh/refresh", "--param", parameter)
    assert done.returncode != 0
    assert complaint in " ".join((done.stdout + done.stderr).split())


def test_mlflow_answers(site: Up):
    url = f"http://127.0.0.1:{site.mlflow_port}/api/2.0/mlflow/experiments/search?max_results=1"
    assert httpx.get(url, trust_env=False, timeout=60).status_code == 200


def test_kill_9_leaves_no_process(site: Up):
    """Last: it ends the site."""
    assert len(site.family) >= 6  # a supervisor each, and what it supervises
    site.process.send_signal(signal.SIGKILL)
    site.process.wait()
    _, alive = psutil.wait_procs(site.family, timeout=60)
    assert alive == []
