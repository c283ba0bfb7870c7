"""Ray jobs against a fake dashboard: submitted, followed, found again, and stopped only on
purpose."""

import itertools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doubles import KilledError, raising
from fake_ray import FakeRay
from waiting import wait_until

from qinglan.config import Trainer
from qinglan.errors import ConfigError, EngineError, StageError
from qinglan.runs.launcher import AttemptFailedError, Command
from qinglan.training.engines import ray_jobs
from qinglan.training.engines.ray_jobs import JobSeries, RayJobs, stop_all

FIRST = "qinglan-run-1-rl-verl-abcdefgh-1"
SECOND = "qinglan-run-1-rl-verl-abcdefgh-2"


class Flow:
    """One flow process that runs verl on the cluster."""

    def __init__(
        self, ray: FakeRay, directory: Path, key: str = "abcdefghijk", retry_s: float = 60.0
    ) -> None:
        self.ray = ray
        self.directory = directory
        self.said: list[str] = []
        self.log = directory / "rl.log"
        self._trainer = Trainer(ray_dashboard_url=ray.url)
        self._settings: dict[str, Any] = {"key": key, "retry_s": retry_s}

    def run(
        self,
        on_poll: Callable[[], None] | None = None,
        *,
        command: Callable[[], Command] = lambda: Command(["true"]),
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        with RayJobs(self._trainer) as jobs:
            series = JobSeries(
                jobs,
                run_id="run-1",
                stage="rl",
                engine="verl",
                directory=self.directory,
                say=lambda text, **_: self.said.append(text),
                **self._settings,
            )
            series.run(
                command, name="verl", log_file=self.log, on_poll=on_poll, is_cancelled=is_cancelled
            )

    def ends(
        self, name: str, status: str = "SUCCEEDED", message: str = "", **more: Any
    ) -> Callable[[], None]:
        """A watcher during whose second look the job ends."""
        looks = itertools.count(1)

        def on_poll() -> None:
            if next(looks) == 2:
                self.ray.end(name, status, message, **more)

        return on_poll

    def die(self, error: BaseException, **more: Any) -> None:
        """The process ends in the middle."""
        with pytest.raises(type(error)):
            self.run(raising(error), **more)


@pytest.fixture
def flow(ray: FakeRay, tmp_path: Path) -> Flow:
    return Flow(ray, tmp_path)


def test_a_job_is_submitted_with_its_command_environment_and_gpus(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    command = Command(
        ["/opt/python", "-m", "swift", "a b", "it's"], {"MINE": "1", "RAY_AUTH_TOKEN": ""}, gpus=4
    )
    flow.run(flow.ends(FIRST), command=lambda: command)
    job = flow.ray.jobs[FIRST]
    assert shlex.split(job["entrypoint"])[-5:] == command.argv
    assert job["runtime_env"]["env_vars"]["MINE"] == "1"
    assert job["runtime_env"]["env_vars"]["DO_NOT_TRACK"] == "true"
    assert "RAY_AUTH_TOKEN" not in job["runtime_env"]["env_vars"], "the node's own holds"
    assert job["entrypoint_num_gpus"] == 4
    assert "sk-secret" not in str(flow.ray.jobs), (
        "no variable of the flow's own environment is sent"
    )
    assert flow.ray.stopped() == []


def test_a_failure_shows_the_jobs_message_and_the_end_of_its_log_or_the_lines_that_ray_kept(
    flow: Flow,
):
    flow.log.write_text("of an earlier attempt\n")
    message = (
        "Job entrypoint command failed with exit code 1, "
        "last available logs (truncated to 20,000 chars):\nx"
    )

    def write() -> Command:
        with flow.log.open("a") as stream:
            stream.write("ActorDiedError\n")
        return Command(["true"])

    with pytest.raises(AttemptFailedError) as caught:
        flow.run(flow.ends(FIRST, "FAILED", message, after_s=90), command=write)
    assert str(caught.value) == (
        f"verl failed as Ray job {FIRST}: Job entrypoint command failed with exit code 1; "
        f"full log: {flow.log}"
    )
    assert (caught.value.said, caught.value.seconds) == ("    ActorDiedError", 90)
    flow.log.unlink()
    message = (
        "Job entrypoint failed with exit code 72, "
        "last available logs (truncated):\n/x is not on this node"
    )
    with pytest.raises(AttemptFailedError, match="exit code 72") as caught:
        flow.run(flow.ends(SECOND, "FAILED", message))
    assert caught.value.said == "    /x is not on this node"


def test_what_the_job_writes_is_forwarded_without_long_lines(flow: Flow):
    def on_poll() -> None:
        with flow.log.open("a") as stream:
            stream.write(f"\x1b[36mloading\x1b[0m\nstep:1 {'x' * 400}\n 10%\r 20%\r100% saved\n")
        flow.ray.end(FIRST, "SUCCEEDED")

    flow.run(on_poll)
    assert flow.said[-1] == "loading\n100% saved"


def test_a_flow_that_comes_back_follows_the_same_job(flow: Flow):
    # Another user's.
    flow.ray.jobs["20261127"] = {"submission_id": "20261127", "status": "RUNNING"}
    flow.die(KilledError())
    flow.run(flow.ends(FIRST), command=raising(AssertionError("the running job has its command")))
    assert list(flow.ray.jobs) == ["20261127", FIRST]
    assert flow.ray.stopped() == []


def test_a_job_that_ended_well_meanwhile_is_not_run_again_but_once(flow: Flow):
    flow.die(KilledError())
    flow.ray.end(FIRST, "SUCCEEDED")
    polled: list[int] = []
    flow.run(lambda: polled.append(1))
    assert (list(flow.ray.jobs), polled) == ([FIRST], [1]), "its last metrics are read"
    flow.run(flow.ends(SECOND))
    assert list(flow.ray.jobs) == [FIRST, SECOND], "what was asked for again is done again"


@pytest.mark.parametrize("status", ["FAILED", "STOPPED"])
def test_a_job_that_failed_meanwhile_has_a_successor(flow: Flow, status: str):
    flow.die(KilledError())
    flow.ray.end(FIRST, status)
    flow.run(flow.ends(SECOND))
    assert flow.ray.jobs[SECOND]["status"] == "SUCCEEDED"


def test_a_job_of_other_inputs_is_stopped_first(flow: Flow, tmp_path: Path):
    flow.die(KilledError())
    job_of_other_key = "qinglan-run-1-rl-verl-otherkey-1"
    Flow(flow.ray, tmp_path, key="otherkey").run(flow.ends(job_of_other_key))
    assert flow.ray.stopped() == [FIRST]


def test_network_faults_neither_stop_nor_double_the_job(flow: Flow):
    flow.ray.loses_next_submission_answer = True
    looks = itertools.count(1)

    def on_poll() -> None:
        look = next(looks)
        flow.ray.is_down = 2 <= look <= 6
        if look == 10:
            flow.ray.end(FIRST, "SUCCEEDED")

    flow.run(on_poll)
    assert (flow.ray.stopped(), list(flow.ray.jobs)) == ([], [FIRST])


def test_a_dashboard_that_stays_away_is_given_up_but_not_the_job(ray: FakeRay, tmp_path: Path):
    flow = Flow(ray, tmp_path, retry_s=0.1)

    def on_poll() -> None:
        ray.is_down = True

    with pytest.raises(
        EngineError,
        match=r"no answer for 0 s: Ray job .* goes on by itself; run again to follow it",
    ):
        flow.run(on_poll)
    assert (ray.stopped(), ray.jobs[FIRST]["status"]) == ([], "RUNNING")


def test_a_refusal_is_said_at_once(flow: Flow):
    flow.ray.refusal = "Traceback\nTypeError: entrypoint must be a string"
    with pytest.raises(
        EngineError, match=f"refuses job {FIRST}: TypeError: entrypoint must be a string"
    ):
        flow.run()


def test_a_job_that_the_cluster_forgot_counts_as_failed(flow: Flow):
    with pytest.raises(AttemptFailedError, match="no longer knows job"):
        flow.run(flow.ray.jobs.clear)
    flow.run(flow.ends(FIRST))


def test_a_job_that_was_stopped_by_hand_is_not_started_again(flow: Flow):
    with pytest.raises(EngineError, match="was stopped by hand") as caught:
        flow.run(flow.ends(FIRST, "STOPPED"))
    assert not isinstance(caught.value, AttemptFailedError)


@pytest.mark.parametrize(
    ("error", "is_cancelled", "stopped"),
    [
        (StageError("too many samples could not be scored"), False, [FIRST]),
        (KeyboardInterrupt(), False, [FIRST]),
        (KilledError(), True, [FIRST]),
        (KilledError(), False, []),
        (ConnectionError("Prefect is away"), False, []),
    ],
)
def test_a_job_is_stopped_only_on_purpose(
    flow: Flow, error: BaseException, is_cancelled: bool, stopped: list[str]
):
    flow.die(error, is_cancelled=lambda: is_cancelled)
    assert flow.ray.stopped() == stopped


def test_all_jobs_of_a_run_are_stopped_and_no_others(flow: Flow):
    flow.die(KilledError())
    flow.ray.jobs["qinglan-run-2-rl-verl-abcdefgh-1"] = {"submission_id": "x", "status": "RUNNING"}
    trainer = Trainer(ray_dashboard_url=flow.ray.url)
    assert stop_all(trainer, "run-1") == [FIRST]
    assert stop_all(trainer, "run-1") == []
    assert stop_all(Trainer(), "run-2") == [], "no cluster is used"


def test_a_token_is_read_from_the_environment(ray: FakeRay, monkeypatch: pytest.MonkeyPatch):
    trainer = Trainer(ray_dashboard_url=ray.url, ray_token_env="RAY_TOKEN")
    with pytest.raises(ConfigError, match="RAY_TOKEN"):
        RayJobs(trainer)
    monkeypatch.setenv("RAY_TOKEN", "t0ken")
    with RayJobs(trainer) as jobs:
        assert (jobs.ray_version(), jobs.gpus_of_nodes()) == ("2.60.0", [8])
    assert ray.headers[-1]["authorization"] == "Bearer t0ken"


def entry(directory: Path, log: Path, code: str) -> str:
    """The shell line that Ray would run."""
    script = [
        "bash",
        "-c",
        ray_jobs._ENTRY,
        "qinglan",
        str(directory),
        str(log),
        sys.executable,
        "-c",
        code,
    ]
    return f"exec {shlex.join(script)}"


def test_the_entry_point_writes_to_both_logs_in_the_stages_directory(tmp_path: Path):
    log = tmp_path / "rl.log"
    log.write_text("before\n")
    code = (
        "import os, sys; print(os.getcwd()); "
        "print(os.environ.get('CUDA_VISIBLE_DEVICES')); sys.exit(3)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        entry(tmp_path, log, code), shell=True, env=environment, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (3, f"{tmp_path}\nNone\n")
    assert log.read_text() == f"before\n{tmp_path}\nNone\n"
    result = subprocess.run(
        entry(tmp_path / "no", tmp_path / "log", ""), shell=True, capture_output=True, text=True
    )
    assert result.returncode == 72
    assert "no is not on this node: paths.runs must be on a mount" in result.stderr


def test_killing_the_entry_point_kills_the_engine(tmp_path: Path):
    code = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    pid_file = tmp_path / "pid"
    command = entry(tmp_path, tmp_path / "log", code)
    with subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL) as shell:
        wait_until("the engine", lambda: pid_file.exists() and pid_file.read_text())
        assert int(pid_file.read_text()) == shell.pid
        shell.send_signal(signal.SIGKILL)
