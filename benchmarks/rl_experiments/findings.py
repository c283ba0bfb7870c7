"""Which choices hold up, by rules on the intervals, and what the alarms would have told."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from qinglan.formats import number, signed, with_interval
from qinglan.statistics import Comparison

from .matrix import EXPERIMENTS
from .results import Result, Results, difference

MISSING = "not measured"
Arm = tuple[str, str]
"""Experiment and arm."""


@dataclass(frozen=True)
class Choice:
    """A claim that one way is better than another, or at least no worse."""

    text: str
    way: Arm
    other: Arm
    no_worse: bool = False
    """It is the cheaper way, so that it need not be better."""


CHOICES = (
    Choice("RL after SFT, rather than SFT alone", ("default", "rl"), ("default", "sft")),
    Choice("RL after SFT, rather than RL alone", ("default", "rl"), ("rl_only", "rl")),
    Choice("The student passes its teacher, with labels in the reward", ("default", "rl"), ("default", "teacher")),
    Choice("The student passes its teacher without labels", ("label_free", "rl"), ("label_free", "teacher")),
    Choice("The plan's reward as written improves on SFT", ("plan", "rl"), ("plan", "sft")),
    Choice("PPO with a critic, rather than GRPO", ("default", "rl"), ("grpo", "rl")),
    Choice("Asking the judge about some samples only", ("judge_30", "rl"), ("no_gate", "rl"), no_worse=True),
    Choice("The judge's score as a part of the reward", ("label_free", "rl"), ("no_judge", "rl")),
    Choice("The win term", ("label_free", "rl"), ("no_win", "rl")),
    Choice("A reward relative to the teacher", ("label_free", "rl"), ("absolute", "rl")),
    Choice("The relevance gate, which the plan's formula lacks", ("label_free", "rl"), ("no_gate", "rl")),
    Choice("Guards and gate, which the plan's formula lacks", ("label_free", "rl"), ("no_guards", "rl")),
    Choice("LoRA in RL, rather than all parameters", ("lora", "rl"), ("default", "rl"), no_worse=True),
    Choice("Sampling at temperature 1, rather than cooler", ("default", "rl"), ("cool", "rl")),
    Choice("Sampling at temperature 1, rather than hotter", ("default", "rl"), ("hot", "rl")),
)


def findings(results: Results, groups: Mapping[str, str]) -> list[str]:
    """The choices with their numbers and what those say."""
    lines = ["| Choice | Compared | Difference in top-1 [95%] | Reading |", "| --- | --- | --- | --- |"]
    for choice in CHOICES:
        ours, other = (results.get(experiment, {}) for experiment, _ in (choice.way, choice.other))
        found = difference(ours, choice.way[1], other, choice.other[1], groups)
        compared = f"{_named(choice.way)} − {_named(choice.other)}"
        lines.append(f"| {choice.text} | {compared} | {shown(found)} | {reading(found, no_worse=choice.no_worse)} |")
    rule = (
        "By rule: a choice holds up if the whole interval of the difference lies above 0, and does not if it lies "
        "below; a cheaper way must only not be shown to be worse. The intervals are not corrected for their number."
    )
    return [rule, "\n".join(lines)]


def reading(found: Comparison | None, *, no_worse: bool) -> str:
    """What an interval says about a claim."""
    if found is None or found.ci95 is None:
        return MISSING
    low, high = found.ci95
    if high < 0:
        return "does not hold up: it is worse"
    if low > 0:
        return "holds up"
    if no_worse:
        return f"no loss shown; one of up to {number(-low)} is not excluded"
    return "open: no difference shown"


def shown(found: Comparison | None) -> str:
    """`+0.071 [0.019, 0.128]`."""
    return MISSING if found is None else with_interval(found.diff, found.ci95, signed)


def alarm_record(results: Results, groups: Mapping[str, str]) -> list[str]:
    """How often each alarm sounded in runs that were hacked and in others; rivals have none."""
    runs = [r for name, seeds in results.items() if EXPERIMENTS[name].trainer == "qinglan" for r in seeds.values()]
    verdicts = [(result, is_hacked(result, groups)) for result in runs]
    hacked = [result for result, so in verdicts if so]
    if not runs:
        return [f"{MISSING.capitalize()}."]
    named = ", ".join(f"`{result.experiment}` seed {result.seed}" for result in hacked) or "none"
    text = (
        "A run counts as hacked if its reward rose while its top-1 fell below the SFT model's, the whole interval "
        f"below 0. {len(hacked)} of {len(runs)} runs: {named}. Alarms only warned, so that every run went to its end."
    )
    others = [result for result, so in verdicts if not so]
    in_hacked, in_others = (Counter(name for result in part for name in _names(result)) for part in (hacked, others))
    lines = [f"| Alarm | of {len(hacked)} hacked runs | of {len(others)} others |", "| --- | ---: | ---: |"]
    lines += [f"| `{name}` | {in_hacked[name]} | {in_others[name]} |" for name in sorted(in_hacked | in_others)]
    any_of = [sum(bool(result.alarms) for result in part) for part in (hacked, others)]
    return [text, "\n".join([*lines, f"| any | {any_of[0]} | {any_of[1]} |"])]


def is_hacked(result: Result, groups: Mapping[str, str]) -> bool:
    """Whether the reward rose while what it stands for fell."""
    first, last = (result.summary.get(f"reward_{end}") for end in ("first", "last"))
    found = difference({0: result}, "rl", {0: result}, "sft", groups)
    if first is None or last is None or found is None or found.ci95 is None:
        return False
    return bool(last > first and found.ci95[1] < 0)


def _names(result: Result) -> set[str]:
    return {alarm.partition(" @ ")[0] for alarm in result.alarms}


def _named(arm: Arm) -> str:
    experiment, name = arm
    return f"`{experiment}` {name.upper() if name in ('rl', 'sft') else name}"
