"""RL with a judge of passages of one's own: κ with the judge, the bill of RL, and top-1.

    make bench NAME=local_judge
    python benchmarks/local_judge.py --seeds 1 --set rl.total_steps=2 --to /tmp/small.json

RL with the judge itself stands beside it. For each RL seed: query rewriting with the judge, without
labels; the workbook of its verdicts; the judge that learns them, released whatever its gate says;
query rewriting with that one. Each run begins with an empty ledger, so that a bill is that of one
run. In a temporary site, or with `--site` in a folder whose finished stages are reused. Prints the
table and writes benchmarks/results/local_judge.json.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from commands import parse_options, qinglan, with_set, write_figures
from rl_experiments.results import Result, difference, mean_top1, result_of_run, stage_of

RESULT = Path(__file__).parent / "results" / "local_judge.json"
LEDGER_ENV = "QINGLAN_BENCH_LEDGER"
Figures = dict[str, Any]


class SeedRun(NamedTuple):
    """The runs of one seed."""

    figures: Figures
    with_judge: Result
    with_own_judge: Result
    groups: Mapping[str, str]
    """The group of each test question."""


def main() -> None:
    """Run all seeds, then print and write."""
    parser = argparse.ArgumentParser(
        description=(
            "RL with a judge of passages of one's own: κ with the judge, the bill of RL, and top-1 "
            "beside RL with the judge."
        )
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds of RL")
    options = parse_options(parser, RESULT)
    with tempfile.TemporaryDirectory() as temporary_site:
        site = (options.site or Path(temporary_site)).resolve()
        runs = [measure(site, seed, options.set) for seed in range(1, options.seeds + 1)]
    figures = summary(runs)
    write_figures(options.to, figures)
    print("\n".join(table(figures)))


def measure(site: Path, seed: int, settings: Sequence[str]) -> SeedRun:
    """Run a seed: RL with the judge, training of a judge of one's own, RL with that one."""
    workbook = site / f"judge-{seed}.xlsx"
    workbook.unlink(missing_ok=True)
    paid = pipeline(site, "embedded", seed, "reward.use_labels=false", *settings)
    qinglan(site, "dataset", "judge-pairs", paid.name, "--out", str(workbook))
    judge = pipeline(site, "passage_judge", seed, f"data.workbook={workbook}", *settings)
    released = stage_of(judge, "register").details["released"]
    # Its gate may refuse it; the next run asks the champion all the same.
    if "champion" not in released["aliases"]:
        version = ("promote", released["version"], "--force", "--reason", "benchmark")
        qinglan(site, "release", *version, "--profile", "passage_judge")
    own = pipeline(site, "embedded_local_judge", seed, *settings)
    fields: Figures = {
        "seed": seed,
        "settings": (),
        "sources": "",
        "wall_s": 0.0,
        "own_ledger": True,
    }
    with_judge, groups = result_of_run(paid, experiment="judge", **fields)
    with_own_judge, _ = result_of_run(own, experiment="local judge", **fields)
    report = json.loads((judge / "report.json").read_text(encoding="utf-8"))
    figures = {
        "seed": seed,
        "judge_main": {name: arm["scores"]["main"] for name, arm in report["arms"].items()},
        "gate": report["decision"]["verdict"],
        "agreement": stage_of(own, "local_judge").details["agreement"],
        "usd": {
            "judge": with_judge.summary["judge_cost_usd"],
            "local": with_own_judge.summary["judge_cost_usd"],
        },
        "top1": {"judge": mean_top1(with_judge, "rl"), "local": mean_top1(with_own_judge, "rl")},
    }
    return SeedRun(figures, with_judge, with_own_judge, groups)


def pipeline(site: Path, profile: str, seed: int, *settings: str) -> Path:
    """Run the pipeline with a ledger of its own; the run's folder."""
    ledger = site / f"ledger-{profile}-{seed}.db"
    os.environ[LEDGER_ENV] = f"sqlite:///{ledger}"
    overrides = [*settings, f"rl.seed={seed}", f"ledger.url_env={LEDGER_ENV}"]
    # A champion would be one more arm of the next run; the judge must become one.
    if profile != "passage_judge":
        overrides.append("release.promote=none")
    qinglan(site, "run", "pipeline", "--profile", profile, *with_set(overrides))
    return (site / "runs" / "latest").resolve()


def summary(runs: Sequence[SeedRun]) -> Figures:
    """The seeds' figures, and the difference in top-1 over all of them."""
    own_judge = {run.with_own_judge.seed: run.with_own_judge for run in runs}
    judge = {run.with_judge.seed: run.with_judge for run in runs}
    top1 = difference(own_judge, "rl", judge, "rl", runs[0].groups)
    assert top1 is not None, "the seeds have the same questions"
    return {
        "cores": os.cpu_count(),
        "versions": runs[0].with_judge.versions,
        "seeds": [run.figures for run in runs],
        "local_minus_judge": {"diff": top1.diff, "ci95": top1.ci95, "n": top1.n},
    }


def table(figures: Figures) -> list[str]:
    """Markdown: a seed a line, then the difference."""
    headings = (
        "RL seed",
        "judge's accuracy",
        "pairs",
        "κ",
        "from",
        "RL's judge, $",
        "local, $",
        "top-1, judge",
        "local",
    )
    lines = [f"\n| {' | '.join(headings)} |", "| ---: " * len(headings) + "|"]
    for seed in figures["seeds"]:
        agreement = seed["agreement"]
        cells = [
            str(seed["seed"]),
            shown(seed["judge_main"]["rl"]["mean"]),
            str(agreement["pairs"]),
            shown(agreement["kappa"]),
            shown(agreement["kappa_low"]),
            f"{seed['usd']['judge']:.4f}",
            f"{seed['usd']['local']:.4f}",
            shown(seed["top1"]["judge"]),
            shown(seed["top1"]["local"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    top1 = figures["local_minus_judge"]
    low, high = top1["ci95"] or (None, None)
    interval = f"{shown(low)} to {shown(high)}"
    lines.append(
        "\ntop-1, RL with the local judge − RL with the judge: "
        f"{top1['diff']:+.3f} ({interval}), n = {top1['n']}"
    )
    return lines


def shown(figure: float | None) -> str:
    """A figure; empty where there is none."""
    return "" if figure is None else f"{figure:.3f}"


if __name__ == "__main__":
    main()
