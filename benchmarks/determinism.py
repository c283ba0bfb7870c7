"""Does one seed give one student? The embedded pipeline from nothing, five times; two of the runs
are killed and go on.

    make bench NAME=determinism

A run is killed with all its processes once RL has saved a checkpoint, and started again. Compares
the weights of base, SFT and RL model, prints the table and writes
benchmarks/results/determinism.json.
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
RUNS, KILLED = 5, (1, 3)
MODELS = {"base": "base_model", "sft": "sft", "rl": "rl"}
"""The stages that make them."""
POLL_S = 0.5


def main() -> None:
    """Run, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    with ThreadPoolExecutor(parser.parse_args().jobs) as pool:
        digests = list(pool.map(train, (number in KILLED for number in range(RUNS))))
    first = digests[0]
    equal = {f"equal_{name}": sum(each[name] == first[name] for each in digests) for name in MODELS}
    result = {"runs": RUNS, "killed": len(KILLED)} | equal
    print(
        "\n| run | killed | " + " | ".join(MODELS) + " |\n| ---: | --- |" + " --- |" * len(MODELS)
    )
    for number, each in enumerate(digests):
        print(
            f"| {number} | {'yes' if number in KILLED else ''} | "
            + " | ".join(each.values())
            + " |"
        )
    print("\n" + json.dumps(result))
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def train(kill: bool) -> dict[str, str]:
    """One pipeline run on a site of its own; the first digits of each model's digest."""
    with tempfile.TemporaryDirectory() as site:
        latest, places = (
            Path(site, "runs", "latest"),
            (f"paths.runs={site}/runs", f"paths.state={site}/state"),
        )
        sets = [word for place in places for word in ("--set", place)]
        argv = [
            sys.executable,
            "-m",
            "qinglan.cli",
            "run",
            "pipeline",
            "--profile",
            "embedded",
            *sets,
        ]
        if kill:
            kill_after_checkpoint(subprocess.Popen(argv), latest / "rl" / "checkpoints")
        subprocess.run(argv, check=True)
        left = {
            name: StageResult.read(latest / stage / "manifest.json")
            for name, stage in MODELS.items()
        }
    return {name: result.details[WEIGHTS_SHA256][:12] for name, result in left.items()}


def kill_after_checkpoint(process: "subprocess.Popen[bytes]", checkpoints: Path) -> None:
    """Kill the run and all that it started."""
    while not (checkpoints / "latest_checkpointed_iteration.txt").exists():
        if process.poll() is not None:
            sys.exit("error: the run ended before it saved a checkpoint; see above")
        time.sleep(POLL_S)
    root = psutil.Process(process.pid)
    for each in [root, *root.children(recursive=True)]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


if __name__ == "__main__":
    os.environ.setdefault("DO_NOT_TRACK", "true")
    main()
