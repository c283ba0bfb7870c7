"""What would the shipped profiles' runs decide? Each `NAME_rehearsal`, with its dry run's forecast
before it.

    make bench NAME=rehearsals python benchmarks/rehearsals.py --profile fivedoctors python
    benchmarks/rehearsals.py --jobs 2     (two recipes at a time, each of one thread) python
    benchmarks/rehearsals.py --to benchmarks/results/rehearsal_1000_prompts.json --profile
    fivedoctors \\
        --set embedded.sample_train_rows=1060 --set rl.patience=null

A refresh of the first 100 questions tells tokens per call and the share of rows that stay; then the
forecast, then the pipeline over all 800. `predicted` is "undecided" where the dry run warned that
the gate would stay so. Prints a table and writes benchmarks/results/rehearsals.json; profiles that
were not asked for keep their line.
"""

import argparse
import json
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import commands

import qinglan
from qinglan.clients.roles import site_ledger
from qinglan.config import load_profile, profile_names
from qinglan.ops.estimate import count_questions, estimate, questions_of
from qinglan.ops.forecast import find_problems, forecast

RESULT = Path(__file__).parent / "results" / "rehearsals.json"
ENDING, TRIAL_ROWS = "_rehearsal", 100


def main() -> None:
    names = [name.removesuffix(ENDING) for name in profile_names() if name.endswith(ENDING)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--profile", choices=names, action="append", help="only this one; all if not given"
    )
    parser.add_argument("--jobs", type=int, default=1, help="recipes at a time")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all runs"
    )
    parser.add_argument("--to", type=Path, default=RESULT, help="where the figures are written")
    options = parser.parse_args()
    if options.set and options.to == RESULT:
        parser.error(
            "--set rehearses something else than the shipped profiles; write it elsewhere with --to"
        )
    known = (
        {one["profile"]: one for one in json.loads(options.to.read_text())}
        if options.to.exists()
        else {}
    )
    by_recipe: dict[str, list[str]] = {}
    for name in options.profile or names:
        by_recipe.setdefault(load_profile(name + ENDING).recipe, []).append(name)

    def rehearse_all(asked: list[str]) -> None:
        for name in asked:
            settings = [*options.set, *(["trainer.threads=1"] if options.jobs > 1 else [])]
            known[name] = rehearse(name, base_models, settings)
            options.to.write_text(
                json.dumps(list(known.values()), indent=1) + "\n", encoding="utf-8"
            )

    with tempfile.TemporaryDirectory() as base_models, ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(rehearse_all, by_recipe.values()))
    print("\n| profile | predicted | outcome | rows | calls | US$ | US$ of RL, at most / spent |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for one in known.values():
        errors = " | ".join(
            f"{one['forecast_error'][name]:+.0%}" for name in ("rows", "calls", "usd")
        )
        rl = f"{one['rl_usd']['at_most']:.2f} / {one['rl_usd']['spent']:.2f}"
        print(f"| {one['profile']} | {one['predicted']} | {one['outcome']} | {errors} | {rl} |")


def rehearse(name: str, base_models: str, settings: list[str]) -> dict[str, Any]:
    """One line of the table; errors are (found − forecast) / forecast, of rows the largest of SFT,
    RL and test.

    Profiles of one recipe share the pretrained model in `base_models`; all else is made anew.
    """
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        state.mkdir()
        (state / "base_models").symlink_to(base_models)
        settings = [*settings, f"paths.runs={folder}/runs", f"paths.state={state}"]
        run(name, "refresh", [*settings, f"data.limit={TRIAL_ROWS}"])
        profile = load_profile(name + ENDING, settings)
        with site_ledger(profile) as ledger:
            with questions_of(profile) as rows:
                counts = count_questions(profile, rows, ledger)
            parts, planned = (
                estimate(profile, "pipeline", counts, ledger),
                forecast(profile, counts),
            )
        warnings = list(find_problems(profile, planned))
        run(name, "pipeline", settings)
        found = qinglan.run(runs=Path(folder) / "runs")
        report, calls = found.report, found.ledger()
        began, ended = (
            (found.directory / stage / "manifest.json").stat().st_mtime for stage in ("sft", "rl")
        )
    assert report.decision
    spent, spent_in_rl = (
        calls.cost_usd.sum(),
        calls[calls.created_s.between(began, ended)].cost_usd.sum(),
    )
    stages = {stage.name: stage for stage in report.stages}
    rl_usd = sum(part.cost_usd for part in parts if part.what.startswith("rl"))
    expected_usd = sum(part.expected_usd for part in parts)
    used = report.api.teacher, report.api.answerer, report.api.judge
    foreseen = {"sft": planned.sft_rows, "rl": planned.rl_prompts, "evaluate": planned.test_rows}
    asked = sum(part.questions for part in parts)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    return {
        "profile": name,
        "commit": commit,
        "predicted": "undecided"
        if any("undecided" in warning for warning in warnings)
        else "decided",
        "outcome": report.decision.verdict,
        "not_passed": {
            rule.name: rule.outcome for rule in report.decision.rules if rule.outcome != "pass"
        },
        "warnings": warnings,
        "stages": {stage: [each.rows_in, each.rows_out] for stage, each in stages.items()},
        "forecast": planned.model_dump(),
        "parts": [
            {
                "what": part.what,
                "role": part.role,
                "calls": part.questions,
                "known": part.known,
                "usd": part.cost_usd,
            }
            for part in parts
        ],
        "calls": {
            "forecast": asked,
            "paid": sum(each.calls for each in used),
            "known": sum(each.cached for each in used),
        },
        "usd": {"forecast": expected_usd, "spent": spent},
        "rl_usd": {"at_most": rl_usd, "spent": spent_in_rl},
        "forecast_error": {
            "rows": max(
                (stages[stage].rows_in / max(1, rows) - 1 for stage, rows in foreseen.items()),
                key=abs,
            ),
            "calls": sum(each.calls + each.cached for each in used) / asked - 1,
            "usd": spent / expected_usd - 1,
        },
    }


def run(name: str, flow: str, settings: list[str]) -> None:
    commands.qinglan(None, "run", flow, "--profile", name + ENDING, *commands.with_set(settings))


if __name__ == "__main__":
    main()
