"""Times that commands take to start, and the cost of a small run beside Prefect's own."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

SMALL = (
    "embedded.sample_train_rows=12",
    "embedded.sample_dev_rows=4",
    "embedded.sample_test_rows=4",
)
PYTHON = (sys.executable, "-W", "ignore")
EMPTY_FLOW = """
import os
os.environ["PREFECT_HOME"] = os.getcwd()
import mlflow
from prefect import flow, task

@task
def nothing():
    return None

@flow
def empty():
    with mlflow.start_run():
        nothing()

mlflow.set_tracking_uri("sqlite:///empty.db")
empty()
"""
"""A program of nothing but Prefect's temporary server and an MLflow run."""


def start_times(runs: int) -> Iterator[tuple[str, str]]:
    """Name and value of each time: the first command, and a small refresh.

    Args:
        runs: how often each is timed, of which the shortest counts.
    """
    qinglan = [*PYTHON, "-m", "qinglan.cli"]
    refresh = [*qinglan, "run", "refresh"]
    for setting in SMALL:
        refresh += ["--set", setting]
    empty_flow = [*PYTHON, "-c", EMPTY_FLOW]
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        help_s = shortest_s([*qinglan, "--help"], site, runs)
        prefect_s = shortest_s([*PYTHON, "-c", "import prefect"], site, runs)
        help_share = f"{help_s / prefect_s:.2f} × ({help_s:.2f} s of {prefect_s:.2f} s)"
        yield "`qinglan --help`, of `import prefect`", help_share
        yield "`refresh` of 20 rows", f"{shortest_s(refresh, site, 1):.1f} s"
        again_s = shortest_s(refresh, site, runs)
        yield "`refresh` again, nothing changed", f"{again_s:.1f} s"
        # The first empty flow makes the databases' tables, as the first refresh did.
        shortest_s(empty_flow, site, 1)
        empty_s = shortest_s(empty_flow, site, runs)
        empty_share = f"{again_s / empty_s:.2f} × (of {empty_s:.1f} s)"
        yield "of an empty Prefect flow with an MLflow run", empty_share


def shortest_s(argv: Sequence[str], cwd: Path, runs: int) -> float:
    """Wall time of a process, the shortest of so many runs."""
    moments = [time.monotonic()]
    for _ in range(runs):
        subprocess.run(argv, cwd=cwd, capture_output=True, check=True)
        moments.append(time.monotonic())
    return min(end - start for start, end in pairwise(moments))
