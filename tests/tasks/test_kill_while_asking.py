"""kill -9 while the teacher is being asked, twenty times over: no paid answer is lost, none is bought twice."""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import asking_worker
import pytest
from fake_service import FakeService, Script, completion

from qinglan.config import Profile

pytestmark = [pytest.mark.slow, pytest.mark.extended]
ROWS, CONCURRENCY, TRIALS = 1000, 8, 20
IN_FLIGHT = CONCURRENCY + 8
"""On the wire, or answered and being committed."""


class Teacher:
    """Answers after a moment; what it answered is what has to be paid."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self._lock, self._random = Lock(), random.Random(5)

    def __call__(self, body: dict[str, Any]) -> Any:
        question = body["messages"][-1]["content"]
        with self._lock:
            wait_s = self._random.uniform(0.01, 0.05)
            fails = self._random.random() < 0.05
        time.sleep(wait_s)
        if fails:
            return 500, {}
        with self._lock:
            self.answered[question] += 1
        return 200, completion("改写 " + question)


def start(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, asking_worker.__file__, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "asking\n"
    return process


def test_no_paid_answer_is_lost_and_none_is_bought_twice(
    tmp_path: Path, profile_of: Callable[..., Profile], serve: Callable[[Script], FakeService]
):
    teacher = Teacher()
    service = serve(teacher)
    profile = profile_of(teacher={"model": "big", "base_url": service.url, "concurrency": CONCURRENCY})
    asking_worker.write_questions(tmp_path, profile, ROWS)
    moments = random.Random(11)
    for trial in range(1, TRIALS + 1):
        process = start(tmp_path)
        time.sleep(moments.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        time.sleep(0.1)  # the service finishes what it was asked
        lost = teacher.answered.total() - asking_worker.paid(profile)
        assert lost <= IN_FLIGHT * trial
    process = start(tmp_path)
    process.communicate(timeout=900)
    assert process.returncode == 0
    assert len(teacher.answered) == ROWS
    bought_twice = teacher.answered.total() - ROWS
    assert bought_twice <= IN_FLIGHT * TRIALS
    assert asking_worker.paid(profile) == ROWS, "none is there twice"
