"""The experiments' logic on made-up results: what is left out, and what the tables say."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rl_experiments import command, findings, matrix, rivals, tables
from benchmarks.rl_experiments.results import Difference, Result, Site, difference, verl_curve
from qinglan.config import load_profile
from qinglan.errors import StageError
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


@pytest.mark.parametrize("experiment", matrix.EXPERIMENTS.values(), ids=lambda experiment: experiment.name)
def test_every_experiment_is_a_valid_profile(experiment: matrix.Experiment) -> None:
    profile = load_profile("embedded", experiment.settings)
    assert profile.rl.train_batch_size * profile.rl.rollouts_per_prompt == 64
    assert profile.rl.ppo_mini_batch_size * profile.rl.rollouts_per_prompt == 32


@pytest.mark.parametrize(
    ("seeds", "groups", "expected"),
    [
        # Every group has the same difference, so that only drawing seeds moves the mean: 0.5, 0, or one of each.
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


RISEN = {"reward_first": 0.0, "reward_last": 0.1}
SUNK = {"reward_first": 0.1, "reward_last": 0.0}
FALLEN_GOLD = {"gold_top1_first": 0.8, "gold_top1_last": 0.5}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rl": BAD}, True),
        ({"rl": GOOD}, False),
        ({"rl": BAD, "summary": SUNK}, False),
        ({"top1": {"base": BAD, "sft": GOOD, "rl": HALF}, "experiment": "rl_only"}, False),  # it began with the base
    ],
)
def test_a_tested_model_is_hacked_if_the_reward_rises_while_its_top1_falls(changes: dict[str, Any], expected: bool):
    assert findings.tests_worse(result(**{"experiment": "formula_alone"} | changes), GROUPS) is expected


@pytest.mark.parametrize(
    ("summary", "expected"), [(RISEN, True), (RISEN | {"gold_top1_last": 0.75}, False), (SUNK, False)]
)
def test_training_is_hacked_if_top1_of_its_samples_falls_by_more_than_noise(summary: dict[str, float], expected: bool):
    assert findings.trained_worse(result(summary=FALLEN_GOLD | summary)) is expected


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


def test_verls_curve_leaves_out_saving_which_is_within_a_step_and_validation_which_is_not() -> None:
    step = {"critic/score/mean": 0.5, "timing_s/step": 3.0}
    steps = {0: {"val": 1.0}, 1: step, 2: step | {"timing_s/testing": 9.0, "timing_s/save_checkpoint": 0.5}}
    assert [(p.samples, p.seconds) for p in verl_curve(steps, 64)] == [(64, 3.0), (128, 5.5)]


def test_a_rivals_curve_joins_the_scores_and_the_clock(tmp_path: Path) -> None:
    rewards, times = tmp_path / "rewards", tmp_path / "times"
    rewards.write_text("".join(json.dumps({"samples": 64, "reward": reward}) + "\n" for reward in (0.1, 0.2)))
    times.write_text("2.0\n3.504\n")
    found = rivals.read_curve(rewards, times)
    assert [(p.samples, p.seconds, p.reward) for p in found] == [(64, 2.0, 0.1), (128, 3.5, 0.2)]
    times.write_text("2.0\n")
    with pytest.raises(StageError, match=r"2 batches were scored .* in 1 steps"):
        rivals.read_curve(rewards, times)


def test_the_page_was_made_of_the_results_that_are_there() -> None:
    site = Site(command.RESULTS)
    assert command.PAGE.read_text(encoding="utf-8") == tables.document(site.load(), site.groups())
