"""Which choices hold up, by rules on the intervals, and which hacked runs the alarms would have
found."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qinglan.text import number, signed, with_interval

from .matrix import EXPERIMENTS
from .results import Difference, Result, Results, difference

MISSING = "not measured"
MIN_GOLD_FALL = 0.1
"""Of top-1 from the first to the last tenth of a training's steps, so that it is no noise: three
standard errors."""
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
    Choice(
        "The student passes its teacher, with labels in the reward",
        ("default", "rl"),
        ("default", "teacher"),
    ),
    Choice(
        "The student passes its teacher without labels",
        ("label_free", "rl"),
        ("label_free", "teacher"),
    ),
    Choice(
        "The formula without guards improves on SFT",
        ("formula_alone", "rl"),
        ("formula_alone", "sft"),
    ),
    Choice("PPO with a critic, rather than GRPO", ("default", "rl"), ("grpo", "rl")),
    Choice(
        "Asking the judge about some samples only",
        ("judge_30", "rl"),
        ("no_gate", "rl"),
        no_worse=True,
    ),
    Choice("The judge's score as a part of the reward", ("label_free", "rl"), ("no_judge", "rl")),
    Choice("The win term", ("label_free", "rl"), ("no_win", "rl")),
    Choice("A reward relative to the teacher", ("label_free", "rl"), ("absolute", "rl")),
    Choice("The relevance gate", ("label_free", "rl"), ("no_gate", "rl")),
    Choice("Guards and gate together", ("label_free", "rl"), ("no_guards", "rl")),
    Choice(
        "LoRA in RL, rather than all parameters", ("lora", "rl"), ("default", "rl"), no_worse=True
    ),
    Choice("Sampling at temperature 1, rather than cooler", ("default", "rl"), ("cool", "rl")),
    Choice("Sampling at temperature 1, rather than hotter", ("default", "rl"), ("hot", "rl")),
)


def findings(results: Results, groups: Mapping[str, str]) -> list[str]:
    """The choices with their numbers and what those say."""
    lines = [
        "| Choice | Compared | Seeds | Difference in top-1 [95%] | Reading |",
        "| --- | --- | --- | --- | --- |",
    ]
    for choice in CHOICES:
        ours, other = (results.get(experiment, {}) for experiment, _ in (choice.way, choice.other))
        found = difference(ours, choice.way[1], other, choice.other[1], groups)
        compared = f"{_named(choice.way)} − {_named(choice.other)}"
        seeds = ", ".join(map(str, found.seeds)) if found else ""
        read = reading(found, no_worse=choice.no_worse)
        lines.append(f"| {choice.text} | {compared} | {seeds} | {shown(found)} | {read} |")
    rule = (
        "By rule: a choice holds up if the whole interval of the difference lies above 0, and does not if it lies "
        "below; a cheaper way must only not be shown to be worse. An interval covers other test questions and other "
        "training seeds, as documents and seeds are both resampled; of two or three seeds it learns little, so that "
        "it is rather too narrow, and with one seed nothing is decided. The intervals are not corrected for their "
        "number."
    )
    return [rule, "\n".join(lines)]


def reading(found: Difference | None, *, no_worse: bool) -> str:
    """What an interval says about a claim."""
    if found is None or found.ci95 is None:
        return MISSING
    low, high = found.ci95
    if len(found.seeds) < 2:
        return "open: one seed only"
    if high < 0:
        return "does not hold up: it is worse"
    if low > 0:
        return "holds up"
    if no_worse:
        return f"no loss shown; one of up to {number(-low)} is not excluded"
    return "open: no difference shown"


def shown(found: Difference | None) -> str:
    """`+0.071 [0.019, 0.128]`."""
    return MISSING if found is None else with_interval(found.diff, found.ci95, signed)


def alarm_record(results: Results, groups: Mapping[str, str]) -> list[str]:
    """How often each alarm was raised in runs that were hacked and in others; rivals have none."""
    runs = [
        r
        for name, seeds in results.items()
        if EXPERIMENTS[name].trainer == "qinglan"
        for r in seeds.values()
    ]
    if not runs:
        return [f"{MISSING.capitalize()}."]
    worse = [result for result in runs if tests_worse(result, groups)]
    repaired = [result for result in runs if trained_worse(result) and result not in worse]
    others = [result for result in runs if result not in worse and result not in repaired]
    text = (
        "A run counts as hacked if its reward rose while what it stands for fell. The tested model is hacked if its "
        "top-1 on the test split is below that of the model that RL started from, the whole interval below 0: "
        f"{_listed(worse)}. Training alone was hacked if top-1 of its samples fell by {MIN_GOLD_FALL} or more from the "
        "first to the last tenth of the steps, and the choice on the dev split left a model that is not shown to be "
        f"worse: {_listed(repaired)}. Of {len(runs)} runs; alarms only warned, so that every run went to its end."
    )
    parts = (worse, repaired, others)
    counts = [Counter(name for result in part for name in _names(result)) for part in parts]
    heads = (
        f"{len(worse)} with a hacked model",
        f"{len(repaired)} hacked in training alone",
        f"{len(others)} others",
    )
    lines = [
        "| Alarm | " + " | ".join(f"of {head}" for head in heads) + " |",
        "| --- |" + " ---: |" * len(parts),
    ]
    for name in sorted({name for count in counts for name in count}):
        lines.append(f"| `{name}` | " + " | ".join(str(count[name]) for count in counts) + " |")
    any_of = [str(sum(bool(result.alarms) for result in part)) for part in parts]
    return [text, "\n".join([*lines, f"| any | {' | '.join(any_of)} |"])]


def tests_worse(result: Result, groups: Mapping[str, str]) -> bool:
    """Whether the reward rose, and the model that was chosen is worse than the one that training
    started from."""
    start = "base" if "rl.start_from=base" in result.settings else "sft"
    found = difference({0: result}, "rl", {0: result}, start, groups)
    return (
        (_change(result, "reward") or 0) > 0
        and found is not None
        and found.ci95 is not None
        and found.ci95[1] < 0
    )


def trained_worse(result: Result) -> bool:
    """Whether the reward rose while top-1 of the training's samples fell, whatever was chosen
    then."""
    return (_change(result, "reward") or 0) > 0 and (
        _change(result, "gold_top1") or 0
    ) <= -MIN_GOLD_FALL


def _change(result: Result, name: str) -> float | None:
    first, last = (result.summary.get(f"{name}_{end}") for end in ("first", "last"))
    return None if first is None or last is None else float(last - first)


def _listed(found: Sequence[Result]) -> str:
    return ", ".join(f"`{result.experiment}` seed {result.seed}" for result in found) or "none"


def _names(result: Result) -> set[str]:
    return {alarm.partition(" @ ")[0] for alarm in result.alarms}


def _named(arm: Arm) -> str:
    experiment, name = arm
    return f"`{experiment}` {name.upper() if name in ('rl', 'sft') else name}"
