"""Figures of the embedded judge: base, SFT-CoT, GRPO-16 and GRPO-32 on the same test rows.

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
"""The arms' names in the report's findings."""
STAGES = {"base": "base_model", "sft": "sft", "rl": "rl"}
"""The stage that makes an arm, whose wall time it shows."""
Figures = dict[str, Any]


def main() -> None:
    """Run both, then print and write."""
    parser = argparse.ArgumentParser(description="base, SFT-CoT, GRPO-16 and GRPO-32")
    options = parse_options(parser, RESULT)
    runs: dict[int, Figures] = {}
    with tempfile.TemporaryDirectory() as temporary_site:
        site = options.site or Path(temporary_site)
        for rollouts in ROLLOUTS:
            runs[rollouts] = run(site, rollouts, options.set)
    write_figures(options.to, {"cores": os.cpu_count(), "settings": options.set, "runs": runs})
    print("\n".join(table(runs)))


def run(site: Path, rollouts: int, settings: list[str]) -> Figures:
    """The figures of one pipeline run."""
    words = with_set([f"rl.rollouts_per_prompt={rollouts}", *settings])
    qinglan(site, "run", "pipeline", "--profile", "answer_judge", *words)
    report = (site / "runs" / "latest" / "report.json").read_text(encoding="utf-8")
    return figures_of(json.loads(report))


def figures_of(report: Figures) -> Figures:
    """The part of a run's report that is kept."""
    comparisons = report["comparisons"]
    return {
        "stages": {stage["name"]: stage["seconds"] for stage in report["stages"]},
        "arms": {name: arm["scores"] for name, arm in report["arms"].items()},
        "gains": [pair for pair in comparisons if (pair["a"], pair["b"]) == ("rl", "sft")],
        "findings": report["findings"],
        "versions": report["versions"],
    }


def table(runs: dict[int, Figures]) -> list[str]:
    """Markdown: an arm a line, the gain of each GRPO over SFT, and the wall time of the runs."""
    first = runs[ROLLOUTS[0]]
    lines = [
        f"\n| | {' | '.join(METRICS)} | κ with the strong judge | wall, s |",
        "| --- |" + " ---: |" * 5,
        # All runs have the stages before RL in common, so that the first one tells of these arms.
        table_line(first, "teacher", "strong judge"),
        table_line(first, "base", "base"),
        table_line(first, "sft", "SFT-CoT"),
    ]
    for rollouts, figures in runs.items():
        lines.append(table_line(figures, "rl", f"GRPO-{rollouts}"))
    for rollouts, figures in runs.items():
        lines.extend(gain(rollouts, metric, figures) for metric in METRICS)
    wall_times = [
        f"GRPO-{rollouts} {sum(figures['stages'].values()):.0f} s"
        for rollouts, figures in runs.items()
    ]
    lines.append(f"\nAll stages of a run: {', '.join(wall_times)}; {os.cpu_count()} cores.")
    return lines


def table_line(figures: Figures, arm: str, label: str) -> str:
    """Markdown: an arm's metrics, its agreement with the strong judge, and its wall time."""
    scores = [with_interval(figures["arms"][arm].get(metric, {})) for metric in METRICS]
    return f"| {label} | {' | '.join(scores)} | {kappa(figures, arm)} | {seconds(figures, arm)} |"


def with_interval(score: Figures) -> str:
    """Mean and 95% interval."""
    if score.get("mean") is None:
        return ""
    mean = f"{score['mean']:.3f}"
    low, high = score["ci95"] or (None, None)
    return mean if low is None else f"{mean} ({low:.3f} to {high:.3f})"


def kappa(figures: Figures, arm: str) -> str:
    """Agreement of an arm's main verdict, from the recipe's first table."""
    for finding in figures["findings"]:
        if finding["title"][0].startswith("Agreement"):
            return kappa_in(finding, arm)
    return ""


def kappa_in(finding: Figures, arm: str) -> str:
    for row in finding["rows"]:
        if row["label"][0] == LABELS.get(arm):
            values = row["values"]
            interval = None if values[2] is None else values[2:4]
            return with_interval({"mean": values[1], "ci95": interval})
    return ""


def seconds(figures: Figures, arm: str) -> str:
    """Wall time of the stage that made the arm."""
    if arm not in STAGES:
        return ""
    return f"{figures['stages'][STAGES[arm]]:.0f}"


def gain(rollouts: int, metric: str, figures: Figures) -> str:
    """The paired difference between GRPO and SFT."""
    label = f"\nGRPO-{rollouts} − SFT, {metric}"
    pairs = [pair for pair in figures["gains"] if pair["metric"] == metric]
    if not pairs or pairs[0]["diff"] is None:
        return f"{label}: not compared"
    pair = pairs[0]
    low, high = pair["ci95"] or (float("nan"), float("nan"))
    return f"{label}: {pair['diff']:+.3f} ({low:+.3f} to {high:+.3f}), n = {pair['n']}"


if __name__ == "__main__":
    main()
