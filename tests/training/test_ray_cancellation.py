"""A real Prefect flow gets SIGTERM while its Ray job is running: only a cancelled one takes the job along."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_ray import FakeRay

from qinglan.runs import supervise

pytestmark = [pytest.mark.slow, pytest.mark.extended]

FLOW = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.states import Cancelling
from qinglan.config import Trainer
from qinglan.runs.launcher import Command
from qinglan.tasks.engine import run_engine

url, folder, is_cancelled = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "True"
profile = SimpleNamespace(trainer=Trainer(ray_dashboard_url=url))
run = SimpleNamespace(id="run", profile=profile)
stage = SimpleNamespace(run=run, name="rl", key="abcdefghijk", directory=folder, say=print)

def terminate():
    if is_cancelled:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(FlowRunContext.get().flow_run.id, Cancelling(), force=True)
    os.kill(os.getpid(), signal.SIGTERM)

@task
def train():
    run_engine(stage, Command(["true"]), name="verl", log="rl.log", on_poll=terminate)

@flow
def toy():
    train()

toy()
"""


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_sigterm_stops_the_job_of_a_cancelled_flow_only(tmp_path: Path, ray: FakeRay, is_cancelled: bool):
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path), "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true"}
    environment["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "300"
    environment.pop("PREFECT_API_URL", None)
    argv = [sys.executable, supervise.__file__, sys.executable, "-c", FLOW, ray.url, str(tmp_path), str(is_cancelled)]
    output = tmp_path / "output.txt"  # no pipe: Prefect's temporary server would hold it open
    with output.open("wb") as stream:
        flow = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=stream, stderr=stream, env=environment)
        with flow:
            assert flow.wait(600) != 0
    job = "qinglan-run-rl-verl-abcdefgh-1"
    assert ray.jobs[job]["status"] == ("STOPPED" if is_cancelled else "RUNNING"), output.read_text()
    assert ray.stopped() == ([job] if is_cancelled else [])
