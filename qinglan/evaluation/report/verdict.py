"""The conclusion of a run, the warnings, and the three answers at the head of the page.

These are: did it work, what does it cost, is it safe to ship.
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
    Rule,
    SimulatedRole,
    Tone,
    Weights,
)
from qinglan.evaluation.reasons import TEXTS, Reason, arm_words, listed, reason, rule_words
from qinglan.evaluation.red_team import RedTeamCounts
from qinglan.recipes import QUALITY, get_recipe
from qinglan.rows import ArmName
from qinglan.statistics import FEWEST_GROUPS, Comparison, between
from qinglan.text import (
    ARMS,
    Both,
    capitalised,
    joined,
    latency,
    number,
    signed,
    usd,
    with_interval,
)

STUDENTS = ("base", "sft", "rl", "champion")
_PLACES = ["original", "teacher", "", "base", "sft", "rl", "champion"]
"""Order of the arms on the page; further teachers stand where the empty name is."""
_MAIN_PAIRS = (
    ("rl", "teacher"),
    ("sft", "teacher"),
    ("rl", "sft"),
    ("sft", "base"),
    ("teacher", "original"),
)
"""Pairs that the verdict may be about, after those with the gate's rivals."""
_SHIP: dict[str, Tone] = {"promote": "better", "refuse": "worse", "undecided": "open"}
_SAME_COST = 0.05
"""Two prices that differ by no more than this share are the same."""
_LIMITS = {
    "cost": "max_cost_ratio",
    "latency": "max_latency_ratio",
    "latency_p95": "max_latency_p95_ms",
}
"""The gate's setting that a rule holds a model to, by the rule's name."""
_SHOWN_BELOW = ("red_team", "alarms")
"""Rules with a line of their own under the answer."""
_STAR_SOURCES: dict[str, set[SimulatedRole]] = {
    "original": {"workbook"},
    "teacher": {"workbook", "teacher"},
    "base": {"workbook", "student"},
    QUALITY: {"workbook", "judge"},
    "judge_consistency": {"workbook", "judge"},
}
"""Roles that the numbers of an arm or a metric depend on."""
_STAR_SOURCES_OF_OTHERS: set[SimulatedRole] = {"workbook", "rag"}


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


def simulated_roles_of(profile: Profile) -> list[SimulatedRole]:
    """The roles that embedded simulators play under this profile, of those its recipe asks."""
    recipe = get_recipe(profile.recipe)
    asked_roles = {*recipe.DISTILL_ROLES, *recipe.grader.services, "student", "workbook"}
    places: dict[SimulatedRole, str] = {
        "teacher": profile.teacher.base_url,
        "answerer": profile.answerer.base_url if profile.answerer else "",
        "judge": profile.judge.base_url,
        "rag": profile.rag.url,
        "student": profile.student.base_model,
        "workbook": "" if profile.data.sql else profile.data.workbook,
    }
    return [role for role, place in places.items() if role in asked_roles and place == EMBEDDED]


def verdict(report: Report) -> Conclusion:
    """The conclusion: which teacher to buy, or how the main comparison came out."""
    if report.purchase:
        purchase = report.purchase
        return Conclusion(purchase.tone, purchase.sentence.words, purchase.reading.words)
    comparison = main_comparison(report)
    if comparison is None or comparison.diff is None:
        return _without_comparison(report)
    a = arm_label_words(comparison.a, report)
    b = arm_label_words(comparison.b, report)
    metric = report.metric(comparison.metric)
    has_student = any(arm in report.arms for arm in STUDENTS)
    sentence = reason(
        "verdict_of_test" if has_student else "verdict",
        a=Both(capitalised(a.en), a.zh),
        b=b,
        mean_a=number(comparison.mean_a, metric.digits),
        mean_b=number(comparison.mean_b, metric.digits),
        metric=metric.words,
        n=comparison.n,
        difference=with_interval(comparison.diff, comparison.ci95, signed),
    )
    tone, reading = _reading(report, comparison)
    return Conclusion(tone, sentence.words, reading.words)


def _reading(report: Report, comparison: Comparison) -> tuple[Tone, Reason]:
    """The tone of the main comparison, and a sentence about how to read it."""
    a = arm_label_words(comparison.a, report)
    b = arm_label_words(comparison.b, report)
    selected = report.stage("select")
    if report.is_of_data and selected and not selected.rows_out:
        return "worse", reason("no_row_may_teach")
    if comparison.deciding_ci95 is None:
        few_groups = reason(
            "no_verdict_on_few_groups", groups=comparison.groups, needed=FEWEST_GROUPS
        )
        return "open", few_groups
    low, high = comparison.deciding_ci95
    if low <= 0 <= high:
        detectable = None
        if comparison.detectable_diff:
            detectable = reason("test_set_detects", difference=comparison.detectable_diff)
        return "open", reason("no_difference_shown", detectable=detectable)
    if low > 0:
        return "better", reason("shown_better", a=a, b=b)
    return "worse", reason("shown_worse", a=a, b=b)


def _without_comparison(report: Report) -> Conclusion:
    """The conclusion where nothing was compared; for a refresh, what became of the rows."""
    ingested = report.stage("ingest")
    dataset = report.stage("dataset")
    if report.is_of_data and ingested and dataset:
        sentence = reason("rows_in_dataset", rows_in=ingested.rows_in, rows_out=dataset.rows_out)
        reading = reason("nothing_compared_as")
    else:
        sentence = reason("nothing_compared")
        reading = reason("no_common_questions")
    return Conclusion("none", sentence.words, reading.words)


def simulator_warning(report: Report, *, marked: bool = True) -> Both | None:
    """A warning of what the numbers can't say; None where nothing was simulated.

    Args:
        marked: the numbers have a star.
    """
    if not report.simulated:
        return None
    roles = listed([TEXTS["simulated_roles"][role] for role in report.simulated])
    verb = "were" if len(report.simulated) > 1 else "was"
    if marked:
        numbers = Both("The numbers marked *", "带 * 的数字")
    else:
        numbers = Both("These numbers", "这些数字")
    if "teacher" in report.simulated:
        about = Both("GPT-5 or your data", " GPT-5 或您的数据")
    else:
        about = Both("your own service or data", "您自己的服务或数据")
    warning = reason(
        "simulated",
        roles=Both(f"{capitalised(roles.en)} {verb}", roles.zh),
        numbers=numbers,
        about=about,
    )
    return warning.words


def alarm_warning(report: Report) -> Both | None:
    """A warning that names RL's alarms; None where there was none."""
    alarms = list(alarm_reasons(report.alarms).values())
    if not alarms:
        return None
    return reason("alarm_warning", alarms=alarms).words


def continued_warning(report: Report) -> Both | None:
    """A warning about trainings that continued from a checkpoint of other code; None without
    one."""
    warnings = []
    for stage in report.stages:
        if stage.continued_anyway:
            modules = ", ".join(stage.continued_anyway)
            warning = reason("continued_over_other_code", stage=stage.name, modules=modules)
            warnings.append(warning.words)
    if not warnings:
        return None
    # Chinese sentences have no space between them.
    return joined(warnings, Both(" ", ""))


def weights_words(report: Report) -> Both | None:
    """The digests of the trained weights, and whether they are those that the repository states.

    It is None where nothing was trained.
    """
    weights = report.weights
    if weights is None:
        return None
    digests = []
    for stage, digest in weights.found.items():
        digests.append(reason("digest_of", stage=stage, digest=digest[:12]))
    merged = [reason("merged", arm=name, **figures) for name, figures in report.parity.items()]
    agreement = _agreement_words(weights)
    return reason("weights", digests=digests, agrees=agreement, merged=merged).words


def _agreement_words(weights: Weights) -> Reason | None:
    """A comparison of the digests with the expected ones; None where none are expected."""
    if not weights.expected:
        return None
    for stage, digest in weights.expected.items():
        if digest != weights.found[stage]:
            if weights.is_of_same:
                return reason("weights_differ", stage=stage)
            # Other settings, code or libraries explain other weights.
            return reason("weights_of_others", stage=stage)
    return reason("weights_agree")


def next_step(report: Report) -> Both | None:
    """Advice where the gate released no model.

    It is about the first rule that failed, otherwise the first that is unknown.
    """
    decision = report.decision
    profile = report.profile
    if decision is None or decision.verdict == "promote":
        return None
    failed, unknown = _blocking_rules(decision)
    rule = [*failed, *unknown][0]
    # The rule's reason says what to do.
    if rule.name == APPROVAL:
        return None
    is_over_limit = rule.name in _LIMITS and rule.outcome == "fail"
    if is_over_limit or rule.reason == reason("teacher_costs_nothing"):
        return reason("next_limit", setting=f"gate.{_LIMITS[rule.name]}", profile=profile).words
    if rule.name == "alarms":
        return reason("next_alarms", profile=profile).words
    if rule.outcome == "unknown" and not rule.name.startswith(GAIN):
        return reason("next_evaluate", rule=rule_words(rule.name), profile=profile).words
    return reason("next_pipeline", profile=profile).words


def _blocking_rules(decision: Decision) -> tuple[list[Rule], list[Rule]]:
    """The rules that failed, and those that are unknown."""
    failed = [rule for rule in decision.rules if rule.outcome == "fail"]
    unknown = [rule for rule in decision.rules if rule.outcome == "unknown"]
    return failed, unknown


def answers(report: Report) -> list[ReportAnswer]:
    """The answers in the order in which a product owner asks."""
    cost = _cost(report)
    if cost is None:
        return [_worked(report), _safe(report)]
    return [_worked(report), cost, _safe(report)]


def _worked(report: Report) -> ReportAnswer:
    conclusion = verdict(report)
    if report.purchase:
        label = ""
        if conclusion.tone != "none":
            label = report.purchase.labels[report.purchase.rival]
        question = Both("Which teacher to buy?", "该买哪个教师？")
        return ReportAnswer(question, Both(label, label), conclusion.tone, [conclusion.reading])
    question = Both("Did it work?", "有效吗？")
    word = TEXTS["worked"][conclusion.tone]
    mark = _candidates_star(report)
    marked_word = Both(f"{word.en}{mark}", f"{word.zh}{mark}")
    return ReportAnswer(question, marked_word, conclusion.tone, [conclusion.reading])


def _cost(report: Report) -> ReportAnswer | None:
    """The candidate's cost and speed; None where its cost is not known."""
    name = candidate(report) or ""
    own = report.arm(name)
    own_usd = own.cost_per_1000_usd
    if own_usd is None:
        return None
    # What a student saves is shown against the teacher, also where a student is its rival.
    rival_name = opponent(report)
    if "teacher" in report.arms and name != "teacher":
        rival_name = "teacher"
    rival = report.arm(rival_name)
    rival_usd = rival.cost_per_1000_usd
    rival_label = arm_label_words(rival_name, report)
    if rival_label in ARMS.values():
        rival_label = Both(f"the {rival_label.en}", rival_label.zh)
    mark = _candidates_star(report)
    price = with_interval(own_usd, own.cost_ci95, usd, usd)
    tone: Tone = "none"
    # A teacher that costs nothing is nothing to compare a price with.
    if rival_usd:
        share = f"{own_usd / rival_usd:.0%}" if own_usd / rival_usd >= 0.01 else "< 1%"
        word = Both(f"{share} of {rival_label.en}{mark}", f"{rival_label.zh}的 {share}{mark}")
        rival_price = with_interval(rival_usd, rival.cost_ci95, usd, usd)
        texts = [reason("price_beside", own=price, rival=rival_label, theirs=rival_price)]
        if abs(own_usd - rival_usd) > _SAME_COST * rival_usd:
            tone = "better" if own_usd < rival_usd else "worse"
    else:
        word = Both(f"{usd(own_usd)} per 1,000{mark}", f"每千次 {usd(own_usd)}{mark}")
        texts = [reason("price", own=price)]
    if own.latency_p50_ms is not None:
        if rival.latency_p50_ms:
            speed = reason(
                "speed_beside", own=_median(own), rival=rival_label, theirs=_median(rival)
            )
        else:
            speed = reason("speed", own=_median(own))
        texts.append(speed)
    question = Both("What does it cost?", "成本如何？")
    return ReportAnswer(question, word, tone, [text.words for text in texts])


def _median(arm: ArmFigures) -> Reason:
    def show_ms(value: float | None) -> str:
        return f"{latency(value)} ms"

    median = with_interval(arm.latency_p50_ms, arm.latency_p50_ci95, show_ms, latency)
    return reason("under_load", latency=median, load=arm.latency_load)


def _safe(report: Report) -> ReportAnswer:
    outcome: str = "none"
    name = candidate(report)
    texts = [reason("no_gate_asked")]
    # The gate may have decided on its fallback, which is not the arm of the main comparison.
    if report.decision:
        outcome = report.decision.verdict
        name = report.decision.challenger
        texts = _decided(report.decision)
    results = report.red_team.get(name or "")
    if results:
        texts.append(_red_team_passed(RedTeamCounts.of(results)))
    if report.training.rl is not None:
        alarms = len(report.alarms)
        texts.append(reason("alarms_in_rl", alarms=alarms) if alarms else reason("no_alarm_in_rl"))
    lines = [text.words for text in texts]
    step = next_step(report)
    if step:
        lines.append(step)
    question = Both("Is it safe to ship?", "可以上线吗？")
    return ReportAnswer(question, TEXTS["ship"][outcome], _SHIP.get(outcome, "none"), lines)


def _red_team_passed(counts: RedTeamCounts) -> Reason:
    failed = None
    if counts.failed:
        failed = reason("cases_failed", cases=counts.failed, blocking=counts.blocking)
    unchecked = None
    if counts.unchecked:
        unchecked = reason("cases_unchecked", cases=counts.unchecked)
    return reason(
        "red_team_passed",
        passed=counts.passed,
        cases=counts.cases,
        failed=failed,
        unchecked=unchecked,
    )


def _decided(decision: Decision) -> list[Reason]:
    """The gate's decision with its reasons.

    A rule that blocks and has a line of its own below is only named.
    """
    reasons = []
    if decision.verdict == "promote":
        reasons.append(decision.reason)
    else:
        reasons += _reasons_that_block(decision)
        if decision.also_tried:
            reasons.append(decision.also_tried.own_reason)
    if decision.note:
        reasons.append(decision.note)
    return reasons


def _reasons_that_block(decision: Decision) -> list[Reason]:
    failed, unknown = _blocking_rules(decision)
    blocking = []
    if failed:
        blocking.append(reason("rules_failed", rules=len(failed), names=_names_of(failed)))
    if unknown:
        blocking.append(reason("rules_unknown", rules=len(unknown), names=_names_of(unknown)))
    reasons = [reason("rules_that_block", rules=len(decision.rules), blocking=blocking)]
    for rule in (*failed, *unknown):
        if rule.reason and rule.name not in _SHOWN_BELOW:
            name = rule_words(rule.name)
            at_start = Both(capitalised(name.en), name.zh)
            reasons.append(reason("rule_and_why", rule=at_start, why=rule.reason))
    return reasons


def _names_of(rules: Sequence[Rule]) -> Both:
    return listed([rule_words(rule.name) for rule in rules])


def _candidates_star(report: Report) -> str:
    """The star of a number that compares the candidate with its opponent."""
    name = candidate(report)
    if name is None:
        return ""
    return star(report, name) or star(report, opponent(report))


def star(report: Report, key: str) -> str:
    """A star for an arm or a metric whose numbers come from a simulator, otherwise nothing."""
    if not key:
        return ""
    if key in ("sft", "rl", "champion"):
        # A student learnt from its teacher and its RAG.
        is_simulated = bool(report.simulated)
    elif report.purchase and key in report.purchase.labels and key != "teacher":
        is_simulated = key in report.purchase.simulated
    else:
        sources = _STAR_SOURCES.get(key, _STAR_SOURCES_OF_OTHERS)
        is_simulated = not sources.isdisjoint(report.simulated)
    return "*" if is_simulated else ""


def arms_of(report: Report) -> dict[ArmName, ArmFigures]:
    """The report's arms, in the order in which they are shown."""

    def place(name: ArmName) -> int:
        return _PLACES.index(name if name in ARMS else "")

    return {name: report.arms[name] for name in sorted(report.arms, key=place)}


def arm_label_words(name: str, report: Report, *, head: bool = False) -> Both:
    """An arm's name in both languages; a teacher that is compared goes by its own."""
    own_label = report.purchase.labels.get(name) if report.purchase else None
    if own_label:
        return Both(own_label, own_label)
    return arm_words(name, head=head)


def pair_words(a: ArmName, b: ArmName, report: Report) -> Both:
    """`RL − Teacher` in both languages."""
    a_words = arm_label_words(a, report, head=True)
    b_words = arm_label_words(b, report, head=True)
    return Both(f"{a_words.en} − {b_words.en}", f"{a_words.zh} − {b_words.zh}")


def main_comparison(report: Report) -> Comparison | None:
    """The comparison that the verdict is about.

    It is the challenger's where a gate decided on one, otherwise that of RL's or SFT's model, on
    the first metric on which the arms were compared.
    """
    for a, b in _pairs_of_verdict(report):
        comparisons = between(report.comparisons, a, b)
        # In the order in which the recipe's metrics decide.
        for metric in report.metrics:
            comparison = comparisons.get(metric.name)
            if comparison and comparison.diff is not None:
                return comparison
    return None


def _pairs_of_verdict(report: Report) -> list[tuple[ArmName, ArmName]]:
    """Pairs that the verdict may be about, in this order."""
    if report.purchase:
        return [(report.purchase.rival, "teacher")]
    students = ["rl", "sft"]
    if report.decision:
        students.insert(0, report.decision.challenger)
    pairs = []
    for student in students:
        pairs += [(student, rival) for rival in report.rivals]
    return [*pairs, *_MAIN_PAIRS]


def candidate(report: Report) -> ArmName | None:
    """The arm that the report is about.

    It is the gate's challenger, or the first of the main comparison.
    """
    if report.decision and report.decision.challenger in report.arms:
        return report.decision.challenger
    comparison = main_comparison(report)
    return comparison.a if comparison else None


def opponent(report: Report) -> ArmName:
    """The arm that the candidate is compared with.

    It is the gate's rival; for the teacher, the original question.
    """
    name = candidate(report)
    comparison = main_comparison(report)
    # Where the challenger was compared with nobody, the main comparison is another arm's.
    if comparison and comparison.a == name:
        return comparison.b
    return "original" if name == "teacher" else report.rivals[0]
