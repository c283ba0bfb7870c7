"""RL with a judge of passages of one's own: κ with the judge, the bill of RL, and top-1 beside RL
with the judge.

    make bench NAME=local_judge
    python benchmarks/local_judge.py --seeds 1 --set rl.total_steps=2 --to /tmp/small.json

For each RL seed: query rewriting with the judge, without labels; the workbook of its verdicts; the
judge that learns them, released whatever its gate says; query rewriting with that one. Each run
begins with an empty ledger, so that a bill is that of one run. In a temporary site, or with
`--site` in a folder whose finished stages are reused. Prints the table and writes
benchmarks/results/local_judge.json.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from commands import parse_options, qinglan, with_set, write_figures
from rl_experiments.results import Result, difference, mean_top1, result_of_run, stage_of

RESULT = Path(__file__).parent / "results" / "local_judge.json"
LEDGER_ENV = "QINGLAN_BENCH_LEDGER"
Found = dict[str, Any]


def main() -> None:
    """Run all seeds, then print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds of RL")
    asked = parse_options(parser, RESULT)
    with tempfile.TemporaryDirectory() as new:
        site = (asked.site or Path(new)).resolve()
        measured = [measure(site, seed, asked.set) for seed in range(1, asked.seeds + 1)]
    found = summary(*zip(*measured, strict=True))
    write_figures(asked.to, found)
    print("\n".join(table(found)))


def measure(
    site: Path, seed: int, settings: Sequence[str]
) -> tuple[Found, Result, Result, dict[str, str]]:
    """A seed's figures, what RL with the judge and with the local one found, and the questions'
    groups."""
    workbook = site / f"judge-{seed}.xlsx"
    workbook.unlink(missing_ok=True)
    paid = pipeline(site, "embedded", seed, "reward.use_labels=false", *settings)
    qinglan(site, "dataset", "judge-pairs", paid.name, "--out", str(workbook))
    judge = pipeline(site, "passage_judge", seed, f"data.workbook={workbook}", *settings)
    released = stage_of(judge, "register").details["released"]
    if "champion" not in released["aliases"]:
        version = ("promote", released["version"], "--force", "--reason", "benchmark")
        qinglan(site, "release", *version, "--profile", "passage_judge")
    own = pipeline(site, "embedded_local_judge", seed, *settings)
    known: Found = {"seed": seed, "settings": (), "sources": "", "wall_s": 0.0, "own_ledger": True}
    with_judge, groups = result_of_run(paid, experiment="judge", **known)
    with_own, _ = result_of_run(own, experiment="local judge", **known)
    report = json.loads((judge / "report.json").read_text(encoding="utf-8"))
    figures = {
        "seed": seed,
        "judge_main": {arm: found["scores"]["main"] for arm, found in report["arms"].items()},
        "gate": report["decision"]["verdict"],
        "agreement": stage_of(own, "local_judge").details["agreement"],
        "usd": {
            "judge": with_judge.summary["judge_cost_usd"],
            "local": with_own.summary["judge_cost_usd"],
        },
        "top1": {"judge": mean_top1(with_judge, "rl"), "local": mean_top1(with_own, "rl")},
    }
    return figures, with_judge, with_own, groups


def pipeline(site: Path, profile: str, seed: int, *settings: str) -> Path:
    """A finished run's folder."""
    os.environ[LEDGER_ENV] = f"sqlite:///{site / f'ledger-{profile}-{seed}.db'}"
    changed = [*settings, f"rl.seed={seed}", f"ledger.url_env={LEDGER_ENV}"]
    if profile != "passage_judge":  # a champion would be one more arm of the next run
        changed.append("release.promote=none")
    qinglan(site, "run", "pipeline", "--profile", profile, *with_set(changed))
    return (site / "runs" / "latest").resolve()


def summary(
    figures: Sequence[Found],
    paid: Sequence[Result],
    own: Sequence[Result],
    groups: Sequence[Mapping[str, str]],
) -> Found:
    """The seeds' figures, and the difference in top-1 over all of them."""
    ours, theirs = ({each.seed: each for each in some} for some in (own, paid))
    found = difference(ours, "rl", theirs, "rl", groups[0])
    assert found is not None, "the seeds have the same questions"
    return {
        "cores": os.cpu_count(),
        "versions": paid[0].versions,
        "seeds": list(figures),
        "local_minus_judge": {"diff": found.diff, "ci95": found.ci95, "n": found.n},
    }


def table(found: Found) -> list[str]:
    """Markdown: a seed a line, then the difference."""
    heads = (
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
    lines = [f"\n| {' | '.join(heads)} |", "| ---: " * len(heads) + "|"]
    for one in found["seeds"]:
        agreement, usd, top1 = one["agreement"], one["usd"], one["top1"]
        cells = [str(one["seed"]), shown(one["judge_main"]["rl"]["mean"]), str(agreement["pairs"])]
        cells += [shown(agreement["kappa"]), shown(agreement["kappa_low"])]
        cells += [f"{usd[judge]:.4f}" for judge in ("judge", "local")]
        cells += [shown(top1[judge]) for judge in ("judge", "local")]
        lines.append(f"| {' | '.join(cells)} |")
    one = found["local_minus_judge"]
    low, high = one["ci95"] or (None, None)
    interval = f"{shown(low)} to {shown(high)}"
    return [
        *lines,
        f"\ntop-1, RL with the local judge − RL with the judge: {one['diff']:+.3f} ({interval}), n = {one['n']}",
    ]


def shown(figure: float | None) -> str:
    """A figure, or nothing where there is none."""
    return "" if figure is None else f"{figure:.3f}"


if __name__ == "__main__":
    main()
