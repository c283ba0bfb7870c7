"""The short form of the fault matrix: random faults, others each day, against the real parts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.extended
def test_random_faults_lose_no_row_and_pay_nothing_twice() -> None:
    argv = [sys.executable, "benchmarks/faults.py", "--short"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)  # the seed, and a line a trial
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rows_lost 0, paid_twice 0, failures_as_scores 0, hangs 0, other_runs_harmed 0, 20 trials" in done.stdout
