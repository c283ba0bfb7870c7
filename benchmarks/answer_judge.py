"""What SFT and GRPO make of the embedded judge: base, SFT-CoT, GRPO-16 and GRPO-32 on the same test
rows.

    make bench NAME=answer_judge
    python benchmarks/answer_judge.py --set rl.total_steps=2 --to /tmp/small.json

Runs the profile answer_judge with 16 and with 32 answers a question; the second run reuses all
stages before RL. In a temporary site, or with `--site` in a folder whose finished stages are
reused. Prints the table and writes benchmarks/results/answer_judge.json.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from commands import parse_options, qinglan, with_set, write_figures

RESULT = Path(__file__).parent / "results" / "answer_judge.json"
ROLLOUTS = (16, 32)
METRICS = ("main", "secondary", "format")
LABELS = {"base": "base model", "sft": "SFT student", "rl": "RL student"}
"""As the report's findings call the arms."""
STAGES = {"base": "base_model", "sft": "sft", "rl": "rl"}
"""Whose wall time an arm shows."""
Found = dict[str, Any]


def main() -> None:
    """Run both, then print and write."""
    parser = argparse.ArgumentParser(description="base, SFT-CoT, GRPO-16 and GRPO-32")
    asked = parse_options(parser, RESULT)
    with tempfile.TemporaryDirectory() as new:
        runs = {
            rollouts: run(asked.site or Path(new), rollouts, asked.set) for rollouts in ROLLOUTS
        }
    write_figures(asked.to, {"cores": os.cpu_count(), "settings": asked.set, "runs": runs})
    print("\n".join(table(runs)))


def run(site: Path, rollouts: int, settings: list[str]) -> Found:
    """One pipeline run's figures."""
    words = with_set([f"rl.rollouts_per_prompt={rollouts}", *settings])
    qinglan(site, "run", "pipeline", "--profile", "answer_judge", *words)
    return figures(
        json.loads((site / "runs" / "latest" / "report.json").read_text(encoding="utf-8"))
    )


def figures(report: Found) -> Found:
    """What is kept of a run's report."""
    return {
        "stages": {stage["name"]: stage["seconds"] for stage in report["stages"]},
        "arms": {name: arm["scores"] for name, arm in report["arms"].items()},
        "gains": [one for one in report["comparisons"] if (one["a"], one["b"]) == ("rl", "sft")],
        "findings": report["findings"],
        "versions": report["versions"],
    }


def table(runs: dict[int, Found]) -> list[str]:
    """Markdown: an arm a line, what each GRPO gains on SFT, and how long the runs took."""
    first = runs[ROLLOUTS[0]]
    arms = [
        (name, label, first)
        for name, label in (("teacher", "strong judge"), ("base", "base"), ("sft", "SFT-CoT"))
    ]
    arms += [("rl", f"GRPO-{rollouts}", found) for rollouts, found in runs.items()]
    lines = [
        f"\n| | {' | '.join(METRICS)} | κ with the strong judge | wall, s |",
        "| --- |" + " ---: |" * 5,
    ]
    for name, label, found in arms:
        figures = [with_interval(found["arms"][name].get(metric, {})) for metric in METRICS]
        lines.append(
            f"| {label} | {' | '.join(figures)} | {kappa(found, name)} | {seconds(found, name)} |"
        )
    lines += [
        gain(rollouts, metric, found) for rollouts, found in runs.items() for metric in METRICS
    ]
    took = ", ".join(
        f"GRPO-{rollouts} {sum(found['stages'].values()):.0f} s" for rollouts, found in runs.items()
    )
    return [*lines, f"\nAll stages of a run: {took}; {os.cpu_count()} cores."]


def with_interval(score: Found) -> str:
    """Mean and 95% interval."""
    if score.get("mean") is None:
        return ""
    low, high = score["ci95"] or (None, None)
    return f"{score['mean']:.3f}" + (f" ({low:.3f} to {high:.3f})" if low is not None else "")


def kappa(found: Found, arm: str) -> str:
    """Of the main verdict, from the recipe's first table."""
    rows = next(
        (one["rows"] for one in found["findings"] if one["title"][0].startswith("Agreement")), []
    )
    values = next((row["values"] for row in rows if row["label"][0] == LABELS.get(arm)), None)
    return (
        with_interval({"mean": values[1], "ci95": values[2:4] if values[2] is not None else None})
        if values
        else ""
    )


def seconds(found: Found, arm: str) -> str:
    """Of the stage that made the arm."""
    return f"{found['stages'][STAGES[arm]]:.0f}" if arm in STAGES else ""


def gain(rollouts: int, metric: str, found: Found) -> str:
    """What GRPO adds to SFT, in pairs."""
    one = next((one for one in found["gains"] if one["metric"] == metric), None)
    if one is None or one["diff"] is None:
        return f"\nGRPO-{rollouts} − SFT, {metric}: not compared"
    low, high = one["ci95"] or (float("nan"), float("nan"))
    return f"\nGRPO-{rollouts} − SFT, {metric}: {one['diff']:+.3f} ({low:+.3f} to {high:+.3f}), n = {one['n']}"


if __name__ == "__main__":
    main()
