"""Time that `qinglan up` takes, time that a flow waits for its worker, and task runs that get lost.

    make bench NAME=up

Brings a site up in an empty folder, then again with what it has left; creates flow runs by
Prefect's API, as its pages do, one for each work pool, and takes the time until each is running.
Then a flow with 10,000 task runs of nothing is run against the site: does the server know all of
them? Prints the table and writes benchmarks/results/up.json.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qinglan.ops.prefect.api import RetryingClient

RESULT = Path(__file__).parent / "results" / "up.json"
ROOT = Path(__file__).parent.parent
TASK_RUNS = 10_000
STARTED_BY = {"qinglan": "refresh/refresh", "qinglan-trainer": "train/train"}
WITHIN_S = 300.0
SETTLED_S = 20.0
"""Time without a new record after which no more come."""
MANY_TASKS = f"""
from prefect import flow, task
@task
def nothing(number: int) -> int:
    return number
@flow
def many() -> None:
    futures = [nothing.submit(number) for number in range({TASK_RUNS})]
    for future in futures:
        future.wait()
many()
"""


def main() -> None:
    """Run, then print and write."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        with up(Path(folder)) as site:
            empty_s = site.ready_s
        with up(Path(folder)) as site:
            warm_s = site.ready_s
            waits = {pool: site.seconds_to_running(name) for pool, name in STARTED_BY.items()}
            recorded = site.task_runs_recorded()
    result = {
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "ready_empty_s": round(empty_s, 1),
        "ready_warm_s": round(warm_s, 1),
        "created_to_running_s": {pool: round(seconds, 1) for pool, seconds in waits.items()},
        "task_runs": TASK_RUNS,
        "task_runs_recorded": recorded,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("| | |\n| --- | ---: |")
    print(f"| ready in an empty folder, s | {empty_s:.1f} |\n| ready again, s | {warm_s:.1f} |")
    for pool, seconds in waits.items():
        print(f"| from creating a flow run to RUNNING, pool `{pool}`, s | {seconds:.1f} |")
    print(f"| task runs recorded, of {TASK_RUNS:,} | {recorded:,} |\n\nWritten to {RESULT}")


class Site:
    """A site that is up."""

    def __init__(self, folder: Path, ready_s: float, output: str) -> None:
        self.folder = folder
        self.ready_s = ready_s
        address = re.search(r"^Prefect +(\S+)$", output, re.MULTILINE)
        assert address, output
        self.api_url = f"{address[1]}/api"
        self.api = RetryingClient(base_url=self.api_url, trust_env=False, timeout=60)

    def get(self, path: str) -> Any:
        """The API's answer."""
        return self.api.get(path).raise_for_status().json()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The API's answer to a query."""
        return self.api.post(path, json=body).raise_for_status().json()

    def seconds_to_running(self, deployment: str) -> float:
        """Time from the request that the page sends until the run says that it is running.

        It says so in a process of its own.
        """
        deployment_id = self.get(f"deployments/name/{deployment}")["id"]
        places = [f"paths.state={self.folder / 'state'}", f"paths.runs={self.folder / 'runs'}"]
        body = {"parameters": {"overrides": places}, "state": {"type": "SCHEDULED"}}
        start = time.monotonic()
        run = self.post(f"deployments/{deployment_id}/create_flow_run", body)["id"]
        while self.get(f"flow_runs/{run}")["start_time"] is None:
            if time.monotonic() - start > WITHIN_S:
                sys.exit(f"error: {deployment} did not start within {WITHIN_S:.0f} s")
            time.sleep(0.1)
        seconds = time.monotonic() - start
        # What the flow would do after its start is not measured.
        self.api.post(f"flow_runs/{run}/set_state", json={"state": {"type": "CANCELLING"}})
        return seconds

    def task_runs_recorded(self) -> int:
        """Task runs that the server knows of a flow that makes them as fast as it can.

        They are counted once no more come.
        """
        env = os.environ | {
            "PREFECT_API_URL": self.api_url,
            "PREFECT_HOME": str(self.folder / "client"),
            "PREFECT_LOGGING_LEVEL": "ERROR",
        }
        subprocess.run([sys.executable, "-c", MANY_TASKS], env=env, check=True)
        query: dict[str, Any] = {
            "flows": {"name": {"any_": ["many"]}},
            "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
        }
        recorded = -1
        changed_s = time.monotonic()
        while time.monotonic() - changed_s < SETTLED_S and recorded < TASK_RUNS:
            count = int(self.post("task_runs/count", query))
            if count != recorded:
                recorded = count
                changed_s = time.monotonic()
            time.sleep(1)
        return recorded


@contextmanager
def up(folder: Path) -> Iterator[Site]:
    """A site in this folder, until the end of the block."""
    log = folder / "up.log"
    argv = [sys.executable, "-m", "qinglan.cli", "up", "--set", f"paths.state={folder / 'state'}"]
    # A Prefect that the benchmark's user has set up is none of the site's.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        while "Ctrl-C stops" not in log.read_text(encoding="utf-8"):
            if process.poll() is not None or time.monotonic() - start > WITHIN_S:
                sys.exit(log.read_text(encoding="utf-8"))
            time.sleep(0.1)
        site = Site(folder, time.monotonic() - start, log.read_text(encoding="utf-8"))
        with site.api:
            yield site
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


if __name__ == "__main__":
    main()
