"""Alarms of a training run: signs, in the metrics of its steps, that the reward is hacked or the policy collapses.

Means over windows of steps are compared, and a change counts where it is large beside the noise between neighbouring
steps. What is said depends on the metrics alone, so that a resumed run that reads the earlier steps again goes on as
if it had never stopped. No torch here: the trainer watches, the flow reads.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from qinglan.config import AlarmAction, AlarmName, Alarms
from qinglan.recipes.kinds.common import PrimaryMetric
from qinglan.text import number

REWARD, JUDGE = "critic/score/mean", "reward_extra/judge/mean"
ENTROPY, CLIP_FRACTION, UPDATE_KL = "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl"
REFERENCE_KLS = ("actor/kl_loss", "actor/reward_kl_penalty")
"""KL to the reference model: in the loss or in the reward, whichever the run has."""
VALUE_LOSS, EXPLAINED_VARIANCE = "critic/vf_loss", "critic/vf_explained_var"
ZERO_VARIANCE = "groups/zero_variance"
SPIKE_STEPS = 3
"""Clip fraction and KL tell at once, so that a mean over a few steps is enough."""
VALUE_LOSS_WINDOWS = 3
"""A critic starts from nothing, and has this many windows to show that it learns."""
_WATCHED = (
    *(REWARD, JUDGE, ENTROPY, CLIP_FRACTION, UPDATE_KL, *REFERENCE_KLS),
    *(VALUE_LOSS, EXPLAINED_VARIANCE, ZERO_VARIANCE),
)
"""Beside the headline, whose name the recipe gives."""
_HACKED = (
    "the reward pays for something else than a better answer. Read what the latest lines of samples.jsonl have in "
    "common; then tighten what the reward demands of every sample (docs/reward.md)"
)


def part_mean(name: str) -> str:
    """The metric of a step that is the mean of one of the reward's parts."""
    return f"reward_extra/{name}/mean"


class Alarm(BaseModel):
    """One line of `alarms.jsonl`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    name: AlarmName
    action: AlarmAction
    message: str
    values: dict[str, float] = {}
    """The numbers in the message."""


class Sign(NamedTuple):
    """What is to be seen, whether new or not."""

    message: str
    values: dict[str, float]


class Change(NamedTuple):
    """A series' mean in an earlier window and in the latest."""

    before: float
    now: float
    error: float
    """Standard error of the difference."""

    def rose(self, at_least: float, errors: float) -> bool:
        """By more than noise makes it."""
        return self.now - self.before >= max(at_least, errors * self.error)

    def fell(self, at_least: float, errors: float) -> bool:
        """By more than noise makes it."""
        return self.before - self.now >= max(at_least, errors * self.error)


class Trend:
    """Series that are known at the same steps. The latest window is compared with an earlier one that it does not
    touch: with the first, or with the one where the series `best` was highest."""

    def __init__(self, size: int, *names: str, best: str | None = None) -> None:
        self._size, self._names, self._best = size, names, best
        self._steps: list[int] = []
        self._values: dict[str, list[float]] = {name: [] for name in names}
        self._start = 0

    def add(self, step: int, known: Mapping[str, float]) -> None:
        """Append a step, where it has all series."""
        if not all(name in known for name in self._names):
            return
        self._steps.append(step)
        for name in self._names:
            self._values[name].append(known[name])
        newest = len(self._steps) - 2 * self._size
        if self._best and newest > 0 and self._at(self._best, newest) > self._at(self._best, self._start):
            self._start = newest

    def windows(self) -> int:
        """Whole windows so far."""
        return len(self._steps) // self._size

    def change(self, name: str) -> Change:
        """From the earlier window to the latest."""
        late, size = len(self._steps) - self._size, self._size
        values = self._values[name]
        noise = _noise(values[self._start :])
        return Change(self._at(name, self._start), self._at(name, late), noise * math.sqrt(2 / size))

    def since(self) -> str:
        """`steps 1–10`, the earlier window."""
        return f"steps {self._steps[self._start]}–{self._steps[self._start + self._size - 1]}"

    def _at(self, name: str, start: int) -> float:
        return _mean(self._values[name][start : start + self._size])


class AlarmWatch:
    """Looks at each step's metrics once. An alarm sounds when its condition begins, and again only after as many steps
    without it as a window has."""

    def __init__(self, settings: Alarms, primary_metric: PrimaryMetric, *, labels_act: bool = True) -> None:
        """`labels_act`: an alarm that goes by the headline may do more than warn; not where training is label-free."""
        size = settings.window_steps
        self._settings, self._labels_act = settings, labels_act
        self._headline, self._primary_metric_key = primary_metric, part_mean(primary_metric.part)
        self._last_step: int | None = None
        self._steps_seen = 0
        self._lit_at: dict[AlarmName, int] = {}
        self._recent: dict[str, list[float]] = {}
        self._hacks = {key: Trend(size, REWARD, key, best=key) for key in (self._primary_metric_key, JUDGE)}
        self._reward = Trend(size, REWARD, best=REWARD)
        self._entropy = Trend(size, REWARD, ENTROPY)
        self._value_loss = Trend(size, VALUE_LOSS)

    def update(self, step: int, metrics: Mapping[str, object]) -> list[Alarm]:
        """What begins to alarm with this step. Steps come in order; one that was seen is ignored."""
        watched = (*_WATCHED, self._primary_metric_key)
        known = {key: float(value) for key in watched if (value := _finite(metrics.get(key))) is not None}
        if not known or (self._last_step is not None and step <= self._last_step):
            return []
        self._last_step = step
        self._steps_seen += 1
        for key, value in known.items():
            self._recent[key] = [*self._recent.get(key, ()), value][-self._settings.window_steps :]
        for trend in (*self._hacks.values(), self._reward, self._entropy, self._value_loss):
            trend.add(step, known)
        signs = ((name, sign) for name, sign in self._signs() if sign and self._begins(name))
        found = ((name, sign, self._action(name)) for name, sign in signs)
        return [
            Alarm(step=step, name=name, action=action, message=sign.message, values=sign.values)
            for name, sign, action in found
            if action != "off"
        ]

    def _action(self, name: AlarmName) -> AlarmAction:
        action = self._settings.action(name)
        return "warn" if name == "reward_up_gold_down" and not self._labels_act and action != "off" else action

    def _begins(self, name: AlarmName) -> bool:
        """Whether a sign that is there now was absent for a window of steps."""
        before = self._lit_at.get(name)
        self._lit_at[name] = self._steps_seen
        return before is None or self._steps_seen - before > self._settings.window_steps

    def _signs(self) -> Iterable[tuple[AlarmName, Sign | None]]:
        limits = self._settings
        if self._primary_metric_key != JUDGE:
            yield "reward_up_gold_down", self._hack(self._headline, limits.min_gold_drop)
        yield "reward_up_judge_down", self._hack(PrimaryMetric("judge", "the judge's score"), limits.min_judge_drop)
        yield "entropy_collapse", self._entropy_collapse()
        yield "clip_fraction", self._clip_fraction()
        yield "value_loss_flat", self._value_loss_flat()
        yield "kl_runaway", self._kl_runaway()
        yield "reward_down", self._reward_down()
        yield "zero_variance", self._zero_variance()

    def _hack(self, part: PrimaryMetric, min_drop: float) -> Sign | None:
        key, errors = part_mean(part.part), self._settings.significance
        trend = self._hacks[key]
        if trend.windows() < 2:
            return None
        reward, other = trend.change(REWARD), trend.change(key)
        if not (reward.rose(self._settings.min_reward_change, errors) and other.fell(min_drop, errors)):
            return None
        return Sign(
            f"since {trend.since()} the reward rose from {number(reward.before)} to {number(reward.now)} while "
            f"{part.words} fell from {number(other.before)} to {number(other.now)}: {_HACKED}",
            _values(reward=reward) | _values(**{part.part: other}),
        )

    def _reward_down(self) -> Sign | None:
        trend = self._reward
        if trend.windows() < 2:
            return None
        reward = trend.change(REWARD)
        if not reward.fell(self._settings.min_reward_change, self._settings.significance):
            return None
        return Sign(
            f"the mean reward fell from {number(reward.before)} in {trend.since()} to {number(reward.now)}: updates "
            "harm the policy. Lower rl.actor_lr or rl.ppo_epochs; if the curve swings, use a cosine schedule",
            _values(reward=reward),
        )

    def _entropy_collapse(self) -> Sign | None:
        trend = self._entropy
        if trend.windows() < 2:
            return None
        entropy, reward = trend.change(ENTROPY), trend.change(REWARD)
        if entropy.now >= self._settings.min_entropy_share * entropy.before:
            return None
        return Sign(
            f"entropy fell from {number(entropy.before)} in {trend.since()} to {number(entropy.now)} nats per token, "
            f"below {self._settings.min_entropy_share:.0%} of it, while the reward went from {number(reward.before)} "
            f"to {number(reward.now)}: the policy says the same whatever it is asked, and explores no more. Read "
            "samples.jsonl; raise rl.entropy_coefficient, hold it nearer to its start by rl.kl, or lower rl.actor_lr",
            _values(entropy=entropy, reward=reward),
        )

    def _clip_fraction(self) -> Sign | None:
        share = self._recent_mean(CLIP_FRACTION, SPIKE_STEPS)
        if share is None or share <= self._settings.max_clip_fraction:
            return None
        return Sign(
            f"updates were cut off at rl.clip_ratio for {share:.0%} of the tokens over {SPIKE_STEPS} steps, more than "
            f"{self._settings.max_clip_fraction:.0%}: they go further than their samples can tell. Lower rl.actor_lr "
            "or rl.ppo_epochs",
            {"clip_fraction": share},
        )

    def _kl_runaway(self) -> Sign | None:
        limits = self._settings
        update = self._recent_mean(UPDATE_KL, SPIKE_STEPS)
        reference = next((v for key in REFERENCE_KLS if (v := self._recent_mean(key, SPIKE_STEPS)) is not None), None)
        if update is not None and update > limits.max_update_kl:
            return Sign(
                f"a step's updates moved the policy by {number(update)} nats per token over {SPIKE_STEPS} steps, more "
                f"than {limits.max_update_kl:g}: lower rl.actor_lr or rl.ppo_epochs",
                {"update_kl": update},
            )
        if reference is None or reference <= limits.max_reference_kl:
            return None
        return Sign(
            f"the policy is {number(reference)} nats per token away from the model that it started from, more than "
            f"{limits.max_reference_kl:g}: it forgets what that one could. Read samples.jsonl; raise rl.kl.coefficient "
            "or lower rl.actor_lr",
            {"reference_kl": reference},
        )

    def _value_loss_flat(self) -> Sign | None:
        trend, limits = self._value_loss, self._settings
        if trend.windows() < VALUE_LOSS_WINDOWS:
            return None
        loss, explained = trend.change(VALUE_LOSS), self._recent_mean(EXPLAINED_VARIANCE, limits.window_steps)
        fell = loss.now < (1 - limits.min_value_loss_fall) * loss.before
        if fell or loss.now == 0 or (explained is not None and explained >= limits.min_explained_variance):
            return None
        explains = "" if explained is None else f", and the values explain {number(explained)} of the returns' variance"
        return Sign(
            f"the value loss was {number(loss.before)} in {trend.since()} and is {number(loss.now)} now{explains}: the "
            "critic does not learn, and the advantages are noise. Change rl.critic_lr, or use rl.algorithm: grpo",
            _values(value_loss=loss) | ({} if explained is None else {"explained_variance": explained}),
        )

    def _zero_variance(self) -> Sign | None:
        share = self._recent_mean(ZERO_VARIANCE, self._settings.window_steps)
        if share is None or share <= self._settings.max_zero_variance:
            return None
        return Sign(
            f"all rollouts of a prompt earned the same for {share:.0%} of the prompts over "
            f"{self._settings.window_steps} steps, more than {self._settings.max_zero_variance:.0%}: such prompts "
            "teach nothing. Stop here if the dev split is good; else raise rl.temperature or rl.rollouts_per_prompt, "
            "or train on harder questions",
            {"zero_variance": share},
        )

    def _recent_mean(self, key: str, steps: int) -> float | None:
        """Over the last steps that had it; None before there were so many."""
        values = self._recent.get(key, [])[-steps:]
        return _mean(values) if len(values) == steps else None


def read_alarms(path: Path) -> list[Alarm]:
    """The alarms of a stage over all its attempts; a half-written line is skipped."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    alarms: list[Alarm] = []
    for line in lines:
        try:
            alarms = with_alarm(alarms, Alarm.model_validate_json(line))
        except ValidationError:
            continue
    return alarms


def with_alarm(alarms: Sequence[Alarm], new: Alarm) -> list[Alarm]:
    """The alarms and a new one. One of the same name that came at the same step or later belongs to an attempt that
    was killed and resumed from before it."""
    return [old for old in alarms if old.name != new.name or old.step < new.step] + [new]


def alarms_markdown(alarms: Iterable[Alarm]) -> str:
    """All alarms of a run as a table."""
    lines = ["| Step | Alarm | Action | What was seen |", "| ---: | --- | --- | --- |"]
    lines += [f"| {alarm.step:,} | `{alarm.name}` | {alarm.action} | {alarm.message} |" for alarm in alarms]
    return "\n".join(lines) + "\n"


def _values(**changes: Change) -> dict[str, float]:
    return {f"{name}_{when}": getattr(change, when) for name, change in changes.items() for when in ("before", "now")}


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of a step, from the differences of neighbours, which a trend hardly changes."""
    squares = [(b - a) ** 2 for a, b in pairwise(values)]
    return math.sqrt(sum(squares) / len(squares) / 2)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _finite(value: object) -> float | None:
    number = float(value) if isinstance(value, Real) else math.nan
    return number if math.isfinite(number) else None
