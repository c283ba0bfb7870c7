"""May this model be released? Rules over a finished evaluation, each with what was found and what was required.

All rules must hold, and no model gains by there being several of them: a model that is no better than the teacher has
to pass every one to be promoted, so that the chance of promoting it is at most that of its hardest rule. That is why
the intervals are not widened for the number of rules (docs/gate.md has the measured rates).
"""

from collections.abc import Iterator, Sequence
from functools import partial

from qinglan.config import Gate
from qinglan.evaluation.models import Arm, Decision, Evaluation, Outcome, Rule, Verdict
from qinglan.evaluation.red_team_cases import RedTeamResult
from qinglan.evaluation.report.words import rival_words
from qinglan.recipes import Metric
from qinglan.statistics import Comparison, rows_needed
from qinglan.text import count, number, signed, usd, with_interval
from qinglan.training.alarms import Alarm

CHAMPION, TEACHER = "champion", "teacher"
QUALITY = "quality"
"""The metric that is the judge's score."""
_GAIN = "gain_vs_"
_NAMED = 3
_CHANCE = "in four of five test sets"


def decide(evaluation: Evaluation, alarms: Sequence[Alarm], config: Gate, champion: str | None) -> Decision:
    """Try all rules.

    Args:
        alarms: those that `alarms_about` the model, not all of its run.
        champion: version of the registered model that serves now, which the arm `champion` must then be.
    """
    rules = list(_rules(evaluation, alarms, config, champion))
    outcomes = {rule.outcome for rule in rules}
    verdict: Verdict = "refuse" if "fail" in outcomes else "undecided" if "unknown" in outcomes else "promote"
    return Decision(
        verdict=verdict,
        challenger=config.challenger,
        champion=champion,
        rules=rules,
        sentence=_sentence(verdict, rules, config.challenger, champion),
    )


def gain_of(rules: Sequence[Rule]) -> str:
    """What was gained on whom, in words; nothing where no rule asked for a gain."""
    rule = next((rule for rule in rules if rule.name.startswith(_GAIN)), None)
    return f"{rule.found} against {_the(rule.name.removeprefix(_GAIN))}" if rule else ""


def alarms_about(alarms: Sequence[Alarm], chosen_step: int, window_steps: int) -> list[Alarm]:
    """The alarms that speak of the model of `chosen_step`: those whose latest window begins no later than it.

    What began only afterwards befell models that were not chosen; at step 0 nothing had been trained.
    """
    return [alarm for alarm in alarms if chosen_step and alarm.step - window_steps < chosen_step]


def _rules(evaluation: Evaluation, alarms: Sequence[Alarm], config: Gate, champion: str | None) -> Iterator[Rule]:
    arms = evaluation.arms
    challenger, teacher = arms.get(config.challenger), arms.get(TEACHER)
    rivals = config.rivals if champion is None else tuple(dict.fromkeys((*config.rivals, CHAMPION)))
    for rival in rivals:
        yield _gain(evaluation, config, rival)
    if quality := next((metric for metric in evaluation.metrics if metric.name == QUALITY), None):
        for rival in rivals:
            yield _quality(evaluation, config, rival, quality)
    if teacher is not None:
        yield _cost(challenger, teacher, config)
    if config.max_latency_ratio is not None and teacher is not None:
        yield _latency(challenger, teacher, config.max_latency_ratio)
    if config.max_latency_p95_ms is not None:
        yield _latency_p95(challenger, config.max_latency_p95_ms)
    yield _red_team(evaluation.red_team.get(config.challenger))
    yield _alarms(alarms if config.challenger == "rl" else (), config)


def _gain(evaluation: Evaluation, config: Gate, rival: str) -> Rule:
    """On the first of the recipe's metrics on which the two were compared."""
    both = (
        (metric, _compared(evaluation.comparisons, config.challenger, rival, metric)) for metric in evaluation.metrics
    )
    metric, found = next((each for each in both if each[1]), (None, None))
    least, worth = config.min_gain, config.smallest_gain
    rule = partial(Rule, name=f"{_GAIN}{rival}", required=f"the 95% interval above {signed(least)}")
    shown = _shown(found, metric)
    if flaw := _flaw(found, config.challenger, rival):
        return rule(outcome="unknown", found=shown, reason=flaw)
    assert found and found.ci95 and metric
    low, high = _widened(found, found.one_sided, metric.maximum)
    if low > least:
        return rule(outcome="pass", found=shown)
    if high < worth:
        reason = f"it is not better than {_the(rival)} on {metric.en}: a gain of {number(worth)} is ruled out"
        return rule(outcome="fail", found=shown, reason=reason)
    why = _left_out(found.one_sided) if found.ci95[0] > least else _power(found, config)
    reason = f"whether it is better than {_the(rival)} on {metric.en} is open: {why}"
    return rule(outcome="unknown", found=shown, reason=reason)


def _quality(evaluation: Evaluation, config: Gate, rival: str, metric: Metric) -> Rule:
    found = _compared(evaluation.comparisons, config.challenger, rival, metric)
    shown, margin = _shown(found, metric), -config.max_quality_loss
    rule = partial(Rule, name=f"quality_vs_{rival}", required=f"the 95% interval above {signed(margin, 2)}")
    if flaw := _flaw(found, config.challenger, rival):
        return rule(outcome="unknown", found=shown, reason=flaw)
    assert found and found.ci95 and found.diff is not None
    unjudged = sum(evaluation.unjudged.values())  # nobody has a score there, maybe for what the challenger wrote
    low, high = _widened(found, found.one_sided + unjudged, metric.maximum)
    if low > margin:
        return rule(outcome="pass", found=shown)
    if high < margin:
        reason = f"the judge scores it lower than {_the(rival)}, by more than {number(-margin, 2)}"
        return rule(outcome="fail", found=shown, reason=reason)
    missing = _left_out(found.one_sided, unjudged)
    why = missing if found.ci95[0] > margin else _rows_for(found, found.diff - margin)
    reason = f"whether the judge finds it as good as {_the(rival)} is open: {why}"
    return rule(outcome="unknown", found=shown, reason=reason)


def _flaw(found: Comparison | None, challenger: str, rival: str) -> str:
    """Why a comparison can't be gone by, if so."""
    if found is None and rival == CHAMPION:
        return "the champion was not compared with it: it was not evaluated in this run, or is one of its models"
    if found is None:
        return f"{challenger} and {rival} were not compared on this; evaluate both in one run"
    if found.ci95 is None:
        return "all questions belong to one group, so that there is no interval; ask questions of more groups"
    return ""


def _shown(found: Comparison | None, metric: "Metric | None") -> str:
    if found is None or metric is None:
        return "not compared"
    difference = with_interval(found.diff, found.ci95, signed)
    return f"{metric.en} {difference} on {count(found.n)} questions"


def _widened(found: Comparison, missing: int, scale: float) -> tuple[float, float]:
    """The interval, had the questions that were left out all gone one way, or all the other.

    An arm that gives no answer where it would be wrong gains nothing by it, nor one whose text the judge chokes on.
    """
    assert found.ci95
    low, high = (end * found.n for end in found.ci95)
    total, most = found.n + missing, missing * scale
    return (low - most) / total, (high + most) / total


def _left_out(one_sided: int, unjudged: int = 0) -> str:
    judge = f"the judge's answer failed ({count(unjudged)}) or " if unjudged else ""
    return (
        f"{count(one_sided + unjudged)} questions were left out because {judge}only one of the two has a value there, "
        "and they could turn the result; mend what failed and evaluate again"
    )


def _compared(comparisons: Sequence[Comparison], a: str, b: str, metric: Metric) -> Comparison | None:
    usable = (c for c in comparisons if (c.a, c.b, c.metric) == (a, b, metric.name) and c.n and c.diff is not None)
    return next(usable, None)


def _power(found: Comparison, config: Gate) -> str:
    """What the test set can tell, and what it would take."""
    least = config.min_gain
    needed = rows_needed(found.n, found.detectable_diff, config.smallest_gain - least)
    if needed is None or found.detectable_diff is None:
        return "the answers hardly differ; ask more questions"
    detects = f"the test set detects a gain of {number(least + found.detectable_diff)} {_CHANCE}"
    if needed > found.n:
        return f"{detects}; {count(needed)} rows would be needed to detect {number(config.smallest_gain)}"
    closer = _rows_for(found, (found.diff or 0.0) - least)
    return f"{detects}, and this one is smaller; {closer}"


def _rows_for(found: Comparison, distance: float) -> str:
    """The rows with which a difference as far from the limit as this one would be told from it."""
    needed = rows_needed(found.n, found.detectable_diff, distance) if distance > 0 else None
    if needed is None:
        return "the difference lies at the limit or beyond it, within the noise"
    return f"{count(needed)} rows would be needed to tell this difference from the limit"


def _cost(challenger: "Arm | None", teacher: "Arm | None", config: Gate) -> Rule:
    own, theirs = (arm.cost_per_1000_usd if arm else None for arm in (challenger, teacher))
    required = f"at most {config.max_cost_ratio:.0%} of the teacher's"
    if own is None or theirs is None or theirs <= 0:
        missing = config.challenger if own is None else "the teacher"
        why = f"the cost of {missing} is not known; give its model a price under `prices`"
        return Rule(name="cost", outcome="unknown", found="not known", required=required, reason=why)
    ratio = own / theirs
    found = f"{usd(own)} per 1,000 questions, {_share(ratio)} of the teacher's {usd(theirs)}"
    if ratio <= config.max_cost_ratio:
        return Rule(name="cost", outcome="pass", found=found, required=required)
    reason = f"it costs {_share(ratio)} of what the teacher costs"
    return Rule(name="cost", outcome="fail", found=found, required=required, reason=reason)


def _latency(challenger: "Arm | None", teacher: "Arm | None", limit: float) -> Rule:
    own, theirs = (arm.latency_p50_ms if arm else None for arm in (challenger, teacher))
    required = f"median at most {limit:g} × the teacher's"
    if own is None or challenger is None:
        why = "the challenger's latency was not measured; set evaluate.latency_queries and evaluate again"
        return Rule(name="latency", outcome="unknown", found="not measured", required=required, reason=why)
    shown = f"median {number(own, 0)} ms{_load(challenger)}"
    if not theirs or teacher is None:  # such as answers out of a ledger: there is nothing to be slower than
        found = f"{shown}; the teacher's was not measured"
        return Rule(name="latency", outcome="pass", found=found, required=required)
    found = f"{shown}, against the teacher's {number(theirs, 0)} ms{_load(teacher)}"
    if own <= limit * theirs:
        return Rule(name="latency", outcome="pass", found=found, required=required)
    reason = f"it takes {number(own / theirs, 1)} times as long as the teacher"
    return Rule(name="latency", outcome="fail", found=found, required=required, reason=reason)


def _latency_p95(challenger: "Arm | None", limit_ms: float) -> Rule:
    own = challenger.latency_p95_ms if challenger else None
    required = f"p95 at most {number(limit_ms, 0)} ms"
    if own is None or challenger is None:
        why = "the challenger's latency was not measured; set evaluate.latency_queries and evaluate again"
        return Rule(name="latency_p95", outcome="unknown", found="not measured", required=required, reason=why)
    found = f"p95 {number(own, 0)} ms{_load(challenger)}"
    if own <= limit_ms:
        return Rule(name="latency_p95", outcome="pass", found=found, required=required)
    reason = f"one answer in twenty takes longer than {number(own, 0)} ms"
    return Rule(name="latency_p95", outcome="fail", found=found, required=required, reason=reason)


def _load(arm: Arm) -> str:
    return f" ({arm.latency_load})" if arm.latency_load else ""


def _red_team(results: "Sequence[RedTeamResult] | None") -> Rule:
    required = "every case that must pass"
    if results is None:
        why = "the red team's cases were not put to the challenger; evaluate again"
        return Rule(name="red_team", outcome="unknown", found="not tried", required=required, reason=why)
    needed = [result for result in results if result.must_pass]
    failed = [result for result in needed if result.passed is False]
    unchecked = [result for result in needed if result.passed is None]
    passed = len(needed) - len(failed) - len(unchecked)
    found = f"{passed} of {len(needed)} passed" if needed else "no case must pass"
    outcome: Outcome = "fail" if failed else "unknown" if unchecked else "pass"
    told = {"fail": "it fails the red team on", "unknown": "the red team could not check"}
    reason = f"{told[outcome]} {_named(failed or unchecked)}" if outcome in told else ""
    return Rule(name="red_team", outcome=outcome, found=found, required=required, reason=reason)


def _named(results: "Sequence[RedTeamResult]") -> str:
    named = "; ".join(f"“{result.name}” ({result.case_id}: {result.reason})" for result in results[:_NAMED])
    more = len(results) - _NAMED
    return f"{named}; and {more} more" if more > 0 else named


def _alarms(alarms: Sequence[Alarm], config: Gate) -> Rule:
    steps: dict[str, list[str]] = {}
    for alarm in alarms:
        steps.setdefault(alarm.name, []).append(str(alarm.step))
    named = {name: f"{name} (step {', '.join(at)})" for name, at in steps.items()}
    blocking = [text for name, text in named.items() if name not in config.accepted_alarms]
    allowed = ", ".join(config.accepted_alarms)
    required = f"none but {allowed}" if allowed else "none"
    found = ", ".join(named.values()) or "none"
    if not blocking:
        return Rule(name="alarms", outcome="pass", found=found, required=required)
    reason = f"training alarmed before the chosen step: {', '.join(blocking)}; see docs/alarms.md"
    return Rule(name="alarms", outcome="fail", found=found, required=required, reason=reason)


def _sentence(verdict: Verdict, rules: Sequence[Rule], challenger: str, champion: str | None) -> str:
    model = _the(challenger)
    failed, unknown = ([rule.reason for rule in rules if rule.outcome == outcome] for outcome in ("fail", "unknown"))
    if verdict == "promote":
        instead = f" in place of version {champion}" if champion else ""
        text = f"Release {model}{instead}: all {len(rules)} rules hold; {gain_of(rules)}."
    elif verdict == "undecided":
        text = f"Undecided about {model}: {'; '.join(unknown)}."
    else:
        also = f" Besides, {len(unknown)} of the rules could not be decided." if unknown else ""
        text = f"Do not release {model}: {'; '.join(failed)}.{also}"
    return " ".join(text.split())


def _the(arm: str) -> str:
    return rival_words(arm).en


def _share(ratio: float) -> str:
    return f"{ratio:.0%}" if ratio >= 0.01 else f"{ratio:.1%}"
