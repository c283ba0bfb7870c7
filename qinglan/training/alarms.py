"""Alarms of a training run: signs in the metrics of its steps that the reward is hacked or the
policy collapses.

Means over windows of steps are compared. Alarms depend on the metrics alone, so a resumed run that
reads the earlier steps again gives the same alarms. An alarm holds a code and values;
`qinglan.evaluation.reasons` puts it into words.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pydantic import BaseModel

from qinglan.config import AlarmAction, AlarmName, Alarms
from qinglan.recipes import PrimaryMetric
from qinglan.runs.launcher import JsonlTail

REWARD, JUDGE = "critic/score/mean", "reward_extra/judge/mean"
ENTROPY, CLIP_FRACTION, UPDATE_KL = "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl"
REFERENCE_KLS = ("actor/kl_loss", "actor/reward_kl_penalty")
"""KL to the reference model: in the loss or in the reward, as the run has it."""
VALUE_LOSS, EXPLAINED_VARIANCE = "critic/vf_loss", "critic/vf_explained_var"
ZERO_VARIANCE = "groups/zero_variance"
SAMPLER_DIFFERENCE = "training/rollout_probs_diff_mean"
DISTINCT = "samples/distinct_per_target"
"""Different answers of a step, divided by the different targets of its questions."""
JUDGED = PrimaryMetric("judge", "the judge's score")
SPIKE_STEPS = 3
"""Clip fraction and KL show a problem at once, so a mean over a few steps is enough."""
VALUE_LOSS_WINDOWS = 3
"""The critic's value head starts untrained, so it has this many windows to show that it learns."""
_WATCHED = (
    *(REWARD, JUDGE, ENTROPY, CLIP_FRACTION, UPDATE_KL, *REFERENCE_KLS),
    *(VALUE_LOSS, EXPLAINED_VARIANCE, ZERO_VARIANCE, SAMPLER_DIFFERENCE, DISTINCT),
)
"""Beside the primary metric, which the recipe names."""


def part_mean(name: str) -> str:
    return f"reward_extra/{name}/mean"


class Alarm(BaseModel, frozen=True, extra="forbid"):
    """One line of `alarms.jsonl`."""

    step: int
    name: AlarmName
    action: AlarmAction
    code: str
    """Of the sentence that says what was seen."""
    values: dict[str, Any] = {}
    """What the sentence takes: numbers, words, or the code and values of a further sentence."""


class WindowChange(NamedTuple):
    """A metric's mean in an earlier window of steps and in the latest one."""

    before: float
    now: float
    standard_error: float
    """Of the difference."""

    def has_risen(self, at_least: float, errors: float) -> bool:
        return self.now - self.before >= max(at_least, errors * self.standard_error)

    def has_fallen(self, at_least: float, errors: float) -> bool:
        return self.before - self.now >= max(at_least, errors * self.standard_error)


Signal = tuple[str, dict[str, Any]]
"""The code of an alarm whose condition holds, and its values."""


class Trend:
    """Metrics that are known at the same steps. Compares the latest window with an earlier one that
    does not overlap: with the first, or with the one where the metric `best` was highest; from so
    many `windows` on."""

    def __init__(self, size: int, *names: str, best: str | None = None, windows: int = 2) -> None:
        self._size, self._names, self._best, self._fewest = size, names, best, windows * size
        self._steps: list[int] = []
        self._values: dict[str, list[float]] = {name: [] for name in names}
        self._start = 0

    def add(self, step: int, known: Mapping[str, float]) -> None:
        if not all(name in known for name in self._names):
            return
        self._steps.append(step)
        for name in self._names:
            self._values[name].append(known[name])
        newest = len(self._steps) - 2 * self._size
        if (
            self._best
            and newest > 0
            and self._at(self._best, newest) > self._at(self._best, self._start)
        ):
            self._start = newest

    def change(self, name: str) -> WindowChange | None:
        """None where there are too few steps so far."""
        if len(self._steps) < self._fewest:
            return None
        # The standard deviation of one step comes from the differences of neighbours, which a trend
        # hardly changes, and from all of them: those of the best window are few, and smaller than
        # most, as it was chosen.
        squares = ((b - a) ** 2 for a, b in pairwise(self._values[name]))
        error = math.sqrt(fmean(squares) / 2) * math.sqrt(2 / self._size)
        return WindowChange(
            self._at(name, self._start), self._at(name, len(self._steps) - self._size), error
        )

    @property
    def baseline(self) -> dict[str, int]:
        """The first and the last step of the earlier window."""
        return {
            "first": self._steps[self._start],
            "last": self._steps[self._start + self._size - 1],
        }

    def _at(self, name: str, start: int) -> float:
        return fmean(self._values[name][start : start + self._size])


class AlarmWatch:
    """Checks each step's metrics once. An alarm is raised when its condition begins to hold, and
    again only after a window of steps in which the condition did not hold."""

    def __init__(
        self, settings: Alarms, primary_metric: PrimaryMetric, *, labels_act: bool = True
    ) -> None:
        """`labels_act`: an alarm about the primary metric may do more than warn; not where training
        is label-free."""
        size = settings.window_steps
        self._settings, self._labels_act = settings, labels_act
        self._primary_metric, self._primary_metric_key = (
            primary_metric,
            part_mean(primary_metric.part),
        )
        self._last_step: int | None = None
        self._steps_seen = 0
        self._held_at: dict[AlarmName, int] = {}
        self._recent: dict[str, list[float]] = {}
        self._hacks = {
            key: Trend(size, REWARD, key, best=key) for key in (self._primary_metric_key, JUDGE)
        }
        self._reward = Trend(size, REWARD, best=REWARD)
        self._entropy = Trend(size, REWARD, ENTROPY)
        self._distinct = Trend(size, DISTINCT)
        self._value_loss = Trend(size, VALUE_LOSS, windows=VALUE_LOSS_WINDOWS)

    def update(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """The alarms that begin with this step. Steps come in order; one that was seen before is
        ignored."""
        watched = (*_WATCHED, self._primary_metric_key)
        known = {
            key: float(value) for key in watched if isinstance(value := metrics.get(key), Real)
        }
        known = {key: value for key, value in known.items() if math.isfinite(value)}
        if not known or (self._last_step is not None and step <= self._last_step):
            return []
        self._last_step = step
        self._steps_seen += 1
        for key, value in known.items():
            self._recent[key] = [*self._recent.get(key, ()), value][-self._settings.window_steps :]
        for trend in (
            *self._hacks.values(),
            self._reward,
            self._entropy,
            self._distinct,
            self._value_loss,
        ):
            trend.add(step, known)
        alarms = []
        for name, signal in self._signals():
            if signal is None:
                continue
            held_at, self._held_at[name] = self._held_at.get(name), self._steps_seen
            begins = held_at is None or self._steps_seen - held_at > self._settings.window_steps
            action = self._settings.actions.get(name, self._settings.default_action)
            if name == "reward_up_gold_down" and not self._labels_act and action != "off":
                action = "warn"
            if begins and action != "off":
                alarms.append(
                    Alarm(step=step, name=name, action=action, code=signal[0], values=signal[1])
                )
        return alarms

    def _signals(self) -> Iterator[tuple[AlarmName, Signal | None]]:
        limits = self._settings
        if self._primary_metric_key != JUDGE:
            yield "reward_up_gold_down", self._hack(self._primary_metric, limits.min_gold_drop)
        yield "reward_up_judge_down", self._hack(JUDGED, limits.min_judge_drop)
        yield "entropy_collapse", self._entropy_collapse()
        yield (
            "clip_fraction",
            self._mean_above("alarm_clip_fraction", CLIP_FRACTION, limits.max_clip_fraction),
        )
        yield "value_loss_flat", self._value_loss_flat()
        yield "kl_runaway", self._kl_runaway()
        yield "reward_down", self._reward_down()
        size = limits.window_steps
        yield (
            "zero_variance",
            self._mean_above("alarm_zero_variance", ZERO_VARIANCE, limits.max_zero_variance, size),
        )
        limit = limits.max_sampler_difference
        yield (
            "sampler_mismatch",
            self._mean_above("alarm_sampler_mismatch", SAMPLER_DIFFERENCE, limit),
        )

    def _hack(self, part: PrimaryMetric, min_drop: float) -> Signal | None:
        key, errors = part_mean(part.part), self._settings.significance
        trend = self._hacks[key]
        reward, other = trend.change(REWARD), trend.change(key)
        least = self._settings.min_reward_change
        if not (
            reward
            and reward.has_risen(least, errors)
            and other
            and other.has_fallen(min_drop, errors)
        ):
            return None
        return "alarm_reward_hacked", {
            "metric": part.words,
            **trend.baseline,
            **_values(reward=reward, metric=other),
        }

    def _reward_down(self) -> Signal | None:
        reward = self._reward.change(REWARD)
        if not (
            reward
            and reward.has_fallen(self._settings.min_reward_change, self._settings.significance)
        ):
            return None
        return "alarm_reward_down", self._reward.baseline | _values(reward=reward)

    def _entropy_collapse(self) -> Signal | None:
        entropy, reward = self._entropy.change(ENTROPY), self._entropy.change(REWARD)
        share = self._settings.min_entropy_share
        if not (
            entropy
            and reward
            and entropy.now < share * entropy.before
            and (lost := self._diversity_loss())
        ):
            return None
        values = {
            "share": share,
            **self._entropy.baseline,
            **_values(entropy=entropy, reward=reward),
        }
        return "alarm_entropy_collapse", values | {"lost": {"code": lost[0], "values": lost[1]}}

    def _diversity_loss(self) -> Signal | None:
        """What a policy of low entropy has lost, if anything: one that has learnt its task is as
        sure."""
        limits = self._settings
        distinct = self._distinct.change(DISTINCT)
        if distinct and distinct.now < limits.min_distinct_share * distinct.before:
            return "alarm_fewer_answers", _values(distinct_per_target=distinct)
        parts = [(JUDGED, limits.min_judge_drop)]
        if self._labels_act:
            parts.append((self._primary_metric, limits.min_gold_drop))
        for part, min_drop in parts:
            key = part_mean(part.part)
            if (change := self._hacks[key].change(key)) and change.has_fallen(
                min_drop, limits.significance
            ):
                return "alarm_metric_fell", {"metric": part.words, **_values(metric=change)}
        return None

    def _kl_runaway(self) -> Signal | None:
        limits = self._settings
        signal = self._mean_above("alarm_update_kl", UPDATE_KL, limits.max_update_kl)
        for key in REFERENCE_KLS:
            signal = signal or self._mean_above("alarm_reference_kl", key, limits.max_reference_kl)
        return signal

    def _value_loss_flat(self) -> Signal | None:
        trend, limits = self._value_loss, self._settings
        loss, explained = (
            trend.change(VALUE_LOSS),
            self._recent_mean(EXPLAINED_VARIANCE, limits.window_steps),
        )
        if loss is None or loss.now < (1 - limits.min_value_loss_fall) * loss.before:
            return None
        if loss.now == 0 or (explained is not None and explained >= limits.min_explained_variance):
            return None
        explains = None
        if explained is not None:
            explains = {"code": "alarm_values_explain", "values": {"explained_variance": explained}}
        return "alarm_value_loss_flat", {
            "explains": explains,
            **trend.baseline,
            **_values(value_loss=loss),
        }

    def _mean_above(
        self, code: str, key: str, limit: float, steps: int = SPIKE_STEPS
    ) -> Signal | None:
        """The signal of that code if the mean over the latest steps is above the limit."""
        mean = self._recent_mean(key, steps)
        return (
            (code, {"mean": mean, "steps": steps, "limit": limit})
            if mean is not None and mean > limit
            else None
        )

    def _recent_mean(self, key: str, steps: int) -> float | None:
        values = self._recent.get(key, [])[-steps:]
        return fmean(values) if len(values) == steps else None


def read_alarms(path: Path) -> list[Alarm]:
    """The alarms of a stage; a half-written line is skipped."""
    return [Alarm.model_validate(entry) for entry in JsonlTail(path).new()]


def _values(**changes: WindowChange) -> dict[str, float]:
    return {
        f"{name}_{when}": getattr(change, when)
        for name, change in changes.items()
        for when in ("before", "now")
    }
