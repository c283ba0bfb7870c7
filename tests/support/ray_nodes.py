"""Nodes of a real Ray on this machine, which all end with the test."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from waiting import wait_until

from qinglan.config import Trainer
from qinglan.runs import supervise
from qinglan.runs.locks import ray_start_lock
from qinglan.runs.processes import free_port
from qinglan.training.engines.ray_jobs import RayJobs, UnreachableError


def trainer_of(url: str) -> Trainer:
    return Trainer(ray_dashboard_url=url, ray_token_env="RAY_AUTH_TOKEN", python=sys.executable)


@contextmanager
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For a cluster with a token of its own, whatever this machine has."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    folder = Path(tempfile.mkdtemp(prefix="qr"))  # short: Ray's sockets below it have a limit
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_node(url: str, number: int, folder: Path, *words: str, **environment: str) -> Iterator[int]:
    """The cluster's node of this number; the process id of what keeps it."""
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *words]
    # Nodes on one machine would share the port of the agent that takes jobs, and one of them would never answer.
    ray.append(f"--dashboard-agent-listen-port={free_port()}")
    argv, log = [sys.executable, supervise.__file__, *ray], folder / "ray.log"
    env = {**os.environ, "RAY_prestart_worker_first_driver": "0", **environment}
    with ExitStack() as stack:
        with ray_start_lock(), log.open("ab") as output:
            pipe = subprocess.PIPE
            node = stack.enter_context(subprocess.Popen(argv, stdin=pipe, stdout=output, stderr=output, env=env))
            stack.callback(_kill, node.pid)
            wait_until("a node", lambda: _has_nodes(url, number), explain=log.read_text)
        yield node.pid


def _kill(keeper: int) -> None:
    """All that it keeps: asked to end, Ray takes the whole grace period."""
    for pid in supervise.descendants(keeper):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has_nodes(url: str, count: int) -> bool:
    try:
        with RayJobs(trainer_of(url)) as jobs:
            return bool(jobs.ray_version()) and len(jobs.gpus_of_nodes() or ()) == count
    except UnreachableError:
        return False
