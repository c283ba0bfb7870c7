"""Doctor against a real Ray of two nodes: a job writes on the mount that all share, and says what a node lacks."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import pytest
from fixture_types import ProfileOf
from waiting import wait_until

from qinglan.config import Trainer
from qinglan.ops.doctor import cluster
from qinglan.runs import supervise
from qinglan.runs.locks import ray_start_lock
from qinglan.runs.processes import free_port
from qinglan.training.engines.ray_jobs import RayJobs, UnreachableError

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.extended]


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a cluster of two nodes, of which only the head has A_KEY; all that was started ends with the test."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    folder = Path(tempfile.mkdtemp(prefix="qd"))  # short: Ray's sockets below it have a limit
    port, own_port = free_port(), free_port()
    head = ["--head", f"--port={own_port}", f"--dashboard-port={port}", f"--temp-dir={folder}"]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        log = stack.enter_context((folder / "ray.log").open("wb"))
        url, read = f"http://127.0.0.1:{port}", (folder / "ray.log").read_text
        for count, words in enumerate((head, [f"--address=127.0.0.1:{own_port}"]), 1):
            with ray_start_lock():
                stack.enter_context(node(words, log, A_KEY="sk-test" if count == 1 else ""))
                wait_until("a node", partial(has_nodes, url, count), explain=read)
        yield url


@contextmanager
def node(words: list[str], log: IO[bytes], **environment: str) -> Iterator[None]:
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2", "--disable-usage-stats"]
    # Nodes on one machine would share the port of the agent that takes jobs, and one of them would never answer.
    ray.append(f"--dashboard-agent-listen-port={free_port()}")
    process = subprocess.Popen(
        [sys.executable, supervise.__file__, *ray, *words],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env={**os.environ, "RAY_prestart_worker_first_driver": "0", **environment},
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(300)


def has_nodes(url: str, count: int) -> bool:
    try:
        with RayJobs(Trainer(ray_dashboard_url=url, ray_token_env="RAY_AUTH_TOKEN")) as jobs:
            return bool(jobs.ray_version()) and len(jobs.gpus_of_nodes() or ()) == count
    except UnreachableError:
        return False


def test_a_job_on_real_nodes_tells_what_they_have(
    profile_of: ProfileOf, dashboard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(python: str = sys.executable, key: str | None = None) -> dict[str, str | None]:
        trainer = {"ray_dashboard_url": dashboard, "ray_token_env": "RAY_AUTH_TOKEN", "python": python}
        profile = profile_of(trainer=trainer, judge={"model": "small", "base_url": "http://x/v1", "api_key_env": key})
        checks = []

        def takes_jobs() -> bool:
            checks[:] = cluster.check_cluster(profile)
            told = " ".join(f"{check.problem} {check.note}" for check in checks)
            return not any(slow in told for slow in ("No available agent", "did not answer in time"))

        wait_until("a node that takes jobs", takes_jobs, explain=lambda: checks)
        assert python == "/no/python" or checks[0].detail.count(socket.gethostname()) == 2
        return {check.name: check.problem or check.note for check in checks}

    monkeypatch.setattr(cluster, "JOB_WITHIN_S", 300.0)
    assert looked() == {"mount": None, "nodes": None}
    lacking = f"node {socket.gethostname()} lacks A_KEY; export them there before `ray start`"
    assert looked(key="A_KEY") == {"mount": None, "nodes": lacking}
    assert "trainer.python: the cluster's node has no /no/python" in (looked(python="/no/python")["mount"] or "")
    assert not list(tmp_path.rglob(".doctor-*"))
