"""verl as a job of a real Ray head, whose flow, worker and driver are killed one after the other."""

import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_nodes import ray_folder, ray_node, trainer_of
from toy_rl import Toy, make_model
from waiting import wait_until

from qinglan.runs import supervise
from qinglan.runs.processes import free_port
from qinglan.training.engines.progress import checkpoints, read_metrics
from qinglan.training.engines.ray_jobs import RayJobs

pytest.importorskip("verl")
pytestmark = [pytest.mark.slow, pytest.mark.extended]

STEPS = 12
"""So that it is far from its end when it is killed, though the test may look late."""
JOB = "qinglan-run-rl-verl-abcdefgh"


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A head's dashboard, and the process id of what keeps it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["--head", "--port=0", "--num-cpus=16", "--num-gpus=1", f"--dashboard-port={port}"]
    with ray_folder(monkeypatch) as folder, ray_node(url, 1, folder, *words, f"--temp-dir={folder}") as pid:
        yield url, pid


def process_of(head_pid: int, *words: str) -> int:
    """The one process of this head whose command line has all the words."""
    found = []
    for pid in supervise.descendants(head_pid):
        try:
            line = " ".join(psutil.Process(pid).cmdline())
        except psutil.NoSuchProcess:
            continue
        if all(word in line for word in words):
            found.append(pid)
    assert len(found) == 1, found
    return found[0]


def test_a_job_survives_its_flow_and_is_started_again_when_it_dies(tmp_path: Path, head: tuple[str, int]) -> None:
    url, head_pid = head
    model = make_model(tmp_path / "model")
    (tmp_path / "stage").mkdir()
    toy = Toy(tmp_path / "stage", model, total_steps=STEPS, save_freq=2, test_freq=2, val_before_train=False)
    spawn = multiprocessing.get_context("spawn")
    first = spawn.Process(target=toy.run_stage, args=(trainer_of(url),))
    first.start()
    log, said = toy.folder / "rl.log", toy.folder / "said.txt"

    def explain() -> str:
        return "".join(path.read_text() for path in (said, log) if path.exists())

    def newest() -> int:
        return max(checkpoints(toy.output), default=0)

    wait_until("the job", lambda: log.exists() and "dataset len" in log.read_text(), explain=explain)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join()

    second = spawn.Process(target=toy.run_stage, args=(trainer_of(url),))
    second.start()
    wait_until("it to be followed", lambda: f"following Ray job {JOB}-1" in said.read_text(), explain=explain)
    wait_until("a checkpoint", lambda: newest() >= 2, explain=explain)
    os.kill(process_of(head_pid, "ray::", "WorkerDict"), signal.SIGKILL)
    wait_until("another job", lambda: f"submitted Ray job {JOB}-2" in said.read_text(), explain=explain)
    first_end = newest()
    second.join(900)
    assert second.exitcode == 0, explain()

    with RayJobs(trainer_of(url)) as jobs:
        ends = {job.submission_id: job.status for job in jobs.all()}
    assert ends == {f"{JOB}-1": "FAILED", f"{JOB}-2": "SUCCEEDED"}
    (resumed_from,) = [int(step) for step in re.findall(r"Resuming from \S+global_step_(\d+)", log.read_text())]
    assert resumed_from == first_end < STEPS == newest()
    assert set(read_metrics(toy.folder)) >= set(range(first_end + 1, STEPS + 1))
