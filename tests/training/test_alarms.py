"""Alarms on series made for them. Noise is drawn from a fixed seed."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from qinglan.config import Alarms
from qinglan.evaluation.reasons import alarm_words
from qinglan.recipes import PrimaryMetric
from qinglan.training import alarms
from qinglan.training.alarms import (
    CLIP_FRACTION,
    DISTINCT,
    ENTROPY,
    EXPLAINED_VARIANCE,
    JUDGE,
    REWARD,
    UPDATE_KL,
)

PRIMARY = PrimaryMetric("gold_top1", "gold top-1")
GOLD = alarms.part_mean(PRIMARY.part)
Curve = Callable[[int], float]
STEPS = 60


def line(start: float, end: float, noise: float = 0.0, seed: int = 0) -> Curve:
    """A line from `start` to `end` over the run."""
    rng = random.Random(seed)
    values = []
    for step in range(STEPS + 1):
        values.append(start + (end - start) * step / STEPS + rng.gauss(0, noise))
    return lambda step: values[step]


def settle(start: float, end: float, noise: float = 0.0, seed: int = 0) -> Curve:
    """A curve from `start` towards `end`, most of it in the first ten steps."""
    flat = line(end, end, noise, seed)
    return lambda step: flat(step) + (start - end) * 0.85**step


def jump(before: float, after: float, at: int = 30) -> Curve:
    return lambda step: before if step < at else after


Steps = list[tuple[int, dict[str, float]]]


def steps_of(**curves: Curve) -> Steps:
    """Each step's number and metrics."""
    steps = []
    for step in range(1, STEPS + 1):
        metrics = {key: curve(step) for key, curve in curves.items()}
        steps.append((step, metrics))
    return steps


def update_all(watching: alarms.AlarmWatch, steps: Steps) -> list[alarms.Alarm]:
    """The alarms of all these steps."""
    raised = []
    for step, metrics in steps:
        raised += watching.update(step, metrics)
    return raised


def watch(settings: Alarms | None = None, **curves: Curve) -> list[alarms.Alarm]:
    """The alarms of a run with these curves."""
    return update_all(alarms.AlarmWatch(settings or Alarms(), PRIMARY), steps_of(**curves))


def names(alarms: list[alarms.Alarm]) -> list[str]:
    return [alarm.name for alarm in alarms]


def healthy(seed: int = 0) -> dict[str, Curve]:
    """Curves with the ends and the noise of healthy runs of the embedded profile."""
    return {
        REWARD: line(-0.05, 0.08, 0.035, seed),
        GOLD: line(0.81, 0.9, 0.04, seed + 1),
        JUDGE: line(4.6, 4.85, 0.12, seed + 2),
        ENTROPY: line(0.29, 0.09, 0.06, seed + 3),
        CLIP_FRACTION: line(0.01, 0.0, 0.003, seed + 4),
        UPDATE_KL: line(0.003, 0.0, 0.002, seed + 5),
        alarms.REFERENCE_KLS[0]: line(0.0, 0.1, 0.01, seed + 6),
        alarms.VALUE_LOSS: settle(0.07, 0.032, 0.007, seed + 7),
        EXPLAINED_VARIANCE: settle(-0.8, 0.15, 0.08, seed + 8),
        alarms.ZERO_VARIANCE: line(0.2, 0.5, 0.05, seed + 9),
        alarms.SAMPLER_DIFFERENCE: line(0.005, 0.005, 0.002, seed + 10),
    }


def hacked(key: str, scale: float = 1.0) -> dict[str, Curve]:
    return {REWARD: line(0.0, 0.3, 0.035), key: line(0.8 * scale, 0.3 * scale, 0.04 * scale, 1)}


def hill(start: float, rise: float) -> Curve:
    """A curve up to the middle of the run and down again."""
    return lambda step: start + rise * min(step, STEPS - step) / 30


SLOW_DROP = {REWARD: line(0.0, 0.3), GOLD: line(0.8, 0.76)}
SURE = {REWARD: line(0.0, 0.1, 0.02), ENTROPY: lambda step: 0.3 * 0.85**step}
COLLAPSE = SURE | {DISTINCT: line(1.2, 0.1, 0.05)}
LEARNS = {alarms.VALUE_LOSS: line(0.02, 0.06, 0.002), EXPLAINED_VARIANCE: line(0.0, 0.6, 0.05, 1)}
LEARNS_NOTHING = {
    alarms.VALUE_LOSS: line(0.06, 0.06, 0.005),
    EXPLAINED_VARIANCE: line(-1.0, -1.0, 0.1, 1),
}
SHORT_HACK = {REWARD: jump(0.0, 0.5, at=6), GOLD: jump(0.9, 0.1, at=6)}


@pytest.mark.parametrize(
    ("curves", "name", "steps"),
    [
        (hacked(GOLD), "reward_up_gold_down", range(20, 31)),
        (hacked(JUDGE, 5), "reward_up_judge_down", range(20, 31)),
        # Compared with its best window, not with the first.
        (
            {REWARD: line(0.0, 0.4, 0.02), GOLD: hill(0.5, 0.4)},
            "reward_up_gold_down",
            range(31, STEPS),
        ),
        (
            {REWARD: line(0.3, 0.0, 0.03), GOLD: line(0.8, 0.5, 0.04, 1)},
            "reward_down",
            range(20, STEPS),
        ),
        ({REWARD: hill(0.0, 0.3)}, "reward_down", range(31, STEPS)),
        (COLLAPSE, "entropy_collapse", range(20, STEPS)),
        (
            SURE | {REWARD: line(0.1, 0.1, 0.02), GOLD: line(0.8, 0.3, 0.04)},
            "entropy_collapse",
            range(20, STEPS),
        ),
        (
            SURE | {REWARD: line(0.1, 0.1, 0.02), JUDGE: line(4, 2, 0.1)},
            "entropy_collapse",
            range(20, STEPS),
        ),
        ({CLIP_FRACTION: jump(0.1, 0.6)}, "clip_fraction", [31]),
        *(
            ({key: jump(0.05, 3.0)}, "kl_runaway", range(30, 34))
            for key in (UPDATE_KL, *alarms.REFERENCE_KLS)
        ),
        (LEARNS_NOTHING, "value_loss_flat", [30]),
        ({alarms.VALUE_LOSS: line(0.06, 0.5)}, "value_loss_flat", [30]),
        ({alarms.ZERO_VARIANCE: jump(0.3, 1.0)}, "zero_variance", range(30, 40)),
        ({alarms.SAMPLER_DIFFERENCE: line(0.0, 0.2)}, "sampler_mismatch", range(15, 25)),
    ],
)
def test_each_condition_has_its_alarm(curves: dict[str, Curve], name: str, steps: Sequence[int]):
    (alarm,) = watch(**curves)
    assert alarm.name == name
    assert alarm.step in steps
    assert alarm_words(alarm).en != alarm_words(alarm).zh


@pytest.mark.parametrize(
    ("settings", "curves", "expected"),
    [
        ({}, SLOW_DROP, []),
        ({"min_gold_drop": 0.02}, SLOW_DROP, ["reward_up_gold_down"]),
        ({"min_entropy_share": 0.0}, COLLAPSE, []),
        ({}, {CLIP_FRACTION: lambda step: 0.6 if step == 30 else 0.1}, []),
        # It has learnt its task.
        (
            {},
            SURE | {GOLD: line(0.8, 0.9, 0.04), DISTINCT: line(1.2, 1.0, 0.05)},
            [],
        ),
        # The value loss may rise while the values explain the returns.
        ({}, LEARNS, []),
        ({}, {CLIP_FRACTION: lambda _: float("nan"), UPDATE_KL: lambda _: float("inf")}, []),
    ],
)
def test_what_is_within_the_limits_is_quiet(
    settings: dict[str, Any], curves: dict[str, Curve], expected: list[str]
):
    assert names(watch(Alarms(**settings), **curves)) == expected


def test_a_healthy_run_is_quiet_and_noise_alone_alarms_in_hardly_any():
    assert [names(watch(**healthy(10 * seed))) for seed in range(40)] == [[]] * 40
    noisy_with_alarm = []
    for seed in range(200):
        curves = {REWARD: line(0.0, 0.1, 0.1, seed), GOLD: line(0.5, 0.5, 0.1, seed + 1000)}
        if watch(Alarms(min_gold_drop=0.0), **curves):
            noisy_with_alarm.append(seed)
    assert len(noisy_with_alarm) <= 2


STEADY = (
    "82 117 137 139 86 114 165 155 122 94 101 158 138 121 130 154 153 140 134 167 159 176 158 "
    "170 154 123 132 120 93 118 168 123 94 90 124 117 110 154 138 129 133 157 108 151 147"
)
"""Thousandths of a real run's reward: a calm window was the best, and later ones are as noisy as
the earlier."""


def test_a_calm_best_window_does_not_make_the_noise_look_small():
    watching = alarms.AlarmWatch(Alarms(), PRIMARY)
    rewards = [int(thousandths) / 1000 for thousandths in STEADY.split()]
    steps = [(step, {REWARD: reward}) for step, reward in enumerate(rewards, 1)]
    assert update_all(watching, steps) == []


def test_a_short_run_needs_short_windows():
    assert watch(Alarms(window_steps=3), **SHORT_HACK)[0].step <= 10
    assert watch(Alarms(window_steps=10), **SHORT_HACK)[0].step == 20


def test_an_alarm_sounds_once_and_again_only_after_a_quiet_window():
    def twice(gap: int) -> Curve:
        return lambda step: 0.6 if step <= 20 or step > 20 + gap else 0.1

    assert len(watch(**{CLIP_FRACTION: twice(0)})) == 1
    assert len(watch(**{CLIP_FRACTION: twice(8)})) == 1
    assert [alarm.step for alarm in watch(**{CLIP_FRACTION: twice(20)})] == [3, 42]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped():
    steps = steps_of(
        **healthy() | {GOLD: line(0.8, 0.3, 0.04, 1), CLIP_FRACTION: jump(0.1, 0.9, at=50)}
    )
    expected = update_all(alarms.AlarmWatch(Alarms(), PRIMARY), steps)
    assert len(expected) == 2
    resumed = alarms.AlarmWatch(Alarms(), PRIMARY)
    replayed = update_all(resumed, steps[:40])
    # It validates again under the step that it resumes from.
    assert resumed.update(*steps[39]) == []
    assert replayed + update_all(resumed, steps[40:]) == expected


def test_steps_without_labels_are_left_out_of_the_comparison():
    watching = alarms.AlarmWatch(Alarms(), PRIMARY)
    assert watching.update(0, {CLIP_FRACTION: None, "note": "text", "dev/value": 0.5}) == []
    steps = steps_of(**{REWARD: line(0.0, 0.3, 0.01), GOLD: line(0.9, 0.1, 0.02, 1)})
    for step, metrics in steps:
        if step % 2 == 0:
            del metrics[GOLD]
    raised = update_all(watching, steps)
    assert names(raised) == ["reward_up_gold_down"]
    assert raised[0].step >= 39, "the twentieth labelled step"


def test_actions_go_by_name():
    settings = Alarms(
        default_action="lower_lr", actions={"clip_fraction": "stop", "zero_variance": "off"}
    )
    curves = {
        CLIP_FRACTION: line(0.9, 0.9),
        UPDATE_KL: line(1.0, 1.0),
        alarms.ZERO_VARIANCE: line(1.0, 1.0),
    }
    assert [(alarm.name, alarm.action) for alarm in watch(settings, **curves)] == [
        ("clip_fraction", "stop"),
        ("kl_runaway", "lower_lr"),
    ]


@pytest.mark.parametrize("action", ["warn", "lower_lr", "stop", "off"])
def test_without_labels_in_use_an_alarm_that_goes_by_them_only_warns(action: str):
    settings = Alarms.model_validate({"default_action": action})
    both = {key: line(0.8, 0.3, 0.04, 1) for key in (GOLD, JUDGE)}
    watching = alarms.AlarmWatch(settings, PRIMARY, labels_act=False)
    raised = update_all(watching, steps_of(**{REWARD: line(0.0, 0.3, 0.035)} | both))
    expected = {"reward_up_gold_down": "warn", "reward_up_judge_down": action}
    if action == "off":
        expected = {}
    assert {alarm.name: alarm.action for alarm in raised} == expected


def test_a_bare_off_in_yaml_is_off_and_an_unknown_alarm_is_refused():
    settings = Alarms.model_validate(
        yaml.safe_load("{default_action: off, actions: {reward_down: off}}")
    )
    assert settings.default_action == "off"
    assert settings.actions["reward_down"] == "off"
    with pytest.raises(ValidationError, match="clip_fraction"):
        Alarms.model_validate({"actions": {"clipfraction": "stop"}})


def test_an_alarm_says_what_changed_its_line_reads_back_and_half_a_line_is_skipped(tmp_path: Path):
    (alarm,) = watch(**hacked(GOLD))
    assert alarm.values["reward_now"] > alarm.values["reward_before"]
    assert alarm.values["metric_now"] < alarm.values["metric_before"]
    assert re.match(
        r"since steps \d+–\d+ the reward rose from .* while gold top-1 fell", alarm_words(alarm).en
    )
    path = tmp_path / "alarms.jsonl"
    assert alarms.read_alarms(path) == []
    half = '{"step": 4, "values": {"metric": "首'.encode()[:-1]  # within a character
    path.write_bytes(f"{alarm.model_dump_json()}\n".encode() + half)
    assert alarms.read_alarms(path) == [alarm]
