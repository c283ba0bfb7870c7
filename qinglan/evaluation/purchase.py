"""The advice which teacher to buy in the main one's place, as reasons.

The verdict is by intervals, and goes no further than they reach. Better and worse need an interval
on one side of 0 and a p-value that several comparisons don't explain; good enough needs an interval
that rules out a loss of more than `compare.tolerable_loss`. The rest is open. A trade is shown with
both its sides, for the reader.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from qinglan.config import EMBEDDED, Profile
from qinglan.evaluation.arms import ORIGINAL, TEACHER, Arms
from qinglan.evaluation.models import ArmFigures, Evaluation, Purchase
from qinglan.evaluation.reasons import TEXTS, Reason, listed, reason
from qinglan.recipes import Metric, get_recipe
from qinglan.rows import ArmName, ArmRow
from qinglan.statistics import FEWEST_GROUPS, Comparison, rows_needed
from qinglan.text import Both, interval, latency, signed, with_interval

Advice = Literal["take", "trade", "open", "keep"]
"""Take it, weigh money against quality, ask more questions, or keep the main teacher."""

_ORDER: tuple[Advice, ...] = ("take", "trade", "open", "keep")
_LEVEL = 0.05
_SAME_COST = 1.05
"""Two prices within this factor are the same."""


class RivalResult(NamedTuple):
    """One rival against the main teacher."""

    rival: ArmName
    """The rival's arm, which is called so in the text as well."""
    main: str
    """The main teacher's name in the text."""
    figures: ArmFigures
    main_figures: ArmFigures
    comparisons: Sequence[Comparison]
    """One a metric, in the order in which they decide."""
    metrics: Mapping[str, Metric]
    texts: Both
    """The word for what a teacher is paid for, such as `rewrites`."""
    gains: bool
    """True where the rival is shown to do better than no teacher at all, or that can't be tried."""
    tolerable: float

    def margin(self, metric: str) -> float:
        """The loss that is tolerated, on this metric's scale."""
        return self.tolerable * self.metrics[metric].maximum

    def classify(self, comparison: Comparison) -> Literal["better", "worse", "enough", "open"]:
        """The verdict on one metric, by its interval.

        A shown loss that is sure to be tolerable is good enough.
        """
        if comparison.deciding_ci95 is None:
            return "open"
        low, high = comparison.deciding_ci95
        if low > 0 and is_shown(comparison):
            return "better"
        if low >= -self.margin(comparison.metric):
            return "enough"
        if high < 0 and is_shown(comparison):
            return "worse"
        return "open"

    @property
    def better(self) -> list[Comparison]:
        """Comparisons on the metrics on which the rival gains."""
        return self._classified("better")

    @property
    def worse(self) -> list[Comparison]:
        """Comparisons on the metrics on which the rival loses more than is tolerated."""
        return self._classified("worse")

    def _classified(self, verdict: Literal["better", "worse"]) -> list[Comparison]:
        return [
            comparison for comparison in self.comparisons if self.classify(comparison) == verdict
        ]

    @property
    def price(self) -> Literal["less", "more", "same"]:
        """The rival's price against the main teacher's."""
        own_usd = self.figures.cost_per_1000_usd
        main_usd = self.main_figures.cost_per_1000_usd
        # An unknown price speaks for neither.
        if own_usd is None or main_usd is None:
            return "same"
        if own_usd / _SAME_COST <= main_usd <= own_usd * _SAME_COST:
            return "same"
        if own_usd < main_usd:
            return "less"
        return "more"

    @property
    def advice(self) -> Advice:
        primary = self.classify(self.comparisons[0])
        is_cheaper = self.price == "less"
        if self.worse:
            # A lower price is no reason for a teacher that is no better than none.
            if primary == "better" or (is_cheaper and self.gains):
                return "trade"
            return "keep"
        if primary == "better":
            if self.price == "more":
                return "trade"
            return "take"
        if not is_cheaper:
            return "keep"
        if primary == "enough":
            return "take"
        return "open"


def gains(evaluation: Evaluation, arm: ArmName) -> bool:
    """Tell whether a teacher is shown to retrieve better than the original question.

    It is true where nothing is retrieved.
    """
    if ORIGINAL not in evaluation.arms:
        return True
    for comparison in evaluation.comparisons:
        if (comparison.a, comparison.b) == (arm, ORIGINAL) and comparison.ci95:
            low, _ = comparison.ci95
            if low > 0 and is_shown(comparison):
                return True
    return False


def is_shown(comparison: Comparison) -> bool:
    """Tell whether a difference is more than chance, with all rivals counted."""
    p_value = comparison.corrected_p
    return p_value is not None and p_value <= _LEVEL


def advise(profile: Profile, evaluation: Evaluation, arms: Arms) -> Purchase | None:
    """The verdict; None where no question has values of two teachers."""
    rivals = profile.compare.teachers
    labels = _labels(profile)
    results = _rival_results(profile, evaluation, labels[TEACHER])
    if not results:
        return None

    def order(result: RivalResult) -> tuple[int, float]:
        # Among those that may be taken the cheapest leads, otherwise the order of the profile.
        cost = result.figures.cost_per_1000_usd if result.advice == "take" else None
        return _ORDER.index(result.advice), cost or 0.0

    first = min(results, key=order)
    primary = first.comparisons[0]
    sentence = reason(
        "purchase",
        rival=first.rival,
        cost=_cost(first),
        difference=_difference(first, primary),
        questions=primary.n,
    )
    return Purchase(
        labels=labels,
        rival=first.rival,
        tone="better" if first.advice == "take" else "open",
        sentence=sentence,
        reading=_advice(first),
        offers=[_offer(result, with_advice=result is not first) for result in results],
        notes=_notes(profile, labels, evaluation, arms),
        simulated=[arm for arm, endpoint in rivals.items() if endpoint.base_url == EMBEDDED],
    )


def _labels(profile: Profile) -> dict[ArmName, str]:
    """The teachers' names in the report; a rival's is its arm's."""
    rivals = profile.compare.teachers
    main = profile.teacher.model.rpartition("/")[2]
    # A rival's arm may be named as the main teacher's model.
    labels = {TEACHER: main if main not in rivals else "the teacher"}
    for name in rivals:
        labels[name] = name
    return labels


def _rival_results(profile: Profile, evaluation: Evaluation, main: str) -> list[RivalResult]:
    """The rivals that share values with the main teacher, in the order of the profile."""
    # A teacher is paid for rewrites, or for answers.
    terms = TEXTS[get_recipe(profile.recipe).grader.wording.report_terms]
    results = []
    for arm in profile.compare.teachers:
        by_metric = {}
        for comparison in evaluation.comparisons:
            if (comparison.a, comparison.b) == (arm, TEACHER) and comparison.diff is not None:
                by_metric[comparison.metric] = comparison
        if not by_metric:
            continue
        result = RivalResult(
            rival=arm,
            main=main,
            figures=evaluation.arms[arm],
            main_figures=evaluation.arms[TEACHER],
            comparisons=[
                by_metric[metric.name] for metric in evaluation.metrics if metric.name in by_metric
            ],
            metrics={metric.name: metric for metric in evaluation.metrics},
            texts=terms["texts"],
            gains=gains(evaluation, arm),
            tolerable=profile.compare.tolerable_loss,
        )
        results.append(result)
    return results


def family(model: str) -> str:
    """The maker of a model, as far as its name says: `openai`, `qwen`, `deepseek`."""
    name = model.rpartition("/")[2].lower()
    if re.match(r"gpt|chatgpt|o\d", name):
        return "openai"
    first_word = re.match(r"[^\W\d_]+", name)
    return first_word.group() if first_word else name


def _advice(result: RivalResult) -> Reason:
    primary = result.comparisons[0]
    metric = result.metrics[primary.metric].words
    if result.advice == "take":
        return _advice_to_take(result, primary, metric)
    if result.advice == "trade":
        parts = _gains_and_losses(result)
        return reason("trade", parts=parts, rival=result.rival, main=result.main)
    if result.advice == "open":
        return _advice_to_ask_more(result, primary, metric)
    return _advice_to_keep(result, metric)


def _advice_to_take(result: RivalResult, primary: Comparison, metric: Both) -> Reason:
    if result.classify(primary) == "better":
        return reason("take_better", metric=metric, rival=result.rival, main=result.main)
    is_loss = primary.ci95 is not None and primary.ci95[1] < 0 and is_shown(primary)
    margin = result.margin(primary.metric)
    if is_loss:
        return reason("take_small_loss", metric=metric, margin=margin, rival=result.rival)
    return reason("take_within_noise", metric=metric, margin=margin, rival=result.rival)


def _advice_to_ask_more(result: RivalResult, primary: Comparison, metric: Both) -> Reason:
    margin = result.margin(primary.metric)
    if primary.deciding_ci95 is None:
        risk = reason("few_groups", groups=primary.groups, needed=FEWEST_GROUPS)
        return reason("purchase_open", risk=risk, margin=margin, main=result.main)
    risk = reason("loss_not_ruled_out", loss=-primary.deciding_ci95[0], metric=metric)
    is_wide = (primary.detectable_diff or 0.0) > margin > 0
    if not is_wide:
        return reason("purchase_open", risk=risk, margin=margin, main=result.main)
    rows = rows_needed(primary.n, primary.detectable_diff, margin)
    return reason("purchase_open_rows", risk=risk, margin=margin, main=result.main, rows=rows)


def _advice_to_keep(result: RivalResult, metric: Both) -> Reason:
    if result.worse and result.price == "less":
        return reason("keep_not_better_than_question", rival=result.rival, main=result.main)
    price = reason("costs_more") if result.price == "more" else reason("costs_no_less")
    if result.worse:
        metrics = listed([result.metrics[loss.metric].words for loss in result.worse])
        return reason(
            "keep_worse", metrics=metrics, price=price, rival=result.rival, main=result.main
        )
    return reason("keep_no_gain", metric=metric, price=price, rival=result.rival, main=result.main)


def _gains_and_losses(result: RivalResult) -> list[Reason]:
    """The sides of a trade: money saved, quality gained, quality lost, money paid."""
    own_usd = result.figures.cost_per_1000_usd or 0.0
    main_usd = result.main_figures.cost_per_1000_usd or 0.0
    gained = _amounts(result, result.better)
    lost = _amounts(result, result.worse)
    sides = []
    if result.price == "less":
        sides.append(reason("save", amount=main_usd - own_usd, texts=result.texts))
    if gained:
        sides.append(reason("gain", amounts=gained))
    if lost:
        sides.append(reason("lose", amounts=lost))
    if result.price == "more":
        sides.append(reason("pay", amount=own_usd - main_usd, texts=result.texts))
    return sides


def _amounts(result: RivalResult, comparisons: Sequence[Comparison]) -> list[Reason]:
    amounts = []
    for comparison in comparisons:
        metric = result.metrics[comparison.metric].words
        amounts.append(reason("amount", size=abs(comparison.diff or 0.0), metric=metric))
    return amounts


def _offer(result: RivalResult, *, with_advice: bool) -> Reason:
    """A rival in a paragraph."""
    differences = [_difference(result, comparison) for comparison in result.comparisons]
    own_ms = result.figures.latency_p50_ms
    main_ms = result.main_figures.latency_p50_ms
    if own_ms is not None and main_ms is not None:
        median = reason("median_against", ms=latency(own_ms), main_ms=latency(main_ms))
        differences.append(median)
    return reason(
        "offer",
        rival=result.rival,
        main=result.main,
        cost=_cost(result),
        differences=differences,
        # The leading rival's advice is the verdict's reading.
        advice=_advice(result) if with_advice else None,
    )


def _difference(result: RivalResult, comparison: Comparison) -> Reason:
    metric = result.metrics[comparison.metric].words
    if comparison.diff is None or comparison.ci95 is None:
        difference = signed(comparison.diff)
        return reason("metric_without_interval", metric=metric, difference=difference)
    low, high = comparison.ci95
    if low <= 0 <= high:
        detectable = None
        if comparison.detectable_diff:
            detectable = reason("could_be_detected", difference=comparison.detectable_diff)
        difference = with_interval(comparison.diff, comparison.ci95, signed)
        return reason(
            "no_difference_in", metric=metric, difference=difference, detectable=detectable
        )
    # The sentence says higher or lower, so the size has no sign.
    size = abs(comparison.diff)
    ends = interval(comparison.ci95)
    if comparison.diff > 0:
        return reason("metric_higher", metric=metric, size=size, ends=ends)
    return reason("metric_lower", metric=metric, size=size, ends=ends)


def _cost(result: RivalResult) -> Reason:
    own_usd = result.figures.cost_per_1000_usd
    main_usd = result.main_figures.cost_per_1000_usd
    if own_usd is None or main_usd is None:
        return reason("cost_not_known")
    prices: dict[str, str | float | Both] = {
        "main": result.main,
        "own": own_usd,
        "theirs": main_usd,
        "texts": result.texts,
    }
    if result.price == "same":
        return reason("cost_same", **prices)
    factor = None
    # A price of 0 has no multiple.
    if own_usd and main_usd:
        times = max(main_usd / own_usd, own_usd / main_usd)
        factor = reason("times_large" if times >= 10 else "times", times=times)
    return reason("cost_less" if result.price == "less" else "cost_more", factor=factor, **prices)


def _notes(
    profile: Profile, labels: Mapping[ArmName, str], evaluation: Evaluation, arms: Arms
) -> list[Reason]:
    """Caveats about the figures."""
    models = {TEACHER: profile.teacher.model}
    for arm, endpoint in profile.compare.teachers.items():
        models[arm] = endpoint.model
    notes = []
    for arm, model in models.items():
        if labels[arm] != model:
            notes.append(reason("label_of_model", label=labels[arm], model=model))
    for arm, label in labels.items():
        if not gains(evaluation, arm):
            notes.append(reason("no_gain_over_question", label=label))
    notes += _notes_on_judge(profile.judge.model, models, labels)
    for arm in models:
        notes += _notes_on_answers(labels[arm], arms[arm])
    return [*notes, reason("latency_of_the_call")]


def _notes_on_judge(
    judge: str, models: Mapping[ArmName, str], labels: Mapping[ArmName, str]
) -> list[Reason]:
    """Teachers of the judge's family, whose texts it may favour."""
    same_family = [labels[arm] for arm, model in models.items() if family(model) == family(judge)]
    if not same_family:
        return []
    if len(same_family) == len(models):
        return [reason("judge_of_same_family_as_all", judge=judge)]
    teachers = listed([Both(label, label) for label in same_family])
    return [reason("judge_of_same_family", judge=judge, teachers=teachers)]


def _notes_on_answers(label: str, entries: Sequence[ArmRow]) -> list[Reason]:
    """A teacher's questions without an answer, and those answered by a batch API."""
    notes = []
    failures = Counter(entry.reason or "no answer" for entry in entries if entry.text is None)
    if failures:
        share = sum(failures.values()) / len(entries)
        reasons = []
        for why, rows in failures.most_common():
            reasons.append(reason("rows_with_reason", reason=why, rows=rows))
        notes.append(reason("left_without_answer", label=label, share=share, reasons=reasons))
    # Only a live call has a latency.
    by_batch_api = sum(entry.text is not None and entry.latency_ms is None for entry in entries)
    if by_batch_api:
        notes.append(reason("answers_by_batch_api", rows=by_batch_api, label=label))
    return notes
