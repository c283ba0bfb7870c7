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

REWARD = "critic/score/mean"
JUDGE = "reward_extra/judge/mean"
ENTROPY = "actor/entropy"
CLIP_FRACTION = "actor/pg_clipfrac"
UPDATE_KL = "actor/ppo_kl"
REWARD_KL = "actor/reward_kl_penalty"
"""verl's metric of the KL to the reference, taken off the reward, in nats per token."""
REFERENCE_KLS = ("actor/kl_loss", REWARD_KL)
"""KL to the reference model: in the loss or in the reward, as the run has it."""
VALUE_LOSS = "critic/vf_loss"
EXPLAINED_VARIANCE = "critic/vf_explained_var"
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
    REWARD,
    JUDGE,
    ENTROPY,
    CLIP_FRACTION,
    UPDATE_KL,
    *REFERENCE_KLS,
    VALUE_LOSS,
    EXPLAINED_VARIANCE,
    ZERO_VARIANCE,
    SAMPLER_DIFFERENCE,
    DISTINCT,
)
"""Metrics that alarms are about, beside the primary metric, which the recipe names."""


def part_mean(name: str) -> str:
    """The metric of a part of the reward."""
    return f"reward_extra/{name}/mean"


class Alarm(BaseModel, frozen=True, extra="forbid"):
    """One line of `alarms.jsonl`."""

    step: int
    name: AlarmName
    action: AlarmAction
    code: str
    """Code of the sentence that says what was seen."""
    values: dict[str, Any] = {}
    """Values in the sentence: numbers, words, or the code and values of a further sentence."""


class WindowChange(NamedTuple):
    """A metric's mean in an earlier window of steps and in the latest one."""

    before: float
    now: float
    standard_error: float
    """Standard error of the difference."""

    def has_risen(self, at_least: float, errors: float) -> bool:
        return self.now - self.before >= max(at_least, errors * self.standard_error)

    def has_fallen(self, at_least: float, errors: float) -> bool:
        return self.before - self.now >= max(at_least, errors * self.standard_error)


class Signal(NamedTuple):
    """An alarm's condition that holds."""

    code: str
    values: dict[str, Any]


class Trend:
    """Metrics that are known at the same steps, whose latest window of steps is compared with an
    earlier one.

    The windows do not overlap. The earlier one is the first, or the one in which the metric `best`
    was highest.
    """

    def __init__(self, size: int, *names: str, best: str | None = None, windows: int = 2) -> None:
        """Take windows of `size` steps; compare from `windows` windows on."""
        self._size = size
        self._names = names
        self._best = best
        self._min_steps = windows * size
        self._steps: list[int] = []
        self._values: dict[str, list[float]] = {name: [] for name in names}
        self._start = 0
        """Place of the earlier window."""

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step, unless one of the metrics is not known at it."""
        if not all(name in metrics for name in self._names):
            return
        self._steps.append(step)
        for name in self._names:
            self._values[name].append(metrics[name])
        # The newest window that does not overlap the latest one.
        candidate = len(self._steps) - 2 * self._size
        if self._best is None or candidate <= 0:
            return
        if self._mean(self._best, candidate) > self._mean(self._best, self._start):
            self._start = candidate

    def change(self, name: str) -> WindowChange | None:
        """A metric's change between the windows; None where there are too few steps so far."""
        if len(self._steps) < self._min_steps:
            return None
        # The standard deviation of one step comes from the differences of neighbours, which a trend
        # hardly changes, and from all of them: those of the best window are few, and smaller than
        # most, as it was chosen.
        squares = ((after - before) ** 2 for before, after in pairwise(self._values[name]))
        error = math.sqrt(fmean(squares) / 2) * math.sqrt(2 / self._size)
        latest_start = len(self._steps) - self._size
        return WindowChange(self._mean(name, self._start), self._mean(name, latest_start), error)

    @property
    def baseline(self) -> dict[str, int]:
        """The first and the last step of the earlier window."""
        end = self._start + self._size
        return {"first": self._steps[self._start], "last": self._steps[end - 1]}

    def _mean(self, name: str, start: int) -> float:
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
        self._settings = settings
        self._labels_act = labels_act
        self._primary_metric = primary_metric
        self._primary_metric_key = part_mean(primary_metric.part)
        self._last_step: int | None = None
        self._steps_seen = 0
        self._held_at: dict[AlarmName, int] = {}
        """Number of the last step at which an alarm's condition held."""
        self._recent: dict[str, list[float]] = {}
        """The latest window's values of each metric."""
        self._hacks = {
            key: Trend(size, REWARD, key, best=key) for key in (self._primary_metric_key, JUDGE)
        }
        self._reward = Trend(size, REWARD, best=REWARD)
        self._entropy = Trend(size, REWARD, ENTROPY)
        self._distinct = Trend(size, DISTINCT)
        self._value_loss = Trend(size, VALUE_LOSS, windows=VALUE_LOSS_WINDOWS)
        self._trends = (
            *self._hacks.values(),
            self._reward,
            self._entropy,
            self._distinct,
            self._value_loss,
        )

    def update(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """The alarms that begin with this step. Steps come in order; one that was seen before is
        ignored."""
        values = self._watched_values(metrics)
        was_seen = self._last_step is not None and step <= self._last_step
        if not values or was_seen:
            return []
        self._last_step = step
        self._steps_seen += 1
        for key, value in values.items():
            recent = [*self._recent.get(key, ()), value]
            self._recent[key] = recent[-self._settings.window_steps :]
        for trend in self._trends:
            trend.add(step, values)
        alarms = []
        for name, signal in self._signals():
            if signal is None:
                continue
            begins = self._begins(name)
            action = self._action(name)
            if begins and action != "off":
                alarm = Alarm(
                    step=step, name=name, action=action, code=signal.code, values=signal.values
                )
                alarms.append(alarm)
        return alarms

    def _watched_values(self, metrics: Mapping[str, object]) -> dict[str, float]:
        """The watched metrics that are finite numbers."""
        values = {}
        for key in (*_WATCHED, self._primary_metric_key):
            value = metrics.get(key)
            if isinstance(value, Real) and math.isfinite(value):
                values[key] = float(value)
        return values

    def _begins(self, name: AlarmName) -> bool:
        """Note that an alarm's condition holds at this step: is that new?"""
        held_at = self._held_at.get(name)
        self._held_at[name] = self._steps_seen
        return held_at is None or self._steps_seen - held_at > self._settings.window_steps

    def _action(self, name: AlarmName) -> AlarmAction:
        action = self._settings.actions.get(name, self._settings.default_action)
        goes_by_labels = name == "reward_up_gold_down"
        if goes_by_labels and not self._labels_act and action != "off":
            return "warn"
        return action

    def _signals(self) -> Iterator[tuple[AlarmName, Signal | None]]:
        limits = self._settings
        if self._primary_metric_key != JUDGE:
            yield "reward_up_gold_down", self._hack(self._primary_metric, limits.min_gold_drop)
        yield "reward_up_judge_down", self._hack(JUDGED, limits.min_judge_drop)
        yield "entropy_collapse", self._entropy_collapse()
        clipped = self._mean_above("alarm_clip_fraction", CLIP_FRACTION, limits.max_clip_fraction)
        yield "clip_fraction", clipped
        yield "value_loss_flat", self._value_loss_flat()
        yield "kl_runaway", self._kl_runaway()
        yield "reward_down", self._reward_down()
        taught_nothing = self._mean_above(
            "alarm_zero_variance", ZERO_VARIANCE, limits.max_zero_variance, limits.window_steps
        )
        yield "zero_variance", taught_nothing
        mismatch = self._mean_above(
            "alarm_sampler_mismatch", SAMPLER_DIFFERENCE, limits.max_sampler_difference
        )
        yield "sampler_mismatch", mismatch

    def _hack(self, part: PrimaryMetric, min_drop: float) -> Signal | None:
        """The reward has risen while a part of it that it should follow has fallen."""
        key = part_mean(part.part)
        trend = self._hacks[key]
        reward = trend.change(REWARD)
        metric = trend.change(key)
        if reward is None or metric is None:
            return None
        errors = self._settings.significance
        if not reward.has_risen(self._settings.min_reward_change, errors):
            return None
        if not metric.has_fallen(min_drop, errors):
            return None
        values = {
            "metric": part.words,
            **trend.baseline,
            **_values(reward=reward, metric=metric),
        }
        return Signal("alarm_reward_hacked", values)

    def _reward_down(self) -> Signal | None:
        limits = self._settings
        reward = self._reward.change(REWARD)
        if reward is None or not reward.has_fallen(limits.min_reward_change, limits.significance):
            return None
        return Signal("alarm_reward_down", self._reward.baseline | _values(reward=reward))

    def _entropy_collapse(self) -> Signal | None:
        """The entropy is low, and with it went something that the policy should have kept."""
        entropy = self._entropy.change(ENTROPY)
        reward = self._entropy.change(REWARD)
        if entropy is None or reward is None:
            return None
        share = self._settings.min_entropy_share
        if entropy.now >= share * entropy.before:
            return None
        loss = self._diversity_loss()
        if loss is None:
            return None
        values = {
            "share": share,
            **self._entropy.baseline,
            **_values(entropy=entropy, reward=reward),
            "lost": {"code": loss.code, "values": loss.values},
        }
        return Signal("alarm_entropy_collapse", values)

    def _diversity_loss(self) -> Signal | None:
        """The loss that comes with a low entropy, if any: a policy that has learnt its task is as
        sure as one that has collapsed."""
        limits = self._settings
        distinct = self._distinct.change(DISTINCT)
        if distinct and distinct.now < limits.min_distinct_share * distinct.before:
            return Signal("alarm_fewer_answers", _values(distinct_per_target=distinct))
        parts = [(JUDGED, limits.min_judge_drop)]
        if self._labels_act:
            parts.append((self._primary_metric, limits.min_gold_drop))
        for part, min_drop in parts:
            key = part_mean(part.part)
            change = self._hacks[key].change(key)
            if change and change.has_fallen(min_drop, limits.significance):
                values = {"metric": part.words, **_values(metric=change)}
                return Signal("alarm_metric_fell", values)
        return None

    def _kl_runaway(self) -> Signal | None:
        limits = self._settings
        signal = self._mean_above("alarm_update_kl", UPDATE_KL, limits.max_update_kl)
        for key in REFERENCE_KLS:
            if signal is None:
                signal = self._mean_above("alarm_reference_kl", key, limits.max_reference_kl)
        return signal

    def _value_loss_flat(self) -> Signal | None:
        """The critic's loss has not fallen, and its values explain nothing of the returns."""
        limits = self._settings
        loss = self._value_loss.change(VALUE_LOSS)
        if loss is None or loss.now < (1 - limits.min_value_loss_fall) * loss.before:
            return None
        # A loss of nothing can't fall.
        if loss.now == 0:
            return None
        # The loss may rise with the returns while the critic learns.
        explained = self._recent_mean(EXPLAINED_VARIANCE, limits.window_steps)
        if explained is not None and explained >= limits.min_explained_variance:
            return None
        explains = None
        if explained is not None:
            explains = {"code": "alarm_values_explain", "values": {"explained_variance": explained}}
        values = {
            "explains": explains,
            **self._value_loss.baseline,
            **_values(value_loss=loss),
        }
        return Signal("alarm_value_loss_flat", values)

    def _mean_above(
        self, code: str, key: str, limit: float, steps: int = SPIKE_STEPS
    ) -> Signal | None:
        """The signal of that code if the mean over the latest steps is above the limit."""
        mean = self._recent_mean(key, steps)
        if mean is None or mean <= limit:
            return None
        return Signal(code, {"mean": mean, "steps": steps, "limit": limit})

    def _recent_mean(self, key: str, steps: int) -> float | None:
        """Mean over the latest steps; None where there were fewer."""
        values = self._recent.get(key, [])[-steps:]
        return fmean(values) if len(values) == steps else None


def read_alarms(path: Path) -> list[Alarm]:
    """The alarms of a stage; a half-written line is skipped."""
    return [Alarm.model_validate(entry) for entry in JsonlTail(path).new()]


def _values(**changes: WindowChange) -> dict[str, float]:
    """The means before and now, under the names of the metrics."""
    values = {}
    for name, change in changes.items():
        values[f"{name}_before"] = change.before
        values[f"{name}_now"] = change.now
    return values
