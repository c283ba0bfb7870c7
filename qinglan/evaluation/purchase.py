"""Which teacher to buy in the main one's place, as reasons; judged by intervals, and no further
than they reach.

Better and worse need an interval on one side of 0 and a p-value that several comparisons don't
explain; good enough needs an interval that rules out a loss of more than `compare.tolerable_loss`.
The rest is open. A trade is shown with both its sides, for the reader.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from qinglan.config import EMBEDDED, Profile
from qinglan.evaluation.arms import Arms
from qinglan.evaluation.models import ArmFigures, Evaluation, Purchase
from qinglan.evaluation.reasons import TEXTS, Reason, listed, reason
from qinglan.evaluation.teacher_comparison import MAIN, ORIGINAL
from qinglan.recipes import Metric, get_recipe
from qinglan.statistics import FEWEST_GROUPS, Comparison, rows_needed
from qinglan.text import Both, interval, latency, signed, with_interval

Advice = Literal["take", "trade", "open", "keep"]

_ORDER: tuple[Advice, ...] = ("take", "trade", "open", "keep")
_LEVEL = 0.05
_SAME_COST = 1.05
"""Two prices within this factor are the same."""


class RivalResult(NamedTuple):
    """One rival against the main teacher."""

    rival: str
    """Its arm, which is called so in the text as well."""
    main: str
    """What the main teacher is called."""
    figures: ArmFigures
    main_figures: ArmFigures
    comparisons: Sequence[Comparison]
    """One a metric, in the order in which they decide."""
    metrics: Mapping[str, Metric]
    texts: Both
    """What a teacher is paid for: `rewrites`."""
    gains: bool
    """It is shown to do better than no teacher at all, where that can be tried."""
    tolerable: float

    def margin(self, metric: str) -> float:
        """The loss that is tolerated, on this metric's scale."""
        return self.tolerable * self.metrics[metric].maximum

    def classify(self, found: Comparison) -> Literal["better", "worse", "enough", "open"]:
        """What the interval says; a shown loss that is sure to be tolerable is good enough."""
        if found.deciding_ci95 is None:
            return "open"
        low, high = found.deciding_ci95
        if low > 0 and is_shown(found):
            return "better"
        if low >= -self.margin(found.metric):
            return "enough"
        return "worse" if high < 0 and is_shown(found) else "open"

    @property
    def worse(self) -> list[Comparison]:
        """Metrics on which it loses more than is tolerated."""
        return [found for found in self.comparisons if self.classify(found) == "worse"]

    @property
    def price(self) -> Literal["less", "more", "same"]:
        """Against the main teacher's."""
        cost, main = self.figures.cost_per_1000_usd, self.main_figures.cost_per_1000_usd
        if cost is None or main is None or cost / _SAME_COST <= main <= cost * _SAME_COST:
            return "same"
        return "less" if cost < main else "more"

    @property
    def advice(self) -> Advice:
        """Take it, weigh money against quality, ask more questions, or keep the main teacher."""
        primary = self.classify(self.comparisons[0])
        if self.worse:
            return (
                "trade" if primary == "better" or (self.price == "less" and self.gains) else "keep"
            )
        if primary == "better":
            return "trade" if self.price == "more" else "take"
        if self.price != "less":
            return "keep"
        return "take" if primary == "enough" else "open"


def gains(evaluation: Evaluation, arm: str) -> bool:
    """Whether a teacher is shown to retrieve better than the original question; true where nothing
    is retrieved."""
    against = [c for c in evaluation.comparisons if (c.a, c.b) == (arm, ORIGINAL)]
    return ORIGINAL not in evaluation.arms or any(
        c.ci95 is not None and c.ci95[0] > 0 and is_shown(c) for c in against
    )


def is_shown(found: Comparison) -> bool:
    """Whether a difference is more than chance, with all rivals counted."""
    p = found.p_value if found.p_holm is None else found.p_holm
    return p is not None and p <= _LEVEL


def advise(profile: Profile, evaluation: Evaluation, arms: Arms) -> Purchase | None:
    """The verdict; None where no question has values of two teachers."""
    rivals = profile.compare.teachers
    main = profile.teacher.model.rpartition("/")[2]
    labels = {
        MAIN: main if main not in rivals else "the teacher",
        **{name: name for name in rivals},
    }
    terms = TEXTS[
        "terms_of_retrieval" if get_recipe(profile.recipe).grader.retrieves else "terms_of_answers"
    ]
    offers = []
    for arm in rivals:
        mine = {
            c.metric: c
            for c in evaluation.comparisons
            if (c.a, c.b) == (arm, MAIN) and c.diff is not None
        }
        if mine:
            result = RivalResult(
                rival=arm,
                main=labels[MAIN],
                figures=evaluation.arms[arm],
                main_figures=evaluation.arms[MAIN],
                comparisons=[mine[each.name] for each in evaluation.metrics if each.name in mine],
                metrics={metric.name: metric for metric in evaluation.metrics},
                texts=terms["texts"],
                gains=gains(evaluation, arm),
                tolerable=profile.compare.tolerable_loss,
            )
            offers.append(result)
    if not offers:
        return None
    # Among those that may be taken the cheapest leads, else the order of the profile.
    cost = {
        o.rival: o.figures.cost_per_1000_usd or 0.0 if o.advice == "take" else 0.0 for o in offers
    }
    first = min(offers, key=lambda result: (_ORDER.index(result.advice), cost[result.rival]))
    primary = first.comparisons[0]
    difference = _difference(first, primary)
    return Purchase(
        labels=labels,
        rival=first.rival,
        tone="better" if first.advice == "take" else "open",
        sentence=reason(
            "purchase",
            rival=first.rival,
            cost=_cost(first),
            difference=difference,
            questions=primary.n,
        ),
        reading=_advice(first),
        offers=[_offered(result, with_advice=result is not first) for result in offers],
        notes=_notes(profile, labels, evaluation, arms),
        simulated=[arm for arm, endpoint in rivals.items() if endpoint.base_url == EMBEDDED],
    )


def family(model: str) -> str:
    """Who made a model, as far as its name says: `openai`, `qwen`, `deepseek`."""
    name = model.rpartition("/")[2].lower()
    if re.match(r"gpt|chatgpt|o\d", name):
        return "openai"
    found = re.match(r"[^\W\d_]+", name)
    return found.group() if found else name


def _advice(result: RivalResult) -> Reason:
    found = result.comparisons[0]
    metric, names = result.metrics[found.metric].words, {"rival": result.rival, "main": result.main}
    margin, advice = result.margin(found.metric), result.advice
    if advice == "take" and result.classify(found) == "better":
        return reason("take_better", metric=metric, **names)
    if advice == "take":
        is_loss = found.ci95 is not None and found.ci95[1] < 0 and is_shown(found)
        return reason(
            "take_small_loss" if is_loss else "take_within_noise",
            metric=metric,
            margin=margin,
            rival=result.rival,
        )
    if advice == "trade":
        return reason("trade", parts=_gains_and_losses(result), **names)
    if advice == "open":
        risk, wide = reason("few_groups", groups=found.groups, needed=FEWEST_GROUPS), False
        if found.deciding_ci95:
            risk = reason("loss_not_ruled_out", loss=-found.deciding_ci95[0], metric=metric)
            wide = (found.detectable_diff or 0.0) > margin > 0
        if not wide:
            return reason("purchase_open", risk=risk, margin=margin, main=result.main)
        rows = rows_needed(found.n, found.detectable_diff, margin)
        return reason("purchase_open_rows", risk=risk, margin=margin, main=result.main, rows=rows)
    if result.worse and result.price == "less":
        return reason("keep_not_better_than_question", **names)
    price = reason("costs_more") if result.price == "more" else reason("costs_no_less")
    if result.worse:
        return reason(
            "keep_worse",
            metrics=listed([result.metrics[c.metric].words for c in result.worse]),
            price=price,
            **names,
        )
    return reason("keep_no_gain", metric=metric, price=price, **names)


def _gains_and_losses(result: RivalResult) -> list[Reason]:
    saved = (result.main_figures.cost_per_1000_usd or 0.0) - (
        result.figures.cost_per_1000_usd or 0.0
    )
    better = [found for found in result.comparisons if result.classify(found) == "better"]
    won, lost = (
        [
            reason("amount", size=abs(found.diff or 0.0), metric=result.metrics[found.metric].words)
            for found in side
        ]
        for side in (better, result.worse)
    )
    sides = [reason("save", amount=saved, texts=result.texts)] if result.price == "less" else []
    sides += [reason("gain", amounts=won)] if won else []
    sides += [reason("lose", amounts=lost)] if lost else []
    sides += [reason("pay", amount=-saved, texts=result.texts)] if result.price == "more" else []
    return sides


def _offered(result: RivalResult, *, with_advice: bool) -> Reason:
    found = [_difference(result, each) for each in result.comparisons]
    speed, main_speed = result.figures.latency_p50_ms, result.main_figures.latency_p50_ms
    if speed is not None and main_speed is not None:
        found.append(reason("median_against", ms=latency(speed), main_ms=latency(main_speed)))
    return reason(
        "offer",
        rival=result.rival,
        main=result.main,
        cost=_cost(result),
        differences=found,
        advice=_advice(result) if with_advice else None,
    )


def _difference(result: RivalResult, found: Comparison) -> Reason:
    metric = result.metrics[found.metric].words
    if found.diff is None or found.ci95 is None:
        return reason("metric_without_interval", metric=metric, difference=signed(found.diff))
    if found.ci95[0] <= 0 <= found.ci95[1]:
        detectable = (
            reason("could_be_detected", difference=found.detectable_diff)
            if found.detectable_diff
            else None
        )
        difference = with_interval(found.diff, found.ci95, signed)
        return reason(
            "no_difference_in", metric=metric, difference=difference, detectable=detectable
        )
    higher, size, ends = found.diff > 0, abs(found.diff), interval(found.ci95)
    return reason(
        "metric_higher" if higher else "metric_lower", metric=metric, size=size, ends=ends
    )


def _cost(result: RivalResult) -> Reason:
    cost, main = result.figures.cost_per_1000_usd, result.main_figures.cost_per_1000_usd
    if cost is None or main is None:
        return reason("cost_not_known")
    both: dict[str, str | float | Both] = {
        "main": result.main,
        "own": cost,
        "theirs": main,
        "texts": result.texts,
    }
    if result.price == "same":
        return reason("cost_same", **both)
    factor = None
    if cost and main:
        times = max(main / cost, cost / main)
        factor = reason("times_large" if times >= 10 else "times", times=times)
    return reason("cost_less" if result.price == "less" else "cost_more", factor=factor, **both)


def _notes(
    profile: Profile, labels: Mapping[str, str], evaluation: Evaluation, arms: Arms
) -> list[Reason]:
    teachers = {MAIN: profile.teacher, **profile.compare.teachers}
    notes = [
        reason("label_of_model", label=labels[arm], model=endpoint.model)
        for arm, endpoint in teachers.items()
        if labels[arm] != endpoint.model
    ]
    notes += [
        reason("no_gain_over_question", label=labels[arm])
        for arm in labels
        if not gains(evaluation, arm)
    ]
    judge = profile.judge.model
    if kin := [
        labels[arm] for arm, each in teachers.items() if family(each.model) == family(judge)
    ]:
        if len(kin) == len(teachers):
            notes.append(reason("judge_of_same_family_as_all", judge=judge))
        else:
            notes.append(
                reason(
                    "judge_of_same_family", judge=judge, teachers=listed([Both(n, n) for n in kin])
                )
            )
    for arm in teachers:
        entries = arms[arm]
        if silent := Counter(
            entry.reason or "no answer" for entry in entries if entry.text is None
        ):
            reasons = [
                reason("rows_with_reason", reason=why, rows=rows)
                for why, rows in silent.most_common()
            ]
            share = sum(silent.values()) / len(entries)
            notes.append(
                reason("left_without_answer", label=labels[arm], share=share, reasons=reasons)
            )
        if cheap := sum(entry.text is not None and entry.latency_ms is None for entry in entries):
            notes.append(reason("answers_by_batch_api", rows=cheap, label=labels[arm]))
    return [*notes, reason("latency_of_the_call")]
