"""The disk fills up while the teacher is being asked: the run stops with one line, and goes on once there is room."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import asking_worker
import pytest
import yaml
from fake_service import FakeService, Script, completion

from qinglan.config import Profile, load_profile
from qinglan.runs.run import runs_of

pytestmark = [pytest.mark.slow, pytest.mark.extended]
DISK_MB, QUESTIONS, FULL_AFTER = 64, 360, 120
SAMPLE = {"sample_train_rows": 300, "sample_dev_rows": 30, "sample_test_rows": 30}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Teacher:
    """Counts what it answered, which is what has to be paid, and fills the disk at some point."""

    def __init__(self, ballast: Path) -> None:
        self.answered: Counter[str] = Counter()
        self.fills_disk = True
        self._ballast, self._lock = ballast, threading.Lock()

    def __call__(self, body: dict[str, Any]) -> Any:
        if "messages" not in body:
            return 404, {}
        time.sleep(0.02)
        with self._lock:
            self.answered[body["messages"][-1]["content"]] += 1
            if self.fills_disk and self.answered.total() == FULL_AFTER:
                fill(self._ballast)
        return 200, completion(f"护眼叶黄素 用法 {len(self.answered)}")


def fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as stream:
        for block in (1 << 20, 1 << 12, 1 << 8, 1):
            with suppress(OSError):
                while stream.write(b"x" * block) == block:
                    pass


def refresh(profile_path: Path) -> "subprocess.CompletedProcess[str]":
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return subprocess.run(
        [sys.executable, "-m", "qinglan.cli", "run", "refresh", "--profile", str(profile_path)],
        env=env | {"PREFECT_HOME": str(profile_path.parent / "prefect")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_a_refresh_survives_a_full_disk_and_pays_once(
    disk: Path, tmp_path: Path, serve: Callable[[Script], FakeService]
):
    ballast = disk / "ballast"
    teacher = Teacher(ballast)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(settings(disk, serve(teacher).url)), encoding="utf-8")
    profile = load_profile(str(path))

    stopped = refresh(path)
    assert stopped.returncode == 2, stopped.stdout + stopped.stderr
    last = stopped.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "error: distill: the disk is full; free some space, such as by `qinglan clean-up --profile small`"
    )
    assert "Traceback" not in stopped.stderr + stopped.stdout
    (run,) = runs_of(profile.paths.runs, "small")
    assert not (run / "distill" / "manifest.json").exists()
    assert not (run / "distill" / "rows.jsonl").exists()

    again = refresh(path)  # nothing was freed
    assert again.returncode == 2
    assert "disk is full" in again.stderr or " free; free some space" in again.stderr
    assert "Traceback" not in again.stderr + again.stdout

    ballast.unlink()
    teacher.fills_disk = False
    done = refresh(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.name for each in runs_of(profile.paths.runs, "small")] == [run.name]
    assert sum(asking_worker.paid(profile, run.name) for run in runs_of(profile.paths.runs, "small")) == len(
        teacher.answered
    )
    assert teacher.answered.total() == len(teacher.answered)


def test_what_was_asked_when_the_disk_filled_up_is_in_the_ledger(
    disk: Path, tmp_path: Path, profile_of: Callable[..., Profile], serve: Callable[[Script], FakeService]
):
    teacher = Teacher(disk / "ballast")
    service = serve(teacher)
    paths = {"runs": str(disk / "runs"), "state": str(disk / "state")}
    profile = profile_of(teacher={"model": "big", "base_url": service.url, "concurrency": 8}, paths=paths)
    asking_worker.write_questions(tmp_path, profile, QUESTIONS)

    def ask() -> tuple[int, str, int]:
        command = [sys.executable, asking_worker.__file__, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        return done.returncode, done.stderr, asking_worker.paid(profile)

    status, told, paid_for = ask()
    assert status == 1
    assert told.strip().endswith("database or disk is full")
    assert FULL_AFTER <= paid_for == teacher.answered.total() < QUESTIONS
    (disk / "ballast").unlink()
    teacher.fills_disk = False
    assert ask()[::2] == (0, QUESTIONS)
    assert teacher.answered.total() == QUESTIONS


def settings(disk: Path, teacher_url: str) -> dict[str, Any]:
    return {
        "extends": "embedded",
        "name": "small",
        "teacher": {"base_url": teacher_url, "concurrency": 8},
        "embedded": SAMPLE,
        "paths": {"runs": str(disk / "runs"), "state": str(disk / "state")},
        "retention": {"min_free_mb": 1},
        "distill": {"max_failed_share": 1.0},
        "validation": {"max_failed_share": 1.0},
        "select": {"min_top1_score": 0.0, "not_worse_than_original": False},
    }
