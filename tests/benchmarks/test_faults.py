"""The short form of the fault matrix: random faults, others each day, against the real parts."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_only_a_spoiled_answer_explains_a_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    books = import_module("fault_matrix.services").FaultyBooks()
    for fault, text in (
        ("cut body", "an answer"),
        ("", ""),
        ("", "an answer"),
        ("cut body", "an answer"),
    ):
        books.faults["teacher"] = fault
        completion = {"choices": [{"message": {"content": text}}]}
        books.note("teacher", "question", json.dumps(completion).encode())
    assert books.stats() == {"paid": 4, "repeated": 3, "paid_twice": 1}


@pytest.mark.slow
@pytest.mark.extended
def test_random_faults_lose_no_row_and_pay_nothing_twice() -> None:
    argv = [sys.executable, "benchmarks/faults.py", "--short"]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    counts = "rows_lost 0, paid_twice 0, failures_as_scores 0, hangs 0, other_runs_harmed 0"
    assert f"{counts}, 20 trials" in process.stdout
