"""What a run found: the conclusion, the warnings, and the three answers at the head of the page.

Did it work, what does it cost, is it safe to ship.
"""

from collections.abc import Sequence
from typing import NamedTuple

from qinglan.config import EMBEDDED, Profile
from qinglan.evaluation.gate import alarm_reasons
from qinglan.evaluation.models import (
    APPROVAL,
    GAIN,
    ArmFigures,
    Decision,
    Report,
    SimulatedRole,
    Tone,
)
from qinglan.evaluation.reasons import TEXTS, Reason, arm_words, listed, reason, rule_words
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.recipes import QUALITY, get_recipe
from qinglan.rows import ArmName
from qinglan.statistics import FEWEST_GROUPS, Comparison, between
from qinglan.text import ARMS, Both, capitalised, latency, number, signed, usd, with_interval

STUDENTS = ("base", "sft", "rl", "champion")
_PLACES = ["original", "teacher", "", "base", "sft", "rl", "champion"]
"""Of the arms on the page; further teachers stand where the empty name is."""
_MAIN_PAIRS = (
    ("rl", "teacher"),
    ("sft", "teacher"),
    ("rl", "sft"),
    ("sft", "base"),
    ("teacher", "original"),
)
"""After those with the gate's rivals."""
_SHIP: dict[str, Tone] = {"promote": "better", "refuse": "worse", "undecided": "open"}
_SAME_COST = 0.05
"""Two prices that differ by no more than this share are the same."""
_LIMITS = {
    "cost": "max_cost_ratio",
    "latency": "max_latency_ratio",
    "latency_p95": "max_latency_p95_ms",
}
"""By rule, the setting of the gate that it holds a model to."""
_SHOWN_BELOW = ("red_team", "alarms")
"""Rules with a line of their own under the answer."""


class Conclusion(NamedTuple):
    """The run's result in a sentence, and how to read it."""

    tone: Tone
    sentence: Both
    reading: Both


class ReportAnswer(NamedTuple):
    """A question, its answer in a word or two, and the explanation."""

    question: Both
    word: Both
    tone: Tone
    texts: list[Both]


class RedTeamCounts(NamedTuple):
    """How a student did on the red team's cases."""

    cases: int
    passed: int
    failed: int
    blocking: int
    """Failed, and a release needs them."""
    unchecked: int

    @classmethod
    def of(cls, results: Sequence[RedTeamResult]) -> "RedTeamCounts":
        failed = [result for result in results if result.passed is False]
        return cls(
            cases=len(results),
            passed=sum(result.passed is True for result in results),
            failed=len(failed),
            blocking=sum(result.must_pass for result in failed),
            unchecked=sum(result.passed is None for result in results),
        )


def simulated_roles_of(profile: Profile) -> list[SimulatedRole]:
    """What embedded simulators replace under this profile, of what its recipe asks."""
    recipe = get_recipe(profile.recipe)
    asked = {*recipe.DISTILL_ROLES, *recipe.grader.services, "student", "workbook"}
    places: dict[SimulatedRole, str] = {
        "teacher": profile.teacher.base_url,
        "answerer": profile.answerer.base_url if profile.answerer else "",
        "judge": profile.judge.base_url,
        "rag": profile.rag.url,
        "student": profile.student.base_model,
        "workbook": "" if profile.data.sql else profile.data.workbook,
    }
    return [role for role, place in places.items() if role in asked and place == EMBEDDED]


def verdict(report: Report) -> Conclusion:
    """Which teacher to buy, or the last trained student, RL or else SFT, against the teacher on the
    best metric."""
    if report.purchase:
        return Conclusion(
            report.purchase.tone, report.purchase.sentence.words, report.purchase.reading.words
        )
    found = main_comparison(report)
    if found is None or found.diff is None:
        return _without_comparison(report)
    a, b = (arm_label_words(name, report) for name in (found.a, found.b))
    metric = report.metric(found.metric)
    of_test = any(arm in report.arms for arm in STUDENTS)
    sentence = reason(
        "verdict_of_test" if of_test else "verdict",
        a=Both(capitalised(a.en), a.zh),
        b=b,
        mean_a=number(found.mean_a, metric.digits),
        mean_b=number(found.mean_b, metric.digits),
        metric=metric.words,
        n=found.n,
        difference=with_interval(found.diff, found.ci95, signed),
    )
    tone: Tone = "open"
    selected = report.stage("select")
    if report.is_of_data and selected and not selected.rows_out:
        tone, reading = "worse", reason("no_row_may_teach")
    elif found.deciding_ci95 is None:
        reading = reason("no_verdict_on_few_groups", groups=found.groups, needed=FEWEST_GROUPS)
    elif found.deciding_ci95[0] <= 0 <= found.deciding_ci95[1]:
        detectable = (
            reason("test_set_detects", difference=found.detectable_diff)
            if found.detectable_diff
            else None
        )
        reading = reason("no_difference_shown", detectable=detectable)
    elif found.deciding_ci95[0] > 0:
        tone, reading = "better", reason("shown_better", a=a, b=b)
    else:
        tone, reading = "worse", reason("shown_worse", a=a, b=b)
    return Conclusion(tone, sentence.words, reading.words)


def _without_comparison(report: Report) -> Conclusion:
    """Of a refresh, at least what became of the rows."""
    read, made = report.stage("ingest"), report.stage("dataset")
    sentence, reading = reason("nothing_compared"), reason("no_common_questions")
    if report.is_of_data and read and made:
        sentence = reason("rows_in_dataset", rows_in=read.rows_in, rows_out=made.rows_out)
        reading = reason("nothing_compared_as")
    return Conclusion("none", sentence.words, reading.words)


def simulator_warning(report: Report, *, marked: bool = True) -> Both | None:
    """What the numbers can't say, `marked` where those have a star; None where nothing was
    simulated."""
    if not report.simulated:
        return None
    roles = listed([TEXTS["simulated_roles"][role] for role in report.simulated])
    verb = "were" if len(report.simulated) > 1 else "was"
    about = Both("your own service or data", "您自己的服务或数据")
    if "teacher" in report.simulated:
        about = Both("GPT-5 or your data", " GPT-5 或您的数据")
    return reason(
        "simulated",
        roles=Both(f"{capitalised(roles.en)} {verb}", roles.zh),
        numbers=Both("The numbers marked *", "带 * 的数字")
        if marked
        else Both("These numbers", "这些数字"),
        about=about,
    ).words


def alarm_warning(report: Report) -> Both | None:
    """Which alarms there were in RL; None where there was none."""
    alarms = list(alarm_reasons(report.alarms).values())
    return reason("alarm_warning", alarms=alarms).words if alarms else None


def continued_warning(report: Report) -> Both | None:
    """Which trainings continued from a checkpoint of other code; None where none did."""
    found = [
        reason(
            "continued_over_other_code", stage=stage.name, modules=", ".join(stage.continued_anyway)
        ).words
        for stage in report.stages
        if stage.continued_anyway
    ]
    return (
        Both(" ".join(each.en for each in found), "".join(each.zh for each in found))
        if found
        else None
    )


def weights_words(report: Report) -> Both | None:
    """The digests of the trained weights, and whether they are those that the repository states;
    None without any."""
    if (weights := report.weights) is None:
        return None
    digests = [
        reason("digest_of", stage=stage, digest=digest[:12])
        for stage, digest in weights.found.items()
    ]
    agrees = None
    if weights.expected:
        differing = [
            stage for stage, digest in weights.expected.items() if digest != weights.found[stage]
        ]
        agrees = reason("weights_agree")
        if differing:
            differs = reason("weights_differ", stage=differing[0])
            agrees = (
                differs if weights.is_of_same else reason("weights_of_others", stage=differing[0])
            )
    merged = [reason("merged", arm=name, **found) for name, found in report.parity.items()]
    return reason("weights", digests=digests, agrees=agrees, merged=merged).words


def next_step(report: Report) -> Both | None:
    """What to do where the gate released no model, by the first rule that failed, else by the first
    that is unknown."""
    decision, profile = report.decision, report.profile
    if decision is None or decision.verdict == "promote":
        return None
    blocking = [
        rule
        for outcome in ("fail", "unknown")
        for rule in decision.rules
        if rule.outcome == outcome
    ]
    name, outcome = blocking[0].name, blocking[0].outcome
    if name == APPROVAL:  # its reason says what to do
        return None
    if (name in _LIMITS and outcome == "fail") or blocking[0].reason == reason(
        "teacher_costs_nothing"
    ):
        return reason("next_limit", setting=f"gate.{_LIMITS[name]}", profile=profile).words
    if name == "alarms":
        return reason("next_alarms", profile=profile).words
    if outcome == "unknown" and not name.startswith(GAIN):
        return reason("next_evaluate", rule=rule_words(name), profile=profile).words
    return reason("next_pipeline", profile=profile).words


def answers(report: Report) -> list[ReportAnswer]:
    """In the order in which a product owner asks."""
    cost = _cost(report)
    return [_worked(report), *([cost] if cost else []), _safe(report)]


def _worked(report: Report) -> ReportAnswer:
    found = verdict(report)
    if report.purchase:
        label = "" if found.tone == "none" else report.purchase.labels[report.purchase.rival]
        question = Both("Which teacher to buy?", "该买哪个教师？")
        return ReportAnswer(question, Both(label, label), found.tone, [found.reading])
    word = Both(*(f"{word}{_star(report)}" for word in TEXTS["worked"][found.tone]))
    return ReportAnswer(Both("Did it work?", "有效吗？"), word, found.tone, [found.reading])


def _cost(report: Report) -> ReportAnswer | None:
    name = candidate(report)
    # What a student saves is shown against the teacher, also where another student is its rival.
    other = "teacher" if "teacher" in report.arms and name != "teacher" else opponent(report)
    mine, theirs = report.arms.get(name or ""), report.arms.get(other)
    if mine is None or mine.cost_per_1000_usd is None:
        return None
    label, mark = arm_label_words(other, report), _star(report)
    rival = Both(f"the {label.en}" if label in ARMS.values() else label.en, label.zh)
    own, base = mine.cost_per_1000_usd, (theirs.cost_per_1000_usd if theirs else None) or 0.0
    price = with_interval(own, mine.cost_ci95, usd, usd)
    if theirs is None or not base:
        word = Both(f"{usd(own)} per 1,000{mark}", f"每千次 {usd(own)}{mark}")
        texts = [reason("price", own=price)]
    else:
        share = f"{own / base:.0%}" if own / base >= 0.01 else "< 1%"
        word = Both(f"{share} of {rival.en}{mark}", f"{rival.zh}的 {share}{mark}")
        theirs_usd = with_interval(base, theirs.cost_ci95, usd, usd)
        texts = [reason("price_beside", own=price, rival=rival, theirs=theirs_usd)]
    if mine.latency_p50_ms is not None and theirs and theirs.latency_p50_ms:
        texts.append(reason("speed_beside", own=_median(mine), rival=rival, theirs=_median(theirs)))
    elif mine.latency_p50_ms is not None:
        texts.append(reason("speed", own=_median(mine)))
    tone: Tone = "none"
    if base and abs(own - base) > _SAME_COST * base:
        tone = "better" if own < base else "worse"
    return ReportAnswer(
        Both("What does it cost?", "成本如何？"), word, tone, [text.words for text in texts]
    )


def _median(arm: ArmFigures) -> Reason:
    median = with_interval(
        arm.latency_p50_ms, arm.latency_p50_ci95, lambda ms: f"{latency(ms)} ms", latency
    )
    return reason("under_load", latency=median, load=arm.latency_load)


def _safe(report: Report) -> ReportAnswer:
    texts = _decided(report.decision) if report.decision else [reason("no_gate_asked")]
    name = report.decision.challenger if report.decision else candidate(report)
    if found := report.red_team.get(name or ""):
        counts = RedTeamCounts.of(found)
        failed = (
            reason("cases_failed", cases=counts.failed, blocking=counts.blocking)
            if counts.failed
            else None
        )
        unchecked = reason("cases_unchecked", cases=counts.unchecked) if counts.unchecked else None
        texts.append(
            reason(
                "red_team_passed",
                passed=counts.passed,
                cases=counts.cases,
                failed=failed,
                unchecked=unchecked,
            )
        )
    if report.training.rl is not None:
        alarms = len(report.alarms)
        texts.append(reason("alarms_in_rl", alarms=alarms) if alarms else reason("no_alarm_in_rl"))
    decided = report.decision.verdict if report.decision else "none"
    shown = [text.words for text in texts]
    if step := next_step(report):
        shown.append(step)
    question = Both("Is it safe to ship?", "可以上线吗？")
    return ReportAnswer(question, TEXTS["ship"][decided], _SHIP.get(decided, "none"), shown)


def _decided(decision: Decision) -> list[Reason]:
    """What the gate decided, and why: the reasons of the rules that block and have no line of their
    own below."""
    note = [decision.note] if decision.note else []
    if decision.verdict == "promote":
        return [decision.reason, *note]
    failed, unknown = (
        [rule for rule in decision.rules if rule.outcome == outcome]
        for outcome in ("fail", "unknown")
    )
    blocking = [
        reason(
            "rules_failed" if rules is failed else "rules_unknown",
            rules=len(rules),
            names=listed(named),
        )
        for rules in (failed, unknown)
        if (named := [rule_words(rule.name) for rule in rules])
    ]
    reasons = [reason("rules_that_block", rules=len(decision.rules), blocking=blocking)]
    for rule in (*failed, *unknown):
        if rule.reason and rule.name not in _SHOWN_BELOW:
            name = rule_words(rule.name)
            reasons.append(
                reason("rule_and_why", rule=Both(capitalised(name.en), name.zh), why=rule.reason)
            )
    return [*reasons, *([decision.also_tried.own_reason] if decision.also_tried else []), *note]


def _star(report: Report) -> str:
    name = candidate(report)
    return (star(report, name) or star(report, opponent(report))) if name else ""


def star(report: Report, key: str) -> str:
    """For an arm or a metric whose numbers come from a simulator; a student learnt from its teacher
    and its RAG."""
    sources: dict[str, set[SimulatedRole]] = {
        "original": {"workbook"},
        "teacher": {"workbook", "teacher"},
        "base": {"workbook", "student"},
        **{each: {"workbook", "judge"} for each in (QUALITY, "judge_consistency")},
    }
    if key in ("sft", "rl", "champion"):
        simulated = bool(report.simulated)
    elif report.purchase and key in report.purchase.labels and key != "teacher":
        simulated = key in report.purchase.simulated
    else:
        simulated = not sources.get(key, {"workbook", "rag"}).isdisjoint(report.simulated)
    return "*" if simulated and key else ""


def arms_of(report: Report) -> dict[ArmName, ArmFigures]:
    """The report's arms, in the order in which they are shown."""
    names = sorted(report.arms, key=lambda name: _PLACES.index(name if name in ARMS else ""))
    return {name: report.arms[name] for name in names}


def arm_label_words(name: str, report: Report, *, head: bool = False) -> Both:
    """An arm's name in both languages; a teacher that is compared goes by its own."""
    own = report.purchase.labels.get(name) if report.purchase else None
    return Both(own, own) if own else arm_words(name, head=head)


def pair_words(a: ArmName, b: ArmName, report: Report) -> Both:
    """`RL − Teacher` in both languages."""
    left, right = (arm_label_words(name, report, head=True) for name in (a, b))
    return Both(f"{left.en} − {right.en}", f"{left.zh} − {right.zh}")


def main_comparison(report: Report) -> Comparison | None:
    """The comparison that the verdict is about: the challenger's, where a gate decided on one."""
    challenger = (report.decision.challenger,) if report.decision else ()
    gated = [(arm, rival) for arm in (*challenger, "rl", "sft") for rival in report.rivals]
    pairs = [(report.purchase.rival, "teacher")] if report.purchase else [*gated, *_MAIN_PAIRS]
    found = (
        between(report.comparisons, a, b).get(metric.name)
        for a, b in pairs
        for metric in report.metrics
    )
    return next((each for each in found if each and each.diff is not None), None)


def candidate(report: Report) -> ArmName | None:
    """The arm that the report is about: the gate's challenger, or the first of the main
    comparison."""
    if report.decision and report.decision.challenger in report.arms:
        return report.decision.challenger
    found = main_comparison(report)
    return found.a if found else None


def opponent(report: Report) -> ArmName:
    """The arm that the candidate is compared with: the gate's rival; for the teacher the original
    question."""
    found, name = main_comparison(report), candidate(report)
    if found and found.a == name:
        return found.b
    return "original" if name == "teacher" else report.rivals[0]
