"""Choices that hold up, by rules on the intervals, and the alarms that hacked runs raised."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from qinglan.text import number, signed, with_interval

from .matrix import EXPERIMENTS
from .results import Difference, Result, Results, difference

MISSING = "not measured"
MIN_GOLD_FALL = 0.1
"""Fall of top-1 from the first to the last tenth of a training's steps that is no noise: three
standard errors."""
Arm = tuple[str, str]
"""Experiment and arm."""


@dataclass(frozen=True)
class Choice:
    """A claim that one way is better than another, or at least no worse."""

    text: str
    way: Arm
    rival: Arm
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
    """The choices with their numbers and how these are read."""
    lines = [
        "| Choice | Compared | Seeds | Difference in top-1 [95%] | Reading |",
        "| --- | --- | --- | --- | --- |",
    ]
    for choice in CHOICES:
        experiment, arm = choice.way
        rival_experiment, rival_arm = choice.rival
        ours = results.get(experiment, {})
        rivals = results.get(rival_experiment, {})
        diff = difference(ours, arm, rivals, rival_arm, groups)
        cells = (
            choice.text,
            f"{_title(choice.way)} − {_title(choice.rival)}",
            ", ".join(map(str, diff.seeds)) if diff else "",
            shown(diff),
            reading(diff, no_worse=choice.no_worse),
        )
        lines.append(f"| {' | '.join(cells)} |")
    rule = (
        "By rule: a choice holds up if the whole interval of the difference lies above 0, and does "
        "not if it lies below; a cheaper way must only not be shown to be worse. An interval "
        "covers other test questions and other training seeds, as documents and seeds are both "
        "resampled; of two or three seeds it learns little, so that it is rather too narrow, and "
        "with one seed nothing is decided. The intervals are not corrected for their number."
    )
    return [rule, "\n".join(lines)]


def reading(diff: Difference | None, *, no_worse: bool) -> str:
    """The verdict on a claim, by the interval of the difference."""
    if diff is None or diff.ci95 is None:
        return MISSING
    low, high = diff.ci95
    # Its interval knows nothing of another training with the same settings.
    if len(diff.seeds) < 2:
        return "open: one seed only"
    if high < 0:
        return "does not hold up: it is worse"
    if low > 0:
        return "holds up"
    if no_worse:
        return f"no loss shown; one of up to {number(-low)} is not excluded"
    return "open: no difference shown"


def shown(diff: Difference | None) -> str:
    """`+0.071 [0.019, 0.128]`."""
    return MISSING if diff is None else with_interval(diff.diff, diff.ci95, signed)


def alarm_record(results: Results, groups: Mapping[str, str]) -> list[str]:
    """The number of runs with each alarm, hacked ones and others; rivals have no alarms."""
    runs: list[Result] = []
    for name, seeds in results.items():
        if EXPERIMENTS[name].trainer == "qinglan":
            runs.extend(seeds.values())
    if not runs:
        return [f"{MISSING.capitalize()}."]
    worse: list[Result] = []
    repaired: list[Result] = []
    healthy: list[Result] = []
    for result in runs:
        if tests_worse(result, groups):
            worse.append(result)
        elif trained_worse(result):
            repaired.append(result)
        else:
            healthy.append(result)
    text = (
        "A run counts as hacked if its reward rose while what it stands for fell. The tested model "
        "is hacked if its top-1 on the test split is below that of the model that RL started from, "
        f"the whole interval below 0: {_listed(worse)}. Training alone was hacked if top-1 of its "
        f"samples fell by {MIN_GOLD_FALL} or more from the first to the last tenth of the steps, "
        "and the choice on the dev split left a model that is not shown to be worse: "
        f"{_listed(repaired)}. Of {len(runs)} runs; alarms only warned, so that every run went to "
        "its end."
    )
    columns = {
        f"of {len(worse)} with a hacked model": worse,
        f"of {len(repaired)} hacked in training alone": repaired,
        f"of {len(healthy)} others": healthy,
    }
    return [text, "\n".join(_alarm_table(columns))]


def _alarm_table(columns: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Markdown: in how many runs of each column an alarm was raised, an alarm a line."""
    counts = [Counter(chain.from_iterable(map(_alarm_names, runs))) for runs in columns.values()]
    yield f"| Alarm | {' | '.join(columns)} |"
    yield "| --- |" + " ---: |" * len(columns)
    for name in sorted(set().union(*counts)):
        yield f"| `{name}` | {' | '.join(str(count[name]) for count in counts)} |"
    with_alarm = [sum(bool(result.alarms) for result in runs) for runs in columns.values()]
    yield f"| any | {' | '.join(map(str, with_alarm))} |"


def tests_worse(result: Result, groups: Mapping[str, str]) -> bool:
    """Did the reward rise, and is the chosen model worse than the one that training began with?"""
    start = "base" if "rl.start_from=base" in result.settings else "sft"
    diff = difference({0: result}, "rl", {0: result}, start, groups)
    if not _reward_rose(result) or diff is None or diff.ci95 is None:
        return False
    return diff.ci95[1] < 0


def trained_worse(result: Result) -> bool:
    """Did the reward rise while top-1 of the training's samples fell, whatever was chosen then?"""
    return _reward_rose(result) and (_change(result, "gold_top1") or 0) <= -MIN_GOLD_FALL


def _reward_rose(result: Result) -> bool:
    return (_change(result, "reward") or 0) > 0


def _change(result: Result, name: str) -> float | None:
    """Last minus first value of a figure of the training."""
    first = result.summary.get(f"{name}_first")
    last = result.summary.get(f"{name}_last")
    return None if first is None or last is None else float(last - first)


def _listed(runs: Sequence[Result]) -> str:
    return ", ".join(f"`{result.experiment}` seed {result.seed}" for result in runs) or "none"


def _alarm_names(result: Result) -> set[str]:
    return {alarm.partition(" @ ")[0] for alarm in result.alarms}


def _title(arm: Arm) -> str:
    experiment, name = arm
    return f"`{experiment}` {name.upper() if name in ('rl', 'sft') else name}"
