"""What SFT and GRPO make of the embedded judge: base, SFT-CoT, GRPO-16 and GRPO-32 on the same test rows.

    make bench NAME=answer_judge

Runs the profile answer_judge in a temporary site with 16 and with 32 answers a question; the second run reuses all
stages before RL. Prints the table and writes benchmarks/results/answer_judge.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "answer_judge.json"
ROLLOUTS = (16, 32)
METRICS = ("main", "secondary", "format")


def main() -> None:
    """Run both, then print and write."""
    with tempfile.TemporaryDirectory() as site:
        runs = {rollouts: run(Path(site), rollouts) for rollouts in ROLLOUTS}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"cores": os.cpu_count(), "runs": runs}, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(table(runs)))
    print(f"\nWritten to {RESULT}")


def run(site: Path, rollouts: int) -> dict[str, Any]:
    """One pipeline run's figures."""
    settings = [f"paths.runs={site / 'runs'}", f"paths.state={site / 'state'}", f"rl.rollouts_per_prompt={rollouts}"]
    command = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", "answer_judge"]
    start = time.monotonic()
    if subprocess.run([*command, *(word for each in settings for word in ("--set", each))], check=False).returncode:
        sys.exit("error: the run failed; see above")
    wall_s = time.monotonic() - start
    report = json.loads((site / "runs" / "latest" / "report.json").read_text(encoding="utf-8"))
    return {
        "wall_s": wall_s,
        "stages": {stage["name"]: 0.0 if stage["reused_from"] else stage["seconds"] for stage in report["stages"]},
        "arms": {name: arm["scores"] for name, arm in report["arms"].items()},
        "gains": [one for one in report["comparisons"] if (one["a"], one["b"]) == ("rl", "sft")],
        "findings": report["findings"],
        "versions": report["versions"],
    }


def table(runs: dict[int, dict[str, Any]]) -> list[str]:
    """Markdown: an arm a line, and what each GRPO gains on SFT."""
    first = runs[ROLLOUTS[0]]["arms"]
    arms = {name: first[name] for name in ("teacher", "base", "sft")}
    arms |= {f"GRPO-{rollouts}": found["arms"]["rl"] for rollouts, found in runs.items()}
    lines = ["\n| | main | secondary | format | κ with the strong judge |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, scores in arms.items():
        figures = " | ".join(f"{scores[metric]['mean']:.3f}" for metric in METRICS)
        lines.append(f"| {name} | {figures} | {_kappa(runs, name)} |")
    for rollouts, found in runs.items():
        gain = next(one for one in found["gains"] if one["metric"] == "main")
        low, high = gain["ci95"]
        lines.append(f"\nGRPO-{rollouts} − SFT, main: {gain['diff']:+.3f} ({low:+.3f} to {high:+.3f}), n = {gain['n']}")
    return lines


def _kappa(runs: dict[int, dict[str, Any]], name: str) -> str:
    rollouts = int(name.removeprefix("GRPO-")) if name.startswith("GRPO-") else ROLLOUTS[0]
    label = {"base": "base model", "sft": "SFT student"}.get(name, "RL student")
    rows = runs[rollouts]["findings"][0]["rows"]
    found = next((row["values"] for row in rows if name != "teacher" and row["label"][0] == label), None)
    return f"{found[1]:.3f} ({found[2]:.3f} to {found[3]:.3f})" if found else ""


if __name__ == "__main__":
    main()
