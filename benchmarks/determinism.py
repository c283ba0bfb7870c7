"""Tells whether one seed gives one student: the embedded pipeline from nothing, five times.

    make bench NAME=determinism

Two of the runs are killed and go on. A run is killed with all its processes once RL has saved a
checkpoint, and started again. Compares the weights of base, SFT and RL model, prints the table and
writes benchmarks/results/determinism.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from qinglan.runs.artifacts import WEIGHTS_SHA256, StageResult

RESULT = Path(__file__).parent / "results" / "determinism.json"
RUNS = 5
KILLED = (1, 3)
MODELS = {"base": "base_model", "sft": "sft", "rl": "rl"}
"""The models, each with the stage that makes it."""
POLL_S = 0.5


def main() -> None:
    """Run, then print and write."""
    parser = argparse.ArgumentParser(
        description=(
            "Does one seed give one student? The embedded pipeline from nothing, five times; two "
            "of the runs are killed and go on."
        )
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(train, (number in KILLED for number in range(RUNS))))
    result = {"runs": RUNS, "killed": len(KILLED)}
    for name in MODELS:
        result[f"equal_{name}"] = sum(digests[name] == runs[0][name] for digests in runs)
    print(f"\n| run | killed | {' | '.join(MODELS)} |\n| ---: | --- |" + " --- |" * len(MODELS))
    for number, digests in enumerate(runs):
        was_killed = "yes" if number in KILLED else ""
        print(f"| {number} | {was_killed} | {' | '.join(digests.values())} |")
    print("\n" + json.dumps(result))
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def train(kill: bool) -> dict[str, str]:
    """One pipeline run on a site of its own; the first digits of each model's digest."""
    with tempfile.TemporaryDirectory() as site:
        latest = Path(site, "runs", "latest")
        argv = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", "embedded"]
        argv += ["--set", f"paths.runs={site}/runs", "--set", f"paths.state={site}/state"]
        if kill:
            kill_after_checkpoint(subprocess.Popen(argv), latest / "rl" / "checkpoints")
        subprocess.run(argv, check=True)
        digests = {}
        for name, stage in MODELS.items():
            result = StageResult.read(latest / stage / "manifest.json")
            digests[name] = result.details[WEIGHTS_SHA256][:12]
    return digests


def kill_after_checkpoint(process: "subprocess.Popen[bytes]", checkpoints: Path) -> None:
    """Kill the run and all that it started."""
    while not (checkpoints / "latest_checkpointed_iteration.txt").exists():
        if process.poll() is not None:
            sys.exit("error: the run ended before it saved a checkpoint; see above")
        time.sleep(POLL_S)
    root = psutil.Process(process.pid)
    for member in [root, *root.children(recursive=True)]:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


if __name__ == "__main__":
    # The engines that the runs start must not report their usage.
    os.environ.setdefault("DO_NOT_TRACK", "true")
    main()
