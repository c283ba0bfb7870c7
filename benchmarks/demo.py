"""Costs of the embedded demo on this machine: wall time, orchestration overhead, peak memory.

    make bench NAME=demo

Runs the pipeline twice in a temporary site: once with nothing there, then again with nothing
changed. Memory is the sum of the proportional set sizes of the whole process tree, sampled twice a
second. Prints the table and writes benchmarks/results/demo.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

RESULT = Path(__file__).parent / "results" / "demo.json"
SAMPLE_EVERY_S = 0.5


def main() -> None:
    """Run, then print and write."""
    with tempfile.TemporaryDirectory() as site:
        first = run(Path(site))
        second = run(Path(site))
    RESULT.parent.mkdir(exist_ok=True)
    result = {"cores": os.cpu_count(), "first": first, "second": second}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print("\n| | first run | nothing changed |\n| --- | ---: | ---: |")
    for name, seconds in first["stages"].items():
        print(f"| {name}, s | {seconds:.1f} | |")
    for label, key, form in (
        ("wall, s", "wall_s", "{:.1f}"),
        ("outside the stages / wall", "overhead_share", "{:.3f}"),
        ("peak memory, GiB", "peak_gib", "{:.1f}"),
        ("teacher calls", "teacher_calls", "{:,}"),
        ("judge calls", "judge_calls", "{:,}"),
    ):
        # The second run is nothing but overhead.
        again = "" if key == "overhead_share" else form.format(second[key])
        print(f"| {label} | {form.format(first[key])} | {again} |")
    print(f"\nWritten to {RESULT}")


def run(site: Path) -> dict[str, Any]:
    """The figures of one pipeline run."""
    argv = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", "embedded"]
    argv += ["--set", f"paths.runs={site / 'runs'}", "--set", f"paths.state={site / 'state'}"]
    start = time.monotonic()
    process = subprocess.Popen(argv)
    peak = PeakMemory(process.pid)
    if process.wait() != 0:
        sys.exit("error: the run failed; see above")
    wall_s = time.monotonic() - start
    report = json.loads((site / "runs" / "latest" / "report.json").read_text(encoding="utf-8"))
    stages: dict[str, float] = {}
    for stage in report["stages"]:
        stages[stage["name"]] = 0.0 if stage["reused_from"] else stage["seconds"]
    return {
        "wall_s": wall_s,
        "stages": stages,
        "overhead_share": 1 - sum(stages.values()) / wall_s,
        "peak_gib": peak.gib,
        "teacher_calls": report["api"]["teacher"]["calls"],
        "judge_calls": report["api"]["judge"]["calls"],
        "top1": {name: arm["scores"]["top1"]["mean"] for name, arm in report["arms"].items()},
        "versions": report["versions"],
    }


class PeakMemory:
    """The highest sum of a process tree's proportional set sizes."""

    def __init__(self, pid: int) -> None:
        self.gib = 0.0
        self._pid = pid
        # A daemon: it must not keep the benchmark alive where the run fails.
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while psutil.pid_exists(self._pid):
            self.gib = max(self.gib, self._now())
            time.sleep(SAMPLE_EVERY_S)

    def _now(self) -> float:
        try:
            root = psutil.Process(self._pid)
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0.0
        return sum(map(_pss, tree)) / 2**30


def _pss(process: psutil.Process) -> int:
    try:
        # Pages that processes share count in part with each, so that the sum counts them once.
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


if __name__ == "__main__":
    main()
