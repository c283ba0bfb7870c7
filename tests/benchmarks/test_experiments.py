"""The experiments' logic on made-up results: what is left out, and what the tables say."""

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
GOOD, BAD = "1" * 40, "0" * 40
HALF = "01" * 20
"""Half of every group's questions."""


def result(experiment: str = "default", seed: int = 1, *, rl: str = GOOD, **changes: Any) -> Result:
    settings = matrix.EXPERIMENTS[experiment].settings
    known: dict[str, Any] = {
        "experiment": experiment, "seed": seed, "settings": settings, "run_id": "r", "sources": "s",
        "versions": {"verl": "0.9.1"}, "cores": 2, "wall_s": 100.0, "rl_s": 60.0, "questions": hash_of(GROUPS),
        "top1": {"teacher": HALF, "sft": HALF, "rl": rl}, "quality": {"rl": 4.5},
        "summary": {"reward_first": 0.0, "reward_last": 0.1, "dev_value": 0.9, "chosen_step": 45},
    }  # fmt: skip
    return Result(**known | changes)


@pytest.mark.parametrize(
    "experiment", matrix.EXPERIMENTS.values(), ids=lambda experiment: experiment.name
)
def test_every_experiment_is_a_valid_profile(experiment: matrix.Experiment) -> None:
    profile = load_profile("embedded", experiment.settings)
    assert profile.rl.train_batch_size * profile.rl.rollouts_per_prompt == 64
    assert profile.rl.ppo_mini_batch_size * profile.rl.rollouts_per_prompt == 32


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
    found = difference(ours, "rl", ours, "teacher", groups)
    assert found is not None
    assert found.seeds == tuple(ours)
    assert found.diff == pytest.approx(expected[0], abs=1e-4)
    assert found.ci95 == (expected[1] and pytest.approx(expected[1], abs=0.01))
    assert (found.n, found.groups, found.left_out) == expected[2:]
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
    found = Difference(diff=0.0, ci95=ends, seeds=seeds, n=9, groups=3, left_out=0)
    assert findings.reading(found, no_worse=no_worse) == expected


def test_results_of_other_questions_settings_and_experiments_are_left_out(tmp_path: Path) -> None:
    site, other = Site(tmp_path), ("rl.total_steps=3",)
    site.save(result(seed=1, questions="of another test split"), GROUPS)
    site.save(result(seed=2), GROUPS)
    site.save(result(seed=3, settings=other), GROUPS)
    site.save(result(seed=4).model_copy(update={"experiment": "of_old"}), GROUPS)
    assert site.load() == {"default": {2: result(seed=2)}}
    assert site.left_out() == [
        "default-1: other test questions", "default-3: other settings", "of_old-4: no such experiment",
    ]  # fmt: skip
    assert [*Site(tmp_path, other).load()["default"]] == [3]


def test_the_page_was_made_of_the_results_that_are_there() -> None:
    site = Site(command.RESULTS)
    assert command.PAGE.read_text(encoding="utf-8") == tables.document(site.load(), site.groups())


def test_the_local_judges_runs_follow_each_other_and_its_table_says_what_they_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(Path(command.__file__).parents[1])
    bench, said = import_module("local_judge"), list[tuple[str, ...]]()
    stage = {
        "released": {"aliases": [], "version": "7"},
        "agreement": {"pairs": 90, "kappa": 0.5, "kappa_low": None},
    }
    results = [result(rl=rl, summary={"judge_cost_usd": 0.25}) for rl in (HALF, GOOD)]
    monkeypatch.setattr(bench, "qinglan", lambda _, *words: said.append(words))
    monkeypatch.setattr(bench, "stage_of", lambda *_: SimpleNamespace(details=stage))
    monkeypatch.setattr(
        bench,
        "result_of_run",
        lambda *_, experiment, **__: (results["local" in experiment], GROUPS),
    )
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    report = {"arms": {"rl": {"scores": {"main": {"mean": 0.8}}}}, "decision": {"verdict": "hold"}}
    (tmp_path / "runs" / "latest" / "report.json").write_text(json.dumps(report), encoding="utf-8")
    lines = bench.table(bench.summary(*zip(bench.measure(tmp_path, 1, []), strict=True)))
    asked = [" ".join(words[:4]) for words in said]
    runs = [
        f"run pipeline --profile {name}"
        for name in ("embedded", "passage_judge", "embedded_local_judge")
    ]
    assert asked == [
        runs[0],
        "dataset judge-pairs latest --out",
        runs[1],
        "release promote 7 --force",
        runs[2],
    ]
    assert lines[2] == "| 1 | 0.800 | 90 | 0.500 |  | 0.2500 | 0.2500 | 0.500 | 1.000 |"
    assert lines[-1].endswith("RL with the judge: +0.500 (0.500 to 0.500), n = 40")
