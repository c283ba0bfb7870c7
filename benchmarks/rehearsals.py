"""Verdicts of the shipped profiles' rehearsals, each after its dry run's forecast.

    make bench NAME=rehearsals
    python benchmarks/rehearsals.py --profile fivedoctors
    python benchmarks/rehearsals.py --jobs 2     (two recipes at a time, each of one thread)
    python benchmarks/rehearsals.py --to benchmarks/results/rehearsal_1000_prompts.json \\
        --profile fivedoctors --set embedded.sample_train_rows=1060 --set rl.patience=null

A refresh of the first 100 questions tells tokens per call and the share of rows that stay; then the
forecast, then the pipeline over all 800. `predicted` is "undecided" where the dry run warned that
the gate would stay so. Prints a table and writes benchmarks/results/rehearsals.json; profiles that
were not asked for keep their line.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import commands
from pandas import DataFrame

import qinglan
from qinglan.clients.roles import site_ledger
from qinglan.config import load_profile, profile_names
from qinglan.evaluation.models import StageSummary
from qinglan.ops.estimate import estimate
from qinglan.ops.estimate.counting import count_questions, questions_of
from qinglan.ops.forecast import Forecast, find_problems, forecast

RESULT = Path(__file__).parent / "results" / "rehearsals.json"
ENDING = "_rehearsal"
TRIAL_ROWS = 100
Figures = dict[str, Any]


def main() -> None:
    """Rehearse, print and write."""
    names = [name.removesuffix(ENDING) for name in profile_names() if name.endswith(ENDING)]
    options = parse_options(names)
    rehearsals: dict[str, Figures] = {}
    if options.to.exists():
        rehearsals = {line["profile"]: line for line in json.loads(options.to.read_text())}
    settings = [*options.set]
    if options.jobs > 1:
        settings.append("trainer.threads=1")

    def rehearse_in_turn(profiles: list[str]) -> None:
        for name in profiles:
            rehearsals[name] = rehearse(name, base_models, settings)
            text = json.dumps(list(rehearsals.values()), indent=1)
            options.to.write_text(text + "\n", encoding="utf-8")

    # Profiles of one recipe share the pretrained model, so that they follow each other.
    by_recipe: dict[str, list[str]] = {}
    for name in options.profile or names:
        by_recipe.setdefault(load_profile(name + ENDING).recipe, []).append(name)
    with tempfile.TemporaryDirectory() as base_models, ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(rehearse_in_turn, by_recipe.values()))
    print("\n".join(table(rehearsals.values())))


def parse_options(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(
            "What would the shipped profiles' runs decide? Each `NAME_rehearsal`, with its dry "
            "run's forecast before it."
        )
    )
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
    return options


def table(rehearsals: Iterable[Figures]) -> Iterator[str]:
    """Markdown: a profile a line."""
    yield "\n| profile | predicted | outcome | rows | calls | US$ | US$ of RL, at most / spent |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    for line in rehearsals:
        errors = [f"{line['forecast_error'][name]:+.0%}" for name in ("rows", "calls", "usd")]
        rl_usd = f"{line['rl_usd']['at_most']:.2f} / {line['rl_usd']['spent']:.2f}"
        cells = [line["profile"], line["predicted"], line["outcome"], *errors, rl_usd]
        yield f"| {' | '.join(cells)} |"


def rehearse(name: str, base_models: str, settings: list[str]) -> Figures:
    """One line of the table.

    Errors are (found − forecast) / forecast, of rows the largest of SFT, RL and test. Profiles of
    one recipe share the pretrained model in `base_models`; all else is made anew.
    """
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        state.mkdir()
        (state / "base_models").symlink_to(base_models)
        settings = [*settings, f"paths.runs={folder}/runs", f"paths.state={state}"]
        run(name, "refresh", [*settings, f"data.limit={TRIAL_ROWS}"])
        profile = load_profile(name + ENDING, settings)
        # The trial's ledger tells the forecast how many tokens a call takes.
        with site_ledger(profile) as ledger:
            with questions_of(profile) as rows:
                counts = count_questions(profile, rows, ledger)
            parts = estimate(profile, "pipeline", counts, ledger)
            planned = forecast(profile, counts)
        warnings = list(find_problems(profile, planned))
        run(name, "pipeline", settings)
        frames = qinglan.run(runs=Path(folder) / "runs")
        report = frames.report
        calls = frames.ledger()
        rl_calls = calls_of_rl(calls, frames.directory)
    assert report.decision
    is_undecided = any("undecided" in warning for warning in warnings)
    stages = {stage.name: stage for stage in report.stages}
    roles = (report.api.teacher, report.api.answerer, report.api.judge)
    paid = sum(role.calls for role in roles)
    from_ledger = sum(role.cached for role in roles)
    expected_calls = sum(part.questions for part in parts)
    expected_usd = sum(part.expected_usd for part in parts)
    spent_usd = calls.cost_usd.sum()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    return {
        "profile": name,
        "commit": commit,
        "predicted": "undecided" if is_undecided else "decided",
        "outcome": report.decision.verdict,
        "not_passed": {
            rule.name: rule.outcome for rule in report.decision.rules if rule.outcome != "pass"
        },
        "warnings": warnings,
        "stages": {stage.name: [stage.rows_in, stage.rows_out] for stage in report.stages},
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
        "calls": {"forecast": expected_calls, "paid": paid, "known": from_ledger},
        "usd": {"forecast": expected_usd, "spent": spent_usd},
        "rl_usd": {
            "at_most": sum(part.cost_usd for part in parts if part.what.startswith("rl")),
            "spent": rl_calls.cost_usd.sum(),
        },
        "forecast_error": {
            "rows": max(row_errors(planned, stages), key=abs),
            "calls": (paid + from_ledger) / expected_calls - 1,
            "usd": spent_usd / expected_usd - 1,
        },
    }


def calls_of_rl(calls: DataFrame, run_directory: Path) -> DataFrame:
    """The calls that were made between the manifests of SFT and of RL."""
    start_s = (run_directory / "sft" / "manifest.json").stat().st_mtime
    end_s = (run_directory / "rl" / "manifest.json").stat().st_mtime
    return calls[calls.created_s.between(start_s, end_s)]


def row_errors(planned: Forecast, stages: Mapping[str, StageSummary]) -> Iterator[float]:
    """The forecast's relative errors in the rows of SFT, RL and test."""
    rows_of = {"sft": planned.sft_rows, "rl": planned.rl_prompts, "evaluate": planned.test_rows}
    for stage, rows in rows_of.items():
        yield stages[stage].rows_in / max(1, rows) - 1


def run(name: str, flow: str, settings: list[str]) -> None:
    commands.qinglan(None, "run", flow, "--profile", name + ENDING, *commands.with_set(settings))


if __name__ == "__main__":
    main()
