"""A real Ray: verl as its job, whose flow and worker are killed; what doctor finds out of two nodes
by a job."""

import multiprocessing
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fixture_types import ProfileOf
from toy_rl import NEEDS_VLLM, VLLM_PYTHON, Toy, make_model, vllm_toy
from waiting import processes_with, wait_until

from qinglan.config import Trainer
from qinglan.ops.doctor import cluster
from qinglan.runs import supervise
from qinglan.runs.launcher import remove_leaked_memory
from qinglan.runs.locks import ray_start_lock
from qinglan.runs.processes import free_port
from qinglan.training.engines.progress import checkpoints, read_metrics
from qinglan.training.engines.ray_jobs import RayJobs, UnreachableError

pytest.importorskip("verl")
pytestmark = [pytest.mark.slow, pytest.mark.extended]

STEPS = 12
"""So that it is far from its end when it is killed, though the test may look late."""
JOB = "qinglan-run-rl-verl-abcdefgh"
_RAY_STARTS = 3
"""Most starts of a node."""


def trainer_of(url: str) -> Trainer:
    return Trainer(ray_dashboard_url=url, ray_token_env="RAY_AUTH_TOKEN", python=sys.executable)


@contextmanager
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a cluster with a token of its own, whatever this machine has."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Short: the paths of Ray's sockets below it have a limit.
    folder = Path(tempfile.mkdtemp(prefix="qr"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_node(
    url: str,
    number: int,
    folder: Path,
    *words: str,
    python: str = sys.executable,
    **environment: str,
) -> Iterator[int]:
    """The cluster's node of this number; the process id of what keeps it."""
    ray = [str(Path(python).with_name("ray")), "start", "--block", "--disable-usage-stats", *words]
    # Nodes on one machine would share the port of the agent that takes jobs, and one of them would
    # never answer.
    ray.append(f"--dashboard-agent-listen-port={free_port()}")
    argv = [sys.executable, supervise.__file__, *ray]
    log = folder / "ray.log"
    env = {**os.environ, "RAY_prestart_worker_first_driver": "0", **environment}
    with ExitStack() as stack, log.open("ab") as output:

        def start() -> subprocess.Popen[bytes]:
            pipe = subprocess.PIPE
            node = stack.enter_context(
                subprocess.Popen(argv, stdin=pipe, stdout=output, stderr=output, env=env)
            )
            stack.callback(_kill, node.pid)
            return node

        with ray_start_lock():
            for _ in range(_RAY_STARTS):
                node = start()
                is_settled = partial(_is_settled, node, url, number)
                wait_until("a node", is_settled, explain=log.read_text)
                # On a busy machine Ray may give up after its 30 s.
                if node.poll() is None:
                    break
        assert node.poll() is None, log.read_text()
        yield node.pid


def _kill(keeper: int) -> None:
    """Kill all that it keeps: asked to end, Ray takes the whole grace period."""
    for pid in supervise.descendants(keeper):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_settled(node: subprocess.Popen[bytes], url: str, count: int) -> bool:
    """The node has come, or its start has failed."""
    return node.poll() is not None or _has_nodes(url, count)


def _has_nodes(url: str, count: int) -> bool:
    try:
        with RayJobs(trainer_of(url)) as jobs:
            return bool(jobs.ray_version()) and len(jobs.gpus_of_nodes() or ()) == count
    except UnreachableError:
        return False


class Head(NamedTuple):
    """A cluster's first node."""

    url: str
    """Address of its dashboard."""
    address: str
    """Address for other nodes."""
    pid: int
    """Id of the process that keeps it."""
    folder: Path


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A node with a key that no other node has."""
    port = free_port()
    own_port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = [
        "--head",
        f"--port={own_port}",
        "--num-cpus=16",
        "--num-gpus=1",
        f"--dashboard-port={port}",
    ]
    with pytest.MonkeyPatch.context() as patch, ray_folder(patch) as folder:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with ray_node(url, 1, folder, *words, f"--temp-dir={folder}", A_KEY="sk-test") as pid:
            yield Head(url, f"127.0.0.1:{own_port}", pid, folder)


def said_of(toy: Toy) -> str:
    return "".join(path.read_text() for path in (toy.said, toy.folder / "rl.log") if path.exists())


def test_a_job_survives_its_flow_and_is_started_again_when_it_dies(
    tmp_path: Path, head: Head
) -> None:
    model = make_model(tmp_path / "model")
    critic = make_model(tmp_path / "critic", hidden_size=32, layers=1)
    (tmp_path / "stage").mkdir()
    rl: dict[str, Any] = {"lora_rank": 4, "critic_model": str(critic), "val_before_train": False}
    toy = Toy(tmp_path / "stage", model, total_steps=STEPS, save_freq=2, test_freq=2, **rl)
    spawn = multiprocessing.get_context("spawn")
    first = spawn.Process(target=toy.run_stage, args=(trainer_of(head.url),))
    first.start()
    log = toy.folder / "rl.log"
    explain = partial(said_of, toy)

    def newest() -> int:
        return max(checkpoints(toy.output), default=0)

    wait_until(
        "the job", lambda: log.exists() and "dataset len" in log.read_text(), explain=explain
    )
    first.kill()
    first.join()

    second = spawn.Process(target=toy.run_stage, args=(trainer_of(head.url),))
    second.start()
    wait_until(
        "it to be followed",
        lambda: f"following Ray job {JOB}-1" in toy.said.read_text(),
        explain=explain,
    )
    wait_until("a checkpoint", lambda: newest() >= 2, explain=explain)
    (worker,) = processes_with("ray::", "WorkerDict", started_by=head.pid)
    worker.kill()
    wait_until(
        "another job",
        lambda: f"submitted Ray job {JOB}-2" in toy.said.read_text(),
        explain=explain,
    )
    first_end = newest()
    second.join(900)
    assert second.exitcode == 0, explain()

    with RayJobs(trainer_of(head.url)) as jobs:
        ends = {job.submission_id: job.status for job in jobs.all()}
    assert ends == {f"{JOB}-1": "FAILED", f"{JOB}-2": "SUCCEEDED"}
    resumed_from = re.findall(r"Resuming from \S+global_step_(\d+)", log.read_text())
    assert resumed_from == [str(first_end)]
    assert first_end < STEPS
    assert newest() == STEPS
    steps = read_metrics(toy.folder)
    assert set(steps) >= set(range(first_end + 1, STEPS + 1))
    assert steps[STEPS]["actor/grad_norm"] > 0
    assert steps[STEPS]["critic/grad_norm"] > 0


@NEEDS_VLLM
def test_vllm_on_two_nodes_one_of_which_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", hidden_size=128, vocab_size=None)
    (tmp_path / "stage").mkdir()
    toy = vllm_toy(
        tmp_path / "stage",
        model,
        total_steps=4,
        save_freq=2,
        test_freq=2,
        ppo_micro_batch_size_per_gpu=4,
    )
    port = free_port()
    dashboard = free_port()
    python = str(VLLM_PYTHON)
    url = f"http://127.0.0.1:{dashboard}"
    # A logical GPU each, for a worker and its vLLM.
    words = ["--num-cpus=16", "--num-gpus=1"]
    head = ["--head", f"--port={port}", f"--dashboard-port={dashboard}", *words]
    trainer = trainer_of(url).model_copy(
        update={"python": python, "nodes": 2, "stalled_after_s": 240}
    )
    trains = threading.Thread(target=toy.run_stage, args=(trainer,), daemon=True)
    explain = partial(said_of, toy)
    with (
        ray_folder(monkeypatch) as folder,
        ray_node(url, 1, folder, *head, f"--temp-dir={folder}", python=python) as first,
        RayJobs(trainer_of(url)) as jobs,
    ):
        second_node = partial(
            ray_node, url, 2, folder, f"--address=127.0.0.1:{port}", *words, python=python
        )
        with second_node() as second:
            leaked = Path("/dev/shm", f"psm_{secrets.token_hex()}")
            leaked.touch()
            trains.start()
            wait_until(
                "a checkpoint",
                lambda: checkpoints(toy.output) or not trains.is_alive(),
                explain=explain,
            )
            for node in (first, second):
                workers = processes_with("WorkerDict", started_by=node)
                assert len(workers) == 1, explain()
                engines = processes_with("VLLM::EngineCore", started_by=node)
                assert len(engines) == 1, explain()
            assert not leaked.exists(), "what a killed attempt left"
        wait_until("the node's end", lambda: len(jobs.gpus_of_nodes() or ()) == 1, explain=explain)
        with second_node():
            trains.join(1800)
    # Left by the nodes, which are killed.
    remove_leaked_memory(tmp_path.stat().st_mtime)
    assert "starting it again from its newest checkpoint, 1 of 2 restarts" in explain()
    assert max(checkpoints(toy.output)) == 4, explain()


def test_doctors_job_tells_what_each_node_has(
    profile_of: ProfileOf, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: its second node joins the head, and leaves it."""

    def look(python: str = sys.executable, key: str | None = None) -> dict[str, str | None]:
        """Problem or note of each of doctor's checks."""
        trainer = {
            "ray_dashboard_url": head.url,
            "ray_token_env": "RAY_AUTH_TOKEN",
            "python": python,
        }
        profile = profile_of(
            trainer=trainer, judge={"model": "small", "base_url": "http://x/v1", "api_key_env": key}
        )
        checks = []

        def takes_jobs() -> bool:
            checks[:] = cluster.check_cluster(profile)
            text = " ".join(f"{check.problem} {check.note}" for check in checks)
            return "No available agent" not in text and "did not answer in time" not in text

        wait_until("a node that takes jobs", takes_jobs, explain=lambda: checks)
        if python != "/no/python":
            assert checks[0].detail.count(socket.gethostname()) == 2
        return {check.name: check.problem or check.note for check in checks}

    monkeypatch.setattr(cluster, "JOB_WITHIN_S", 300.0)
    with ray_node(head.url, 2, head.folder, "--num-cpus=2", f"--address={head.address}", A_KEY=""):
        assert look() == {"mount": None, "nodes": None}
        lacking = f"node {socket.gethostname()} lacks A_KEY; export them there before `ray start`"
        assert look(key="A_KEY") == {"mount": None, "nodes": lacking}
        problem = look(python="/no/python")["mount"] or ""
        assert "trainer.python: the cluster's node has no /no/python" in problem
    assert list(tmp_path.rglob(".doctor-*")) == []
