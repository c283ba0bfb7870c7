"""Doctor's job on the cluster and what it tells: here a dashboard runs it on this machine."""

import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay
from fixture_types import ProfileOf

from qinglan.config import Profile
from qinglan.ops.doctor import cluster
from qinglan.ops.preflight import trainer


class RunningRay(FakeRay):
    """Runs what is submitted, as Ray does, and tells of a failure as Ray does."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[], Any] = lambda: None
        self.after: Callable[[], Any] = lambda: None

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        answer = super().answer(method, path, body)
        if path == "/api/jobs/" and method == "POST":
            self.before()
            process = subprocess.run(
                ["sh", "-c", body["entrypoint"]], capture_output=True, text=True, check=False
            )
            self.after()
            if process.returncode == 0:
                self.end(body["submission_id"], "SUCCEEDED", "Job finished.")
            else:
                message = (
                    f"Job entrypoint command failed with exit code {process.returncode}, "
                    "last available logs (truncated to 20,000 chars):\n"
                    f"{process.stdout}{process.stderr}"
                )
                self.end(body["submission_id"], "FAILED", message)
        return answer


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningRay]:
    monkeypatch.setattr(trainer, "TRAINER_PACKAGES", ("pytest",))
    monkeypatch.setattr(cluster, "_SEEN_WITHIN_S", 0.0)
    monkeypatch.setattr(cluster, "_LOG_WITHIN_S", 1.0)
    fake = RunningRay()
    yield fake
    fake.close()


def on(
    profile_of: ProfileOf, ray: FakeRay, python: str = sys.executable, **sections: Any
) -> Profile:
    return profile_of(trainer={"ray_dashboard_url": ray.url, "python": python}, **sections)


def problems(profile: Profile) -> dict[str, str | None]:
    return {check.name: check.problem for check in cluster.check_cluster(profile)}


def test_one_mount_and_all_that_a_job_needs(
    profile_of: ProfileOf, running: RunningRay, tmp_path: Path
):
    modes: list[int] = []

    def note_modes() -> None:
        for folder in tmp_path.glob("*/.doctor-*"):
            modes.append(stat.S_IMODE(folder.stat().st_mode))

    running.before = note_modes
    mount, nodes = cluster.check_cluster(on(profile_of, running))
    assert (mount.problem, nodes.problem) == (None, None)
    assert mount.detail.startswith(f"{tmp_path}/runs and {tmp_path}/state: written on ")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["runs", "state"]
    assert modes == [0o777, 0o777], "the nodes' user may be another"


def test_the_nodes_lack_keys_packages_and_our_version(
    profile_of: ProfileOf, running: RunningRay, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer, "TRAINER_PACKAGES", ("pytest", "no-such-package"))
    monkeypatch.setattr(cluster, "installed", lambda _: "9.9.9")
    judge = {"model": "small", "base_url": "http://x/v1", "api_key_env": "A_KEY"}
    problem = problems(on(profile_of, running, judge=judge))["nodes"] or ""
    assert "lacks no-such-package; see docker/trainer.Dockerfile; " in problem
    assert f"has qinglan {version('qinglan')}, here is 9.9.9; install the same there; " in problem
    assert problem.endswith("lacks A_KEY; export them there before `ray start`")


@pytest.mark.parametrize(
    ("folder", "beginning", "part"),
    [
        (
            "runs",
            "paths.runs: this machine writes to {}/runs, and the cluster's node does not see",
            "",
        ),
        (
            "state",
            "paths.state: node ",
            "can't write there: No such file or directory; mount one file system here and",
        ),
    ],
)
def test_a_folder_that_the_node_does_not_see(
    profile_of: ProfileOf,
    running: RunningRay,
    tmp_path: Path,
    folder: str,
    beginning: str,
    part: str,
):
    running.before = lambda: (tmp_path / folder).rename(tmp_path / "elsewhere")
    problem = problems(on(profile_of, running))["mount"] or ""
    assert problem.startswith(beginning.format(tmp_path))
    assert part in problem


def test_what_the_node_writes_is_not_seen_here(
    profile_of: ProfileOf, running: RunningRay, tmp_path: Path
):
    running.after = lambda: [file.unlink() for file in tmp_path.rglob("driver")]
    problem = problems(on(profile_of, running))["mount"] or ""
    assert problem.count("wrote a file that this machine does not see") == 2


def test_an_interpreter_that_the_node_lacks(profile_of: ProfileOf, running: RunningRay):
    problem = (
        "trainer.python: the cluster's node has no /no/python; "
        "name the interpreter of the nodes' environment"
    )
    assert problems(on(profile_of, running, python="/no/python"))["mount"] == problem


def test_this_machine_can_not_write(profile_of: ProfileOf, running: RunningRay, tmp_path: Path):
    (tmp_path / "runs").write_text("a file")
    assert (problems(on(profile_of, running))["mount"] or "").startswith(
        "paths.runs: this machine can't write to "
    )
    assert running.jobs == {}


@pytest.mark.parametrize(
    ("status", "beginning"),
    [
        ("PENDING", "None not known: the job still waits"),
        ("RUNNING", "mount: the job still runs after"),
    ],
)
def test_a_job_that_does_not_end_is_stopped(
    profile_of: ProfileOf,
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    beginning: str,
):
    monkeypatch.setattr(cluster, "JOB_WITHIN_S", 0.3)
    answer = ray.answer

    def answer_as(method: str, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        reply = answer(method, path, body)
        for job in ray.jobs.values():
            if job["status"] == "RUNNING":
                job["status"] = status
        return reply

    monkeypatch.setattr(ray, "answer", answer_as)
    (mount,) = cluster.check_cluster(on(profile_of, ray))
    assert f"{mount.problem} {mount.note}".startswith(beginning)
    assert ray.stopped() == list(ray.jobs)


def test_a_dashboard_that_refuses_or_does_not_answer_leaves_no_folder(
    profile_of: ProfileOf, ray: FakeRay, tmp_path: Path
):
    ray.refusal = "no job today"
    assert "no job today" in (problems(on(profile_of, ray))["mount"] or "")
    assert list(tmp_path.rglob(".doctor-*")) == []
    ray.is_down = True
    (mount,) = cluster.check_cluster(on(profile_of, ray))
    assert (mount.problem, mount.note) == (None, "not known: Ray can't be asked, see `ray`")
    assert list(tmp_path.rglob(".doctor-*")) == []


def test_only_what_nodes_read_is_asked_for(profile_of: ProfileOf):
    chat = {"model": "big", "base_url": "http://x/v1", "api_key_env": "A_KEY"}
    rag = {"url": "http://x", "api_key_env": "RAG_KEY"}
    profile = profile_of(teacher=chat, rag=rag, ledger={"url_env": "A_LEDGER"})
    assert cluster.keys_of_nodes(profile) == ["A_LEDGER", "RAG_KEY"]
