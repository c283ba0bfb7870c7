"""May this model be released? Rules over a finished evaluation, each with what was found and what
was required.

All rules must hold, so that the chance of promoting a model that is no better than the teacher is
at most that of its hardest rule: the intervals are not widened for the number of rules
(docs/reference/gate.md has the measured rates).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from qinglan.config import Gate
from qinglan.evaluation.models import (
    FALSE_PASS,
    GAIN,
    ArmFigures,
    Decision,
    Evaluation,
    Rule,
    Verdict,
)
from qinglan.evaluation.reasons import Reason, Value, reason
from qinglan.evaluation.red_team import RedTeamResult, compare_rates
from qinglan.recipes import QUALITY, Metric
from qinglan.runs.artifacts import StageResult
from qinglan.statistics import FEWEST_GROUPS, Comparison, between, rows_needed
from qinglan.training.alarms import Alarm

CHAMPION, TEACHER = "champion", "teacher"
_NAMED_CASES = 3
_FEWEST_CASES = 6
"""Of fewer, not even all lost and none won is less likely than 5% between equals."""


def decide(
    evaluation: Evaluation, alarms: Sequence[Alarm], config: Gate, champion: str | None
) -> Decision:
    """Try all rules of the gate, about alarms those that `alarms_of` gives, not all of the run.

    `champion`: version of the registered model that serves now, which the arm `champion` must then
    be.
    """
    rules = list(_rules(evaluation, alarms, config, champion))
    outcomes = {rule.outcome for rule in rules}
    verdict: Verdict = (
        "refuse" if "fail" in outcomes else "undecided" if "unknown" in outcomes else "promote"
    )
    return Decision(
        verdict=verdict,
        challenger=config.challenger,
        champion=champion,
        rules=rules,
        earlier_evaluations=evaluation.earlier_evaluations,
    )


def alarms_of(made: StageResult | None, window_steps: int) -> list[Alarm]:
    """The alarms about the model that this stage made: of RL, those whose latest window begins by
    the chosen step.

    What began only afterwards concerns models that were not chosen; at step 0 nothing had been
    trained.
    """
    found = (
        [Alarm.model_validate(alarm) for alarm in made.details.get("alarms", [])] if made else []
    )
    chosen: int | None = made.details.get("summary", {}).get("chosen_step") if made else None
    return [
        each for each in found if chosen is None or (chosen and each.step - window_steps < chosen)
    ]


def with_champion_arm(
    evaluation: Evaluation, identities: Mapping[str, str], champion_sha256: str, challenger: str
) -> Evaluation | None:
    """The evaluation with the champion under its own name; None where the challenger is the
    champion itself.

    An evaluation leaves the champion out where a model of the run has the same digest; here that
    one stands for it.
    """
    if identities.get(challenger) == champion_sha256:
        return None
    mine = next((arm for arm, sha256 in identities.items() if sha256 == champion_sha256), None)
    if mine == CHAMPION:
        return evaluation
    # One that was evaluated as the champion is it no longer.
    kept = [each for each in evaluation.comparisons if CHAMPION not in (each.a, each.b)]
    named = [
        each.model_copy(update={side: CHAMPION})
        for each in kept
        for side in "ab"
        if getattr(each, side) == mine
    ]
    red_team = {arm: results for arm, results in evaluation.red_team.items() if arm != CHAMPION}
    if mine in red_team:
        red_team[CHAMPION] = red_team[mine]
    return evaluation.model_copy(update={"comparisons": kept + named, "red_team": red_team})


def _rules(
    evaluation: Evaluation, alarms: Sequence[Alarm], config: Gate, champion: str | None
) -> Iterator[Rule]:
    arms = evaluation.arms
    challenger, teacher = arms.get(config.challenger), arms.get(TEACHER)
    rivals = config.rivals if champion is None else tuple(dict.fromkeys((*config.rivals, CHAMPION)))
    for rival in rivals:
        yield _gain(evaluation, config, rival)
    if quality := next((metric for metric in evaluation.metrics if metric.name == QUALITY), None):
        for rival in rivals:
            yield _quality(evaluation, config, rival, quality)
    if teacher and config.max_cost_ratio is not None:
        yield _cost(challenger, teacher, config.challenger, config.max_cost_ratio)
    if teacher and config.max_latency_ratio is not None:
        yield _latency(challenger, teacher, config.max_latency_ratio)
    if config.max_latency_p95_ms is not None:
        yield _latency_p95(challenger, config.max_latency_p95_ms)
    yield _red_team(evaluation.red_team.get(config.challenger))
    for rival in dict.fromkeys((*rivals, TEACHER)):
        if any(not each.must_pass for each in evaluation.red_team.get(rival, ())):
            yield _robustness(evaluation, config.challenger, rival)
    yield _alarms(alarms if config.challenger == "rl" else (), config)


def _gain(evaluation: Evaluation, config: Gate, rival: str) -> Rule:
    """On the first of the recipe's metrics on which the two were compared."""
    both = (
        (metric, _compared(evaluation, config.challenger, rival, metric))
        for metric in evaluation.metrics
    )
    metric, found = next((each for each in both if each[1]), (None, None))
    least, worth = config.min_gain, config.smallest_gain
    required = reason("gain_interval_above", limit=least)
    rule = partial(Rule, name=f"{GAIN}{rival}", required=required, found=_difference(found, metric))
    if obstacle := _obstacle(found, config.challenger, rival):
        return rule(outcome="unknown", reason=obstacle)
    assert found and found.ci95 and metric
    unjudged = sum(evaluation.unjudged.values()) if metric.name == QUALITY else 0
    low, high = _widened(found, unjudged, metric.maximum)
    if low > least:
        return rule(outcome="pass")
    if high < worth:
        return rule(
            outcome="fail",
            reason=reason("gain_ruled_out", rival=rival, metric=metric.words, gain=worth),
        )
    why = (
        reason("one_sided", questions=_unanswered(found))
        if found.ci95[0] > least
        else _power(found, config)
    )
    return rule(
        outcome="unknown", reason=reason("gain_open", rival=rival, metric=metric.words, why=why)
    )


def _quality(evaluation: Evaluation, config: Gate, rival: str, metric: Metric) -> Rule:
    found, margin = _compared(evaluation, config.challenger, rival, metric), config.max_quality_loss
    required = reason("quality_interval_above", limit=-margin)
    rule = partial(
        Rule, name=f"quality_vs_{rival}", required=required, found=_difference(found, metric)
    )
    if obstacle := _obstacle(found, config.challenger, rival):
        return rule(outcome="unknown", reason=obstacle)
    assert found and found.ci95 and found.diff is not None
    unjudged = sum(
        evaluation.unjudged.values()
    )  # no arm has a score there, maybe for what the challenger wrote
    low, high = _widened(found, unjudged, metric.maximum)
    if low > -margin:
        return rule(outcome="pass")
    if high < -margin:
        return rule(outcome="fail", reason=reason("quality_lower", rival=rival, margin=margin))
    if found.ci95[0] <= -margin:
        why = _rows_for(found, found.diff + margin)
    elif unjudged:
        why = reason(
            "one_sided_or_unjudged", questions=_unanswered(found) + unjudged, unjudged=unjudged
        )
    else:
        why = reason("one_sided", questions=_unanswered(found))
    return rule(outcome="unknown", reason=reason("quality_open", rival=rival, why=why))


def _obstacle(found: Comparison | None, challenger: str, rival: str) -> Reason | None:
    """Why no rule can be decided on a comparison, if so."""
    if found is None and rival == CHAMPION:
        return reason("champion_not_compared")
    if found is None:
        return reason("arms_not_compared", a=challenger, b=rival)
    return (
        None
        if found.deciding_ci95
        else reason("few_groups", groups=found.groups, needed=FEWEST_GROUPS)
    )


def _difference(found: Comparison | None, metric: Metric | None) -> Reason:
    if found is None or metric is None:
        return reason("not_compared")
    known = {"metric": metric.words, "diff": found.diff, "n": found.n}
    if found.ci95 is None:
        return reason("difference_without_interval", **known)
    low, high = found.ci95
    return reason("difference", low=low, high=high, **known)


def _unanswered(found: Comparison) -> int:
    """Questions on which the challenger alone has no value."""
    return found.one_sided - found.only_a


def _widened(found: Comparison, unjudged: int, scale: float) -> tuple[float, float]:
    """The interval, had the questions that were left out all gone one way, or all the other.

    A challenger that gives no answer where it would be wrong gains nothing by it, nor one whose
    text the judge can't grade. Where the rival alone has no value, the challenger can only have
    been better.
    """
    assert found.ci95
    n, (low, high) = found.n, found.ci95
    against, open_ = _unanswered(found) + unjudged, found.one_sided + unjudged
    return (low * n - against * scale) / (n + against), (high * n + open_ * scale) / (n + open_)


def _compared(evaluation: Evaluation, a: str, b: str, metric: Metric) -> Comparison | None:
    found = between(evaluation.comparisons, a, b).get(metric.name)
    return found if found and found.n and found.diff is not None else None


def _power(found: Comparison, config: Gate) -> Reason:
    """What the test set can detect, and what it would take."""
    least, gain = config.min_gain, config.smallest_gain
    needed = rows_needed(found.n, found.detectable_diff, gain - least)
    if needed is None or found.detectable_diff is None:
        return reason("answers_hardly_differ")
    detectable = least + found.detectable_diff
    if needed > found.n:
        return reason("more_rows_for_gain", detectable=detectable, rows=needed, gain=gain)
    why = _rows_for(found, (found.diff or 0.0) - least)
    return reason("smaller_than_detectable", detectable=detectable, why=why)


def _rows_for(found: Comparison, distance: float) -> Reason:
    """The rows with which a difference as far from the limit as this one would be distinguished
    from it."""
    needed = rows_needed(found.n, found.detectable_diff, distance) if distance > 0 else None
    return (
        reason("difference_at_limit")
        if needed is None
        else reason("rows_for_difference", rows=needed)
    )


def _cost(challenger: ArmFigures | None, teacher: ArmFigures, arm: str, limit: float) -> Rule:
    own, theirs = challenger.cost_per_1000_usd if challenger else None, teacher.cost_per_1000_usd
    rule = partial(Rule, name="cost", required=reason("cost_at_most", ratio=limit))
    if own is None or not theirs:
        unknown = arm if own is None else TEACHER if theirs is None else None
        why = reason("cost_unknown", arm=unknown) if unknown else reason("teacher_costs_nothing")
        return rule(outcome="unknown", found=reason("not_known"), reason=why)
    ratio = own / theirs
    found = reason("cost_beside_teacher", cost=own, ratio=ratio, teacher=theirs)
    if ratio <= limit:
        return rule(outcome="pass", found=found)
    return rule(outcome="fail", found=found, reason=reason("cost_too_high", ratio=ratio))


def _latency(challenger: ArmFigures | None, teacher: ArmFigures, limit: float) -> Rule:
    rule = partial(Rule, name="latency", required=reason("median_at_most", ratio=limit))
    if challenger is None or (own := challenger.latency_p50_ms) is None:
        return rule(
            outcome="unknown", found=reason("not_measured"), reason=reason("latency_not_measured")
        )
    measured, theirs = {"ms": own, "load": challenger.latency_load}, teacher.latency_p50_ms
    if not theirs:  # such as answers out of a ledger: there is nothing to be slower than
        return rule(outcome="pass", found=reason("median", **measured))
    found = reason(
        "median_beside_teacher", teacher_ms=theirs, teacher_load=teacher.latency_load, **measured
    )
    if own <= limit * theirs:
        return rule(outcome="pass", found=found)
    return rule(
        outcome="fail", found=found, reason=reason("slower_than_teacher", factor=own / theirs)
    )


def _latency_p95(challenger: ArmFigures | None, limit_ms: float) -> Rule:
    rule = partial(Rule, name="latency_p95", required=reason("p95_at_most", limit_ms=limit_ms))
    if challenger is None or (own := challenger.latency_p95_ms) is None:
        return rule(
            outcome="unknown", found=reason("not_measured"), reason=reason("latency_not_measured")
        )
    found = reason("p95", ms=own, load=challenger.latency_load)
    if own <= limit_ms:
        return rule(outcome="pass", found=found)
    return rule(outcome="fail", found=found, reason=reason("p95_too_long", ms=own))


def _red_team(results: Sequence[RedTeamResult] | None) -> Rule:
    rule = partial(Rule, name="red_team", required=reason("every_needed_case"))
    if results is None:
        return rule(
            outcome="unknown", found=reason("not_tried"), reason=reason("red_team_not_tried")
        )
    needed = [result for result in results if result.must_pass]
    failed = [result for result in needed if result.passed is False]
    unchecked = [result for result in needed if result.passed is None]
    passed = len(needed) - len(failed) - len(unchecked)
    found = (
        reason("cases_passed", passed=passed, cases=len(needed))
        if needed
        else reason("no_case_must_pass")
    )
    if not failed and not unchecked:
        return rule(outcome="pass", found=found)
    why = reason(
        "red_team_failed" if failed else "red_team_unchecked", cases=_named(failed or unchecked)
    )
    return rule(outcome="fail" if failed else "unknown", found=found, reason=why)


def _robustness(evaluation: Evaluation, challenger: str, rival: str) -> Rule:
    """On the cases that need not pass one by one. What they can't show keeps no model back."""
    found = compare_rates(evaluation.red_team, challenger, rival)
    rule = partial(Rule, name=f"robustness_vs_{rival}", required=reason("not_worse_on_cases"))
    if not found.n:
        return rule(
            outcome="unknown",
            found=reason("not_compared"),
            reason=reason("cases_not_compared", rival=rival),
        )
    assert found.mean_a is not None and found.mean_b is not None
    left_out = reason("cases_left_out", cases=found.left_out) if found.left_out else None
    own, theirs = (round(mean * found.n) for mean in (found.mean_a, found.mean_b))
    known: dict[str, Value] = {
        "own": own,
        "theirs": theirs,
        "cases": found.n,
        "rival": rival,
        "left_out": left_out,
    }
    if found.n < _FEWEST_CASES or found.ci95 is None:
        return rule(outcome="pass", found=reason("few_cases_compared", **known))
    low, high = found.ci95
    # The loss that so many cases show in four of five sets of them; at least that of which, with no
    # case won, fewer than 2.5% of the resamples hold no lost case.
    fewest = math.ceil(found.n * (1 - math.pow(FALSE_PASS, 1 / found.n)))
    least = max(fewest / found.n, found.detectable_diff or 0.0)
    shown = reason("cases_compared", diff=found.diff, low=low, high=high, least=least, **known)
    if high >= 0:
        return rule(outcome="pass", found=shown)
    passed = {result.case_id for result in evaluation.red_team[rival] if result.passed}
    results = evaluation.red_team[challenger]
    lost = [
        each
        for each in results
        if not each.must_pass and each.passed is False and each.case_id in passed
    ]
    return rule(
        outcome="fail",
        found=shown,
        reason=reason("robustness_lower", rival=rival, cases=_named(lost)),
    )


def _named(results: Sequence[RedTeamResult]) -> list[Reason]:
    named = [
        reason("case", name=result.name, case_id=result.case_id, reason=result.reason)
        for result in results[:_NAMED_CASES]
    ]
    return (
        [*named, reason("and_more", cases=len(results) - _NAMED_CASES)]
        if len(results) > _NAMED_CASES
        else named
    )


def alarm_reasons(alarms: Sequence[Alarm]) -> dict[str, Reason]:
    """Each alarm by its name, with its steps."""
    steps: dict[str, list[int]] = {}
    for alarm in alarms:
        steps.setdefault(alarm.name, []).append(alarm.step)
    return {name: reason("alarm_at_steps", name=name, steps=at) for name, at in steps.items()}


def _alarms(alarms: Sequence[Alarm], config: Gate) -> Rule:
    named = alarm_reasons(alarms)
    blocking = [each for name, each in named.items() if name not in config.accepted_alarms]
    accepted = [str(name) for name in config.accepted_alarms]
    required = reason("no_alarm_but", accepted=accepted) if accepted else reason("no_alarm")
    found = reason("alarms", alarms=list(named.values())) if named else reason("no_alarm")
    rule = partial(Rule, name="alarms", required=required, found=found)
    return (
        rule(outcome="fail", reason=reason("alarmed", alarms=blocking))
        if blocking
        else rule(outcome="pass")
    )
