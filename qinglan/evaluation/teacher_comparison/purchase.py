"""Which teacher to buy, in words; `offer` decides. A trade is shown with both its sides, for the reader."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from qinglan.config import EMBEDDED, Profile
from qinglan.evaluation import ArmRow, Evaluation
from qinglan.evaluation.models import Purchase, Tone
from qinglan.evaluation.teacher_comparison import MAIN
from qinglan.evaluation.teacher_comparison.offer import Advice, Offer, gains
from qinglan.evaluation.words import TERMS
from qinglan.recipes import get_recipe
from qinglan.statistics import Comparison
from qinglan.text import count, interval, latency, number, signed, usd, with_interval

_ORDER: tuple[Advice, ...] = ("take", "trade", "open", "keep")
_TONES: dict[Advice, Tone] = {"take": "better", "trade": "open", "open": "open", "keep": "open"}


def advise(profile: Profile, evaluation: Evaluation, arms: Mapping[str, Sequence[ArmRow]]) -> Purchase | None:
    """The verdict; None where no question has values of two teachers."""
    labels, texts = _labels(profile), TERMS[get_recipe(profile.recipe).retrieves].texts.en
    metrics = {metric.name: metric for metric in evaluation.metrics}
    offers = [
        Offer(
            arm=arm,
            rival=labels[arm],
            main=labels[MAIN],
            figures=evaluation.arms[arm],
            main_figures=evaluation.arms[MAIN],
            comparisons=found,
            metrics=metrics,
            texts=texts,
            gains=gains(evaluation, arm),
            tolerable=profile.compare.tolerable_loss,
        )
        for arm in profile.compare.teachers
        if (found := _of(evaluation, arm))
    ]
    if not offers:
        return None
    # Among those that may be taken the cheapest leads, else the order of the profile.
    cost = {o.arm: o.figures.cost_per_1000_usd or 0.0 if o.advice == "take" else 0.0 for o in offers}
    first = min(offers, key=lambda offer: (_ORDER.index(offer.advice), cost[offer.arm]))
    return Purchase(
        labels=labels,
        rival=first.arm,
        tone=_TONES[first.advice],
        sentence=_sentence(first),
        reading=_reading(first),
        offers=[_paragraph(offer, advice=offer is not first) for offer in offers],
        notes=_notes(profile, labels, evaluation, arms),
        simulated=[arm for arm, endpoint in profile.compare.teachers.items() if endpoint.base_url == EMBEDDED],
    )


def family(model: str) -> str:
    """Who made a model, as far as its name tells: `openai`, `qwen`, `deepseek`."""
    name = model.rpartition("/")[2].lower()
    if re.match(r"gpt|chatgpt|o\d", name):
        return "openai"
    found = re.match(r"[^\W\d_]+", name)
    return found.group() if found else name


def _labels(profile: Profile) -> dict[str, str]:
    rivals = list(profile.compare.teachers)
    main = profile.teacher.model.rpartition("/")[2]
    return {MAIN: main if main not in rivals else "the teacher", **{name: name for name in rivals}}


def _of(evaluation: Evaluation, arm: str) -> dict[str, Comparison]:
    mine = {c.metric: c for c in evaluation.comparisons if (c.a, c.b) == (arm, MAIN) and c.diff is not None}
    return {metric.name: mine[metric.name] for metric in evaluation.metrics if metric.name in mine}


def _sentence(offer: Offer) -> str:
    found = offer.primary
    return f"{offer.rival} costs {_cost(offer)}; {_difference(offer, found, first=True)} on {count(found.n)} questions"


def _reading(offer: Offer) -> str:
    """What to do about it."""
    found, rival, main = offer.primary, offer.rival, offer.main
    metric, margin = offer.name(found), offer.margin(found.metric)
    match offer.advice:
        case "take" if offer.standing(found) == "better":
            return f"Take {rival}: its {metric} is better, and it costs no more than {main}."
        case "take":
            noise = "Within noise" if _includes_zero(found) else "The loss is real and small"
            return (
                f"{noise}: a loss of more than {number(margin)} {metric} (compare.tolerable_loss) is ruled out. "
                f"Take the cheaper one, {rival}."
            )
        case "trade":
            return _trade(offer)
        case "open":
            return _undecided(offer)
    if offer.worse and offer.price == "less":
        return f"Keep {main}: {rival} is cheaper, but not shown to retrieve better than the question as it was typed."
    if offer.worse:
        lost = _listed([offer.name(c) for c in offer.worse])
        return f"Keep {main}: {rival} is worse in {lost} and costs {_no_less(offer)}."
    return f"Keep {main}: no gain in {metric} is shown, and {rival} costs {_no_less(offer)}."


def _trade(offer: Offer) -> str:
    saved = (offer.main_figures.cost_per_1000_usd or 0.0) - (offer.figures.cost_per_1000_usd or 0.0)
    won = [c for c in offer.comparisons.values() if offer.standing(c) == "better"]
    parts = [f"save {usd(saved)} per 1,000 {offer.texts}"] if offer.price == "less" else []
    parts += [f"gain {_listed([_amount(offer, c) for c in won])}"] if won else []
    parts += [f"lose {_listed([_amount(offer, c) for c in offer.worse])}"] if offer.worse else []
    parts += [f"pay {usd(-saved)} more per 1,000 {offer.texts}"] if offer.price == "more" else []
    return f"A trade: with {offer.rival} you {_listed(parts)}. Keep {offer.main} unless that is worth it to you."


def _amount(offer: Offer, found: Comparison) -> str:
    return f"{number(abs(found.diff or 0.0))} in {offer.name(found)}"


def _undecided(offer: Offer) -> str:
    found = offer.primary
    margin, metric = offer.margin(found.metric), offer.name(found)
    low = found.ci95[0] if found.ci95 else None
    risk = "no interval can be given" if low is None else f"a loss of up to {number(-low)} {metric} is not ruled out"
    text = f"Open: {risk}, and compare.tolerable_loss allows {number(margin)}. Keep {offer.main} until it is settled"
    if found.detectable_diff and found.detectable_diff > margin > 0:
        needed = found.n * (found.detectable_diff / margin) ** 2
        return (
            f"{text}; about {count(_rounded_up(needed))} questions (compare.rows) would tell a difference of that size."
        )
    return f"{text} by more questions (compare.rows)."


def _paragraph(offer: Offer, *, advice: bool) -> str:
    """All that is known of a rival, on one line."""
    differences = [_difference(offer, found) for found in offer.comparisons.values()]
    speed, main_speed = offer.figures.latency_p50_ms, offer.main_figures.latency_p50_ms
    if speed is not None and main_speed is not None:
        differences.append(f"median latency {latency(speed)} ms against {latency(main_speed)} ms")
    text = f"{offer.rival} costs {_cost(offer)}. Against {offer.main}: {'; '.join(differences)}."
    return f"{text} {_reading(offer)}" if advice else text


def _difference(offer: Offer, found: Comparison, *, first: bool = False) -> str:
    """In words; `first` where it stands behind what the rival costs."""
    metric = offer.name(found)
    if found.diff is None or found.ci95 is None:
        return f"{metric} {signed(found.diff)}, without an interval"
    if _includes_zero(found):
        detects = f", where {number(found.detectable_diff)} could be detected" if found.detectable_diff else ""
        return f"no difference in {metric} is shown: {with_interval(found.diff, found.ci95, signed)}{detects}"
    size = number(abs(found.diff))
    way = "higher" if found.diff > 0 else "lower"
    return f"{'its ' if first else ''}{metric} is {size} {way} {interval(found.ci95)}"


def _cost(offer: Offer) -> str:
    cost, main = offer.figures.cost_per_1000_usd, offer.main_figures.cost_per_1000_usd
    if cost is None or main is None:
        return "an unknown amount"
    both = f"({usd(cost)} against {usd(main)} per 1,000 {offer.texts})"
    if offer.price == "same":
        return f"as much as {offer.main} {both}"
    if not cost or not main:
        return f"{offer.price} than {offer.main} {both}"
    factor = main / cost if offer.price == "less" else cost / main
    return f"{number(factor, 0 if factor >= 10 else 1)}× {offer.price} than {offer.main} {both}"


def _notes(
    profile: Profile, labels: Mapping[str, str], evaluation: Evaluation, arms: Mapping[str, Sequence[ArmRow]]
) -> list[str]:
    teachers = {MAIN: profile.teacher, **profile.compare.teachers}
    notes = [
        f"{labels[arm]} is {endpoint.model}." for arm, endpoint in teachers.items() if labels[arm] != endpoint.model
    ]
    notes += [
        f"{label} is not shown to retrieve better than the question as it was typed."
        for arm, label in labels.items()
        if not gains(evaluation, arm)
    ]
    if kin := [labels[arm] for arm, each in teachers.items() if family(each.model) == family(profile.judge.model)]:
        all_alike = len(kin) == len(teachers)
        favoured = "all of them and may be too kind" if all_alike else f"{_listed(kin)} and may favour it"
        notes.append(
            f"The judge, {profile.judge.model}, is of the same family as {favoured}. It does not see who wrote a "
            "text; let a judge of another family confirm what rests on its score."
        )
    for arm in teachers:
        entries = arms[arm]
        if silent := Counter(entry.reason or "no answer" for entry in entries if entry.text is None):
            reasons = ", ".join(f"{reason} {count(n)}" for reason, n in silent.most_common())
            share = sum(silent.values()) / len(entries)
            notes.append(
                f"{labels[arm]} left {share:.1%} of the questions without an answer ({reasons}). They are "
                "not in the means, and their cost is in the cost of the others."
            )
        if cheap := sum(entry.text is not None and entry.latency_ms is None for entry in entries):
            notes.append(f"{count(cheap)} of {labels[arm]}'s answers came by the batch API, at its lower price.")
    notes.append(
        "Latency is that of the call which brought the answer, under the load it met; answers that the ledger had from "
        "earlier runs keep theirs. Under Calls and cost, the teacher is all teachers together."
    )
    return notes


def _includes_zero(found: Comparison) -> bool:
    return found.ci95 is None or found.ci95[0] <= 0 <= found.ci95[1]


def _no_less(offer: Offer) -> str:
    return "more" if offer.price == "more" else "no less"


def _listed(words: Sequence[str]) -> str:
    *others, last = words or ["nothing"]
    return f"{', '.join(others)} and {last}" if others else last


def _rounded_up(value: float) -> int:
    step = 10.0 ** max(0, math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / step) * step)
