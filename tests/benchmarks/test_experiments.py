"""The experiments' logic on made-up results: which are left out, and what the tables say."""

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.rl_experiments import command, findings, matrix, tables
from benchmarks.rl_experiments.results import Difference, Result, Site, difference
from qinglan.config import load_profile
from qinglan.runs.artifacts import hash_of

GROUPS = {f"{row:02}": f"document {row // 4}" for row in range(40)}
GOOD = "1" * 40
HALF = "01" * 20
"""Marks that are right for half of every group's questions."""


def result(experiment: str = "default", seed: int = 1, *, rl: str = GOOD, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "experiment": experiment,
        "seed": seed,
        "settings": matrix.EXPERIMENTS[experiment].settings,
        "run_id": "r",
        "sources": "s",
        "versions": {"verl": "0.9.1"},
        "cores": 2,
        "wall_s": 100.0,
        "rl_s": 60.0,
        "questions": hash_of(GROUPS),
        "top1": {"teacher": HALF, "sft": HALF, "rl": rl},
        "quality": {"rl": 4.5},
        "summary": {"reward_first": 0.0, "reward_last": 0.1, "dev_value": 0.9, "chosen_step": 45},
    }
    return Result(**fields | changes)


@pytest.mark.parametrize(
    "experiment", matrix.EXPERIMENTS.values(), ids=lambda experiment: experiment.name
)
def test_every_experiment_is_a_valid_profile(experiment: matrix.Experiment) -> None:
    rl = load_profile("embedded", experiment.settings).rl
    assert rl.train_batch_size * rl.rollouts_per_prompt == 64
    assert rl.ppo_mini_batch_size * rl.rollouts_per_prompt == 32


@pytest.mark.parametrize(
    ("seeds", "groups", "expected"),
    [
        # Every group has the same difference, so that only drawing seeds moves the mean: 0.5, 0, or
        # one of each.
        ([GOOD, HALF], GROUPS, (0.25, (0.0, 0.5), 40, 10, 0)),
        ([GOOD, GOOD], GROUPS, (0.5, (0.5, 0.5), 40, 10, 0)),
        ([GOOD], dict.fromkeys(GROUPS, "one document"), (0.5, None, 40, 1, 0)),
        (["-" + GOOD[1:], GOOD], GROUPS, (0.4872, (0.46, 0.5), 39, 10, 1)),
    ],
)
def test_a_difference_averages_seeds_and_its_interval_covers_them(
    seeds: list[str], groups: dict[str, str], expected: tuple[Any, ...]
) -> None:
    ours = {seed: result(seed=seed, rl=rl) for seed, rl in enumerate(seeds, start=1)}
    diff, ci95, *counts = expected
    compared = difference(ours, "rl", ours, "teacher", groups)
    assert compared is not None
    assert compared.seeds == tuple(ours)
    assert compared.diff == pytest.approx(diff, abs=1e-4)
    assert compared.ci95 == (ci95 and pytest.approx(ci95, abs=0.01))
    assert [compared.n, compared.groups, compared.left_out] == counts
    assert difference(ours, "rl", {3: result(seed=3)}, "rl", GROUPS) is None, "no seed in common"


@pytest.mark.parametrize(
    ("ends", "no_worse", "seeds", "expected"),
    [
        ((0.01, 0.05), False, (1, 2), "holds up"),
        ((-0.05, -0.01), False, (1, 2), "does not hold up: it is worse"),
        ((-0.01, 0.05), False, (1, 2), "open: no difference shown"),
        ((-0.01, 0.05), True, (1, 2), "no loss shown; one of up to 0.010 is not excluded"),
        ((-0.05, -0.01), True, (1, 2), "does not hold up: it is worse"),
        ((0.4, 0.6), False, (1,), "open: one seed only"),
    ],
)
def test_a_reading_follows_the_interval(
    ends: tuple[float, float], no_worse: bool, seeds: tuple[int, ...], expected: str
) -> None:
    compared = Difference(diff=0.0, ci95=ends, seeds=seeds, n=9, groups=3, left_out=0)
    assert findings.reading(compared, no_worse=no_worse) == expected


def test_results_of_other_questions_settings_and_experiments_are_left_out(tmp_path: Path) -> None:
    site = Site(tmp_path)
    other_settings = ("rl.total_steps=3",)
    site.save(result(seed=1, questions="of another test split"), GROUPS)
    site.save(result(seed=2), GROUPS)
    site.save(result(seed=3, settings=other_settings), GROUPS)
    site.save(result(seed=4).model_copy(update={"experiment": "of_old"}), GROUPS)
    assert site.load() == {"default": {2: result(seed=2)}}
    assert site.left_out() == [
        "default-1: other test questions",
        "default-3: other settings",
        "of_old-4: no such experiment",
    ]
    assert [*Site(tmp_path, other_settings).load()["default"]] == [3]


def test_the_page_was_made_of_the_results_that_are_there() -> None:
    site = Site(command.RESULTS)
    assert command.PAGE.read_text(encoding="utf-8") == tables.document(site.load(), site.groups())


def test_the_local_judges_runs_follow_each_other_and_its_table_says_what_they_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(command.__file__).parents[1])
    bench = import_module("local_judge")
    commands: list[str] = []
    stage = {
        "released": {"aliases": [], "version": "7"},
        "agreement": {"pairs": 90, "kappa": 0.5, "kappa_low": None},
    }
    costs = {"judge_cost_usd": 0.25}
    results = {
        "judge": result(rl=HALF, summary=costs),
        "local judge": result(rl=GOOD, summary=costs),
    }
    monkeypatch.setattr(bench, "qinglan", lambda _, *words: commands.append(" ".join(words[:4])))
    monkeypatch.setattr(bench, "stage_of", lambda *_: SimpleNamespace(details=stage))
    monkeypatch.setattr(
        bench, "result_of_run", lambda *_, experiment, **__: (results[experiment], GROUPS)
    )
    report = {"arms": {"rl": {"scores": {"main": {"mean": 0.8}}}}, "decision": {"verdict": "hold"}}
    run = tmp_path / "runs" / "latest"
    run.mkdir(parents=True)
    (run / "report.json").write_text(json.dumps(report), encoding="utf-8")
    lines = bench.table(bench.summary([bench.measure(tmp_path, 1, [])]))
    assert commands == [
        "run pipeline --profile embedded",
        "dataset judge-pairs latest --out",
        "run pipeline --profile passage_judge",
        "release promote 7 --force",
        "run pipeline --profile embedded_local_judge",
    ]
    assert lines[2] == "| 1 | 0.800 | 90 | 0.500 |  | 0.2500 | 0.2500 | 0.500 | 1.000 |"
    assert lines[-1].endswith("RL with the judge: +0.500 (0.500 to 0.500), n = 40")
