"""The embedded demo with several seeds of the RL stage: the figures in the README.

    make bench NAME=seeds

Runs the whole pipeline once per seed. The stages before RL don't depend on its seed and are reused, so the seeds
differ in RL alone. Prints the table and writes benchmarks/results/seeds.json.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SEEDS = (1, 2, 3)
RESULT = Path(__file__).parent / "results" / "seeds.json"


def main() -> None:
    """Run, then print and write."""
    rows = [measure(seed) for seed in SEEDS]
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n| RL seed | test questions | teacher | SFT | RL | RL − teacher [95% CI] | SFT − teacher [95% CI] | RL s |")
    print("| ---: | ---: | ---: | ---: | ---: | --- | --- | ---: |")
    for row in rows:
        arms = " | ".join(f"{row['top1'][arm]:.3f}" for arm in ("teacher", "sft", "rl"))
        gains = " | ".join(interval(row["gains"][arm]) for arm in ("rl", "sft"))
        print(f"| {row['seed']} | {row['n']:,} | {arms} | {gains} | {row['rl_seconds']:.0f} |")
    print(f"\nWritten to {RESULT}")


def measure(seed: int) -> dict[str, Any]:
    """One run's figures."""
    command = [
        sys.executable,
        "-m",
        "qinglan.cli",
        "run",
        "pipeline",
        "--profile",
        "embedded",
        "--set",
        f"rl.seed={seed}",
    ]
    subprocess.run(command, check=True)
    report = json.loads(Path("runs/latest/report.json").read_text(encoding="utf-8"))
    gains = {c["a"]: c for c in report["comparisons"] if c["b"] == "teacher" and c["metric"] == "top1"}
    return {
        "seed": seed,
        "run_id": report["run_id"],
        "n": report["arms"]["rl"]["n"],
        "top1": {name: arm["top1"] for name, arm in report["arms"].items()},
        "gains": {arm: {"diff": c["diff"], "ci95": c["ci95"], "p_value": c["p_value"]} for arm, c in gains.items()},
        "rl_seconds": next(s["seconds"] for s in report["stages"] if s["name"] == "rl"),
        "versions": report["versions"],
    }


def interval(gain: dict[str, Any]) -> str:
    """`+0.071 [+0.019, +0.128]`."""
    low, high = gain["ci95"]
    return f"{gain['diff']:+.3f} [{low:+.3f}, {high:+.3f}]"


if __name__ == "__main__":
    main()
