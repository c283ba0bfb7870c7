"""May this model be released? Rules over a finished evaluation, each with its figures and limits.

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
from qinglan.rows import ArmName
from qinglan.runs.artifacts import StageResult
from qinglan.statistics import FEWEST_GROUPS, Comparison, between, rows_needed
from qinglan.training.alarms import Alarm

CHAMPION = "champion"
TEACHER = "teacher"
_NAMED_CASES = 3
_FEWEST_CASES = 6
"""Fewest cases that can show a loss: of fewer, not even all lost and none won is less likely than
5% between equals."""


def decide(
    evaluation: Evaluation, alarms: Sequence[Alarm], config: Gate, champion: str | None
) -> Decision:
    """Try all rules of the gate.

    Args:
        alarms: those that `alarms_of` gives, not all of the run.
        champion: version of the registered model that serves now, which the arm `champion` must
            then be.
    """
    rules = list(_rules(evaluation, alarms, config, champion))
    outcomes = {rule.outcome for rule in rules}
    verdict: Verdict = "promote"
    # A failure weighs more than what is unknown.
    if "fail" in outcomes:
        verdict = "refuse"
    elif "unknown" in outcomes:
        verdict = "undecided"
    return Decision(
        verdict=verdict,
        challenger=config.challenger,
        champion=champion,
        rules=rules,
        earlier_evaluations=evaluation.earlier_evaluations,
    )


def alarms_of(trained: StageResult | None, window_steps: int) -> list[Alarm]:
    """The alarms about the model that this stage trained.

    These are RL's alarms whose latest window begins by the chosen step. What began only afterwards
    concerns models that were not chosen; at step 0 nothing had been trained.
    """
    if trained is None:
        return []
    alarms = [Alarm.model_validate(alarm) for alarm in trained.details.get("alarms", [])]
    chosen_step: int | None = trained.details.get("summary", {}).get("chosen_step")
    if chosen_step is None:
        return alarms
    if chosen_step == 0:
        return []
    return [alarm for alarm in alarms if alarm.step - window_steps < chosen_step]


def with_champion_arm(
    evaluation: Evaluation, identities: Mapping[str, str], champion_sha256: str, challenger: str
) -> Evaluation | None:
    """The evaluation with the champion under its own name.

    It is None where the challenger is the champion itself. An evaluation leaves the champion out
    where a model of the run has the same digest; here that model stands for the champion.
    """
    if identities.get(challenger) == champion_sha256:
        return None
    arm = _arm_with_digest(identities, champion_sha256)
    if arm == CHAMPION:
        return evaluation
    # The arm that was evaluated as the champion is it no longer.
    comparisons = [
        comparison for comparison in evaluation.comparisons if not comparison.involves(CHAMPION)
    ]
    renamed = []
    for comparison in comparisons:
        if comparison.a == arm:
            renamed.append(comparison.with_arms(CHAMPION, comparison.b))
        if comparison.b == arm:
            renamed.append(comparison.with_arms(comparison.a, CHAMPION))
    red_team = dict(evaluation.red_team)
    red_team.pop(CHAMPION, None)
    if arm in red_team:
        red_team[CHAMPION] = red_team[arm]
    return evaluation.with_comparisons(comparisons + renamed).with_red_team(red_team)


def _arm_with_digest(identities: Mapping[str, str], sha256: str) -> ArmName | None:
    for arm, digest in identities.items():
        if digest == sha256:
            return arm
    return None


def _rules(
    evaluation: Evaluation, alarms: Sequence[Alarm], config: Gate, champion: str | None
) -> Iterator[Rule]:
    challenger = evaluation.arm(config.challenger)
    teacher = evaluation.arm(TEACHER)
    has_teacher = TEACHER in evaluation.arms
    metrics = {metric.name: metric for metric in evaluation.metrics}
    rivals = config.rivals
    if champion is not None:
        # A champion is a rival, whether or not the profile names it as one.
        rivals = tuple(dict.fromkeys((*rivals, CHAMPION)))
    for rival in rivals:
        yield _gain(evaluation, config, rival)
    if QUALITY in metrics:
        for rival in rivals:
            yield _quality(evaluation, config, rival, metrics[QUALITY])
    if has_teacher and config.max_cost_ratio is not None:
        yield _cost(challenger, teacher, config.challenger, config.max_cost_ratio)
    if has_teacher and config.max_latency_ratio is not None:
        yield _latency(challenger, teacher, config.max_latency_ratio)
    if config.max_latency_p95_ms is not None:
        yield _latency_p95(challenger, config.max_latency_p95_ms)
    yield _red_team(evaluation.red_team.get(config.challenger))
    for rival in dict.fromkeys((*rivals, TEACHER)):
        results = evaluation.red_team.get(rival, ())
        if any(not result.must_pass for result in results):
            yield _robustness(evaluation, config.challenger, rival)
    # Alarms are about RL's model alone.
    yield _alarms(alarms if config.challenger == "rl" else (), config)


def _gain(evaluation: Evaluation, config: Gate, rival: str) -> Rule:
    """The gain on the first of the recipe's metrics on which the two were compared."""
    metric, comparison = _first_compared(evaluation, config.challenger, rival)
    rule = partial(
        Rule,
        name=f"{GAIN}{rival}",
        required=reason("gain_interval_above", limit=config.min_gain),
        found=_difference(comparison, metric),
    )
    obstacle = _obstacle(comparison, config.challenger, rival)
    if obstacle:
        return rule(outcome="unknown", reason=obstacle)
    assert comparison and comparison.ci95 and metric
    # A question that no judge scored has values on the other metrics.
    unjudged = sum(evaluation.unjudged.values()) if metric.name == QUALITY else 0
    low, high = _widened(comparison, unjudged, metric.maximum)
    if low > config.min_gain:
        return rule(outcome="pass")
    if high < config.smallest_gain:
        why = reason("gain_ruled_out", rival=rival, metric=metric.words, gain=config.smallest_gain)
        return rule(outcome="fail", reason=why)
    if comparison.ci95[0] > config.min_gain:
        # The interval is narrow enough: only the questions without an answer leave the gain open.
        cause = reason("one_sided", questions=_unanswered(comparison))
    else:
        cause = _power(comparison, config)
    why = reason("gain_open", rival=rival, metric=metric.words, why=cause)
    return rule(outcome="unknown", reason=why)


def _quality(evaluation: Evaluation, config: Gate, rival: str, metric: Metric) -> Rule:
    comparison = _compared(evaluation, config.challenger, rival, metric)
    margin = config.max_quality_loss
    rule = partial(
        Rule,
        name=f"quality_vs_{rival}",
        required=reason("quality_interval_above", limit=-margin),
        found=_difference(comparison, metric),
    )
    obstacle = _obstacle(comparison, config.challenger, rival)
    if obstacle:
        return rule(outcome="unknown", reason=obstacle)
    assert comparison and comparison.ci95 and comparison.diff is not None
    # No arm has a score on an unjudged question, maybe because of what the challenger wrote.
    unjudged = sum(evaluation.unjudged.values())
    low, high = _widened(comparison, unjudged, metric.maximum)
    if low > -margin:
        return rule(outcome="pass")
    if high < -margin:
        why = reason("quality_lower", rival=rival, margin=margin)
        return rule(outcome="fail", reason=why)
    unanswered = _unanswered(comparison)
    # The interval alone leaves it open; if not, the questions that were left out do.
    if comparison.ci95[0] <= -margin:
        cause = _rows_for(comparison, comparison.diff + margin)
    elif unjudged:
        cause = reason("one_sided_or_unjudged", questions=unanswered + unjudged, unjudged=unjudged)
    else:
        cause = reason("one_sided", questions=unanswered)
    return rule(outcome="unknown", reason=reason("quality_open", rival=rival, why=cause))


def _obstacle(comparison: Comparison | None, challenger: str, rival: str) -> Reason | None:
    """The reason why no rule can be decided on a comparison; None where one can."""
    if comparison is None and rival == CHAMPION:
        return reason("champion_not_compared")
    if comparison is None:
        return reason("arms_not_compared", a=challenger, b=rival)
    if comparison.deciding_ci95 is None:
        return reason("few_groups", groups=comparison.groups, needed=FEWEST_GROUPS)
    return None


def _difference(comparison: Comparison | None, metric: Metric | None) -> Reason:
    if comparison is None or metric is None:
        return reason("not_compared")
    figures = {"metric": metric.words, "diff": comparison.diff, "n": comparison.n}
    if comparison.ci95 is None:
        return reason("difference_without_interval", **figures)
    low, high = comparison.ci95
    return reason("difference", low=low, high=high, **figures)


def _unanswered(comparison: Comparison) -> int:
    """Questions on which the challenger alone has no value."""
    return comparison.one_sided - comparison.only_a


def _widened(comparison: Comparison, unjudged: int, scale: float) -> tuple[float, float]:
    """The interval, had the questions that were left out all gone one way, or all the other.

    A challenger that gives no answer where it would be wrong gains nothing by it, nor one whose
    text the judge can't grade. Where the rival alone has no value, the challenger can only have
    been better.
    """
    assert comparison.ci95
    low, high = comparison.ci95
    n = comparison.n
    may_be_lost = _unanswered(comparison) + unjudged
    may_be_won = comparison.one_sided + unjudged
    lowest = (low * n - may_be_lost * scale) / (n + may_be_lost)
    highest = (high * n + may_be_won * scale) / (n + may_be_won)
    return lowest, highest


def _first_compared(
    evaluation: Evaluation, a: ArmName, b: ArmName
) -> tuple[Metric, Comparison] | tuple[None, None]:
    """The first of the recipe's metrics on which the two arms were compared."""
    for metric in evaluation.metrics:
        comparison = _compared(evaluation, a, b, metric)
        if comparison:
            return metric, comparison
    return None, None


def _compared(evaluation: Evaluation, a: ArmName, b: ArmName, metric: Metric) -> Comparison | None:
    """The comparison of two arms on a metric; None where no row has values of both."""
    comparison = between(evaluation.comparisons, a, b).get(metric.name)
    if comparison is None or not comparison.n or comparison.diff is None:
        return None
    return comparison


def _power(comparison: Comparison, config: Gate) -> Reason:
    """The gain that the test set detects, and the rows that would show this one."""
    gain_to_detect = config.smallest_gain - config.min_gain
    rows = rows_needed(comparison.n, comparison.detectable_diff, gain_to_detect)
    if rows is None or comparison.detectable_diff is None:
        return reason("answers_hardly_differ")
    detectable = config.min_gain + comparison.detectable_diff
    if rows > comparison.n:
        return reason(
            "more_rows_for_gain", detectable=detectable, rows=rows, gain=config.smallest_gain
        )
    why = _rows_for(comparison, (comparison.diff or 0.0) - config.min_gain)
    return reason("smaller_than_detectable", detectable=detectable, why=why)


def _rows_for(comparison: Comparison, distance: float) -> Reason:
    """The rows that would tell a difference as far from the limit as this one from the limit."""
    if distance <= 0:
        return reason("difference_at_limit")
    rows = rows_needed(comparison.n, comparison.detectable_diff, distance)
    if rows is None:
        return reason("difference_at_limit")
    return reason("rows_for_difference", rows=rows)


def _cost(challenger: ArmFigures, teacher: ArmFigures, arm: str, limit: float) -> Rule:
    own_usd = challenger.cost_per_1000_usd
    teacher_usd = teacher.cost_per_1000_usd
    rule = partial(Rule, name="cost", required=reason("cost_at_most", ratio=limit))
    if own_usd is None:
        why = reason("cost_unknown", arm=arm)
        return rule(outcome="unknown", found=reason("not_known"), reason=why)
    if teacher_usd is None:
        why = reason("cost_unknown", arm=TEACHER)
        return rule(outcome="unknown", found=reason("not_known"), reason=why)
    if teacher_usd == 0:
        why = reason("teacher_costs_nothing")
        return rule(outcome="unknown", found=reason("not_known"), reason=why)
    ratio = own_usd / teacher_usd
    measured = reason("cost_beside_teacher", cost=own_usd, ratio=ratio, teacher=teacher_usd)
    if ratio <= limit:
        return rule(outcome="pass", found=measured)
    return rule(outcome="fail", found=measured, reason=reason("cost_too_high", ratio=ratio))


def _latency(challenger: ArmFigures, teacher: ArmFigures, limit: float) -> Rule:
    rule = partial(Rule, name="latency", required=reason("median_at_most", ratio=limit))
    own_ms = challenger.latency_p50_ms
    teacher_ms = teacher.latency_p50_ms
    if own_ms is None:
        why = reason("latency_not_measured")
        return rule(outcome="unknown", found=reason("not_measured"), reason=why)
    # Answers out of a ledger have no latency: there is nothing to be slower than.
    if not teacher_ms:
        measured = reason("median", ms=own_ms, load=challenger.latency_load)
        return rule(outcome="pass", found=measured)
    measured = reason(
        "median_beside_teacher",
        teacher_ms=teacher_ms,
        teacher_load=teacher.latency_load,
        ms=own_ms,
        load=challenger.latency_load,
    )
    if own_ms <= limit * teacher_ms:
        return rule(outcome="pass", found=measured)
    why = reason("slower_than_teacher", factor=own_ms / teacher_ms)
    return rule(outcome="fail", found=measured, reason=why)


def _latency_p95(challenger: ArmFigures, limit_ms: float) -> Rule:
    rule = partial(Rule, name="latency_p95", required=reason("p95_at_most", limit_ms=limit_ms))
    own_ms = challenger.latency_p95_ms
    if own_ms is None:
        why = reason("latency_not_measured")
        return rule(outcome="unknown", found=reason("not_measured"), reason=why)
    measured = reason("p95", ms=own_ms, load=challenger.latency_load)
    if own_ms <= limit_ms:
        return rule(outcome="pass", found=measured)
    return rule(outcome="fail", found=measured, reason=reason("p95_too_long", ms=own_ms))


def _red_team(results: Sequence[RedTeamResult] | None) -> Rule:
    rule = partial(Rule, name="red_team", required=reason("every_needed_case"))
    if results is None:
        why = reason("red_team_not_tried")
        return rule(outcome="unknown", found=reason("not_tried"), reason=why)
    must_pass = [result for result in results if result.must_pass]
    failed = [result for result in must_pass if result.passed is False]
    unchecked = [result for result in must_pass if result.passed is None]
    passed = len(must_pass) - len(failed) - len(unchecked)
    measured = reason("no_case_must_pass")
    if must_pass:
        measured = reason("cases_passed", passed=passed, cases=len(must_pass))
    if failed:
        why = reason("red_team_failed", cases=_case_reasons(failed))
        return rule(outcome="fail", found=measured, reason=why)
    if unchecked:
        why = reason("red_team_unchecked", cases=_case_reasons(unchecked))
        return rule(outcome="unknown", found=measured, reason=why)
    return rule(outcome="pass", found=measured)


def _robustness(evaluation: Evaluation, challenger: str, rival: str) -> Rule:
    """The challenger may not be worse than the rival on the cases that need not pass one by one.

    A loss that the cases can't show keeps no model back.
    """
    comparison = compare_rates(evaluation.red_team, challenger, rival)
    rule = partial(Rule, name=f"robustness_vs_{rival}", required=reason("not_worse_on_cases"))
    if not comparison.n:
        why = reason("cases_not_compared", rival=rival)
        return rule(outcome="unknown", found=reason("not_compared"), reason=why)
    assert comparison.mean_a is not None and comparison.mean_b is not None
    left_out = None
    if comparison.left_out:
        left_out = reason("cases_left_out", cases=comparison.left_out)
    # The comparison has only the shares of passed cases.
    counts: dict[str, Value] = {
        "own": round(comparison.mean_a * comparison.n),
        "theirs": round(comparison.mean_b * comparison.n),
        "cases": comparison.n,
        "rival": rival,
        "left_out": left_out,
    }
    if comparison.n < _FEWEST_CASES or comparison.ci95 is None:
        return rule(outcome="pass", found=reason("few_cases_compared", **counts))
    low, high = comparison.ci95
    measured = reason(
        "cases_compared",
        diff=comparison.diff,
        low=low,
        high=high,
        least=_detectable_loss(comparison),
        **counts,
    )
    if high >= 0:
        return rule(outcome="pass", found=measured)
    rival_passed = {result.case_id for result in evaluation.red_team[rival] if result.passed}
    lost = []
    for result in evaluation.red_team[challenger]:
        is_compared = not result.must_pass and result.case_id in rival_passed
        if is_compared and result.passed is False:
            lost.append(result)
    why = reason("robustness_lower", rival=rival, cases=_case_reasons(lost))
    return rule(outcome="fail", found=measured, reason=why)


def _detectable_loss(comparison: Comparison) -> float:
    """The share of lost cases that so many cases show in four of five sets of them.

    It is at least the share of which, with no case won, fewer than 2.5% of the resamples hold no
    lost case.
    """
    n = comparison.n
    fewest_lost = math.ceil(n * (1 - math.pow(FALSE_PASS, 1 / n)))
    return max(fewest_lost / n, comparison.detectable_diff or 0.0)


def _case_reasons(results: Sequence[RedTeamResult]) -> list[Reason]:
    """The first cases by name, and how many more there are."""
    reasons = []
    for result in results[:_NAMED_CASES]:
        case = reason("case", name=result.name, case_id=result.case_id, reason=result.reason)
        reasons.append(case)
    if len(results) > _NAMED_CASES:
        reasons.append(reason("and_more", cases=len(results) - _NAMED_CASES))
    return reasons


def alarm_reasons(alarms: Sequence[Alarm]) -> dict[str, Reason]:
    """Each alarm by its name, with its steps."""
    steps_by_name: dict[str, list[int]] = {}
    for alarm in alarms:
        steps_by_name.setdefault(alarm.name, []).append(alarm.step)
    reasons = {}
    for name, steps in steps_by_name.items():
        reasons[name] = reason("alarm_at_steps", name=name, steps=steps)
    return reasons


def _alarms(alarms: Sequence[Alarm], config: Gate) -> Rule:
    reasons = alarm_reasons(alarms)
    accepted = [str(name) for name in config.accepted_alarms]
    required = reason("no_alarm")
    if accepted:
        required = reason("no_alarm_but", accepted=accepted)
    measured = reason("no_alarm")
    if reasons:
        measured = reason("alarms", alarms=list(reasons.values()))
    rule = partial(Rule, name="alarms", required=required, found=measured)
    blocking = [why for name, why in reasons.items() if name not in config.accepted_alarms]
    if blocking:
        return rule(outcome="fail", reason=reason("alarmed", alarms=blocking))
    return rule(outcome="pass")
