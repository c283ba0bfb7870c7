"""The gate: every rule passes, fails and says what is missing; the verdict follows from the rules
alone.

The benchmark that simulates it has the noise of real runs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import report_fixture
from pydantic import ValidationError

from benchmarks import gate_power
from qinglan.config import Gate
from qinglan.evaluation.gate import alarms_of, decide
from qinglan.evaluation.models import ArmFigures, Decision, Evaluation, Rule
from qinglan.evaluation.reasons import Reason, reason
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.grading.by_retrieval import RETRIEVAL_METRICS
from qinglan.runs.artifacts import StageResult
from qinglan.statistics import POWER_FACTOR, Comparison
from qinglan.training.alarms import Alarm

TEACHER = ArmFigures(n=1000, latency_p50_ms=900, latency_p95_ms=2000, cost_per_1000_usd=1.0)
STUDENT = ArmFigures(n=1000, latency_p50_ms=20, latency_p95_ms=60, cost_per_1000_usd=0.01)
GOOD = {"top1": (0.12, 0.07, 0.17), "quality": (0.02, -0.01, 0.05)}
"""Difference and ends of its interval."""
Ends = tuple[float, float, float]


def comparison(b: str, metric: str, ends: Ends, **more: Any) -> Comparison:
    diff, low, high = ends
    more |= {"metric": metric, "detectable_diff": 2.8 * (high - low) / 3.92}
    return report_fixture.comparison("rl", b, diff, (low, high), **more)


def tried(
    passed: bool | None = True, must_pass: bool = True, why: Reason | None = None
) -> RedTeamResult:
    why = why or (None if passed else reason("contains", word="pwned"))
    return RedTeamResult(
        case_id="injection-x",
        name="英文指令",
        kind="injection",
        must_pass=must_pass,
        passed=passed,
        reason=why,
    )


def evaluation(
    teacher: Mapping[str, Ends] = GOOD,
    champion: Mapping[str, Ends] | None = None,
    groups: int = 159,
    **update: Any,
) -> Evaluation:
    pairs = [("teacher", teacher), *([("champion", champion)] if champion else [])]
    whole = Evaluation(
        metrics=list(RETRIEVAL_METRICS),
        arms={"teacher": TEACHER, "rl": STUDENT},
        comparisons=[
            comparison(rival, metric, ends, groups=groups)
            for rival, ends_by_metric in pairs
            for metric, ends in ends_by_metric.items()
        ],
        examples=[],
        shared=[],
        red_team={"rl": [tried()]},
    )
    return whole.model_copy(update=update)


def decided(found: Evaluation | None = None, champion: str | None = None, **gate: Any) -> Decision:
    return decide(found or evaluation(), [], Gate(**gate), champion)


def rule(decision: Decision, name: str) -> Rule:
    return next(rule for rule in decision.rules if rule.name == name)


def why(decision: Decision, name: str) -> str:
    cause = rule(decision, name).reason
    return cause.render() if cause else ""


def alarm(step: int = 22) -> Alarm:
    return Alarm(step=step, name="reward_up_gold_down", action="warn", code="alarm_reward_hacked")


def test_a_better_and_cheaper_model_is_promoted_unless_more_is_demanded():
    decision = decided()
    assert decision.verdict == "promote"
    names = ["gain_vs_teacher", "quality_vs_teacher", "cost", "latency", "red_team", "alarms"]
    assert [rule.name for rule in decision.rules] == names
    assert decided(min_gain=0.06, smallest_gain=0.1).verdict == "promote"
    assert decided(min_gain=0.08, smallest_gain=0.1).verdict == "undecided"
    assert decided(min_gain=0.20, smallest_gain=0.3).verdict == "refuse"
    with pytest.raises(ValidationError, match="raise smallest_gain or lower min_gain"):
        Gate(min_gain=0.03)


@pytest.mark.parametrize(
    ("metric", "ends", "outcome"),
    [
        ("top1", (0.05, 0.001, 0.10), "pass"),
        ("top1", (0.05, 0.000, 0.10), "unknown"),
        ("top1", (-0.02, -0.10, 0.06), "unknown"),  # worse, but the test set is too small to say so
        ("top1", (0.01, -0.005, 0.029), "fail"),  # a gain worth finding is ruled out
        ("top1", (-0.10, -0.15, -0.05), "fail"),
        ("quality", (-0.05, -0.19, 0.09), "pass"),  # not worse by more than the margin
        ("quality", (-0.1, -0.21, 0.01), "unknown"),
        ("quality", (-0.5, -0.7, -0.3), "fail"),
    ],
)
def test_a_gain_and_a_loss_of_quality_by_where_the_interval_lies(
    metric: str, ends: Ends, outcome: str
):
    name = "gain_vs_teacher" if metric == "top1" else "quality_vs_teacher"
    assert rule(decided(evaluation(GOOD | {metric: ends})), name).outcome == outcome


@pytest.mark.parametrize(
    ("ends", "min_gain", "texts"),
    [
        (
            (0.0145, -0.001, 0.030),
            0.0,
            ("detects a gain of 0.022", "2,333 rows would be needed to tell"),
        ),
        (
            (0.02, -0.036, 0.076),
            0.01,
            ("detects a gain of 0.090", "16,000 rows would be needed to detect 0.030"),
        ),
    ],
)
def test_an_open_gain_says_how_many_rows_it_takes(
    ends: Ends, min_gain: float, texts: tuple[str, ...]
):
    cause = why(decided(evaluation(GOOD | {"top1": ends}), min_gain=min_gain), "gain_vs_teacher")
    assert [text for text in texts if text not in cause] == []


def test_the_rags_score_decides_only_without_labels():
    measured = evaluation({"mean_top1_score": (0.1, 0.05, 0.15), "quality": GOOD["quality"]})
    assert decided(measured).verdict == "promote"
    assert (
        rule(decided(measured), "gain_vs_teacher")
        .found.render()
        .startswith("mean top-1 score +0.100")
    )
    measured = evaluation(
        GOOD | {"top1": (-0.1, -0.15, -0.05), "mean_top1_score": (0.1, 0.05, 0.15)}
    )
    assert decided(measured).verdict == "refuse"


@pytest.mark.parametrize(
    ("found", "gate", "name", "reason_"),
    [
        (evaluation({"top1": GOOD["top1"]}), {}, "quality_vs_teacher", None),
        (evaluation(), {"challenger": "sft"}, "gain_vs_teacher", None),
        (evaluation(groups=9), {}, "gain_vs_teacher", reason("few_groups", groups=9, needed=10)),
        (evaluation(groups=1), {}, "quality_vs_teacher", reason("few_groups", groups=1, needed=10)),
        (evaluation(), {"champion": "3"}, "gain_vs_champion", reason("champion_not_compared")),
    ],
)
def test_what_was_not_measured_stays_open(
    found: Evaluation, gate: dict[str, Any], name: str, reason_: Reason | None
):
    decision = decided(found, **gate)
    assert (decision.verdict, rule(decision, name).outcome) == ("undecided", "unknown")
    assert reason_ in (None, rule(decision, name).reason)


def test_questions_that_one_arm_left_out_or_nobody_judged_count_against_the_challenger():
    quality = comparison("teacher", "quality", GOOD["quality"])
    left_out = [
        comparison("teacher", "top1", (0.06, 0.02, 0.10), one_sided=questions)
        for questions in (19, 21)
    ]
    few, many = (decided(evaluation(comparisons=[top1, quality])) for top1 in left_out)
    assert (few.verdict, many.verdict) == ("promote", "undecided")
    assert (
        "21 questions were left out because the challenger alone has no value there"
        in many.sentence
    )
    assert decided(evaluation(unjudged={"judge_unreadable": 39})).verdict == "promote"
    decision = decided(evaluation(unjudged={"judge_unreadable": 39, "teacher_timeout": 1}))
    quality_rule = rule(decision, "quality_vs_teacher")
    assert (quality_rule.outcome, quality_rule.required.render()) == (
        "unknown",
        "the 95% interval above −0.20",
    )
    assert "40 questions were left out because the judge's answer failed (40) or" in why(
        decision, quality_rule.name
    )


@pytest.mark.parametrize(
    ("ends", "only_a", "outcome"),
    [
        (
            (0.06, 0.02, 0.10),
            200,
            "pass",
        ),  # nothing that the rival left unanswered counts against the challenger
        ((0.06, 0.02, 0.10), 181, "pass"),
        ((0.06, 0.02, 0.10), 179, "unknown"),  # 21 that the challenger left do
        ((-0.02, -0.06, 0.02), 0, "unknown"),
        ((-0.02, -0.06, 0.02), 200, "unknown"),  # the rival's could all have been won
    ],
)
def test_a_rivals_silence_never_counts_against_the_challenger(
    ends: Ends, only_a: int, outcome: str
):
    comparisons = [
        comparison("teacher", "top1", ends, one_sided=200, only_a=only_a),
        comparison("teacher", "quality", GOOD["quality"], one_sided=only_a, only_a=only_a),
    ]
    decision = decided(evaluation(comparisons=comparisons))
    assert rule(decision, "gain_vs_teacher").outcome == outcome
    assert rule(decision, "quality_vs_teacher").outcome == "pass"


def test_the_champion_must_be_beaten_as_well():
    beaten, equal = (
        {"top1": (0.05, 0.01, 0.09), "quality": (0.0, -0.1, 0.1)},
        GOOD | {"top1": (0.0, -0.02, 0.02)},
    )
    decision = decided(evaluation(champion=beaten), champion="3")
    assert (decision.verdict, decision.champion) == ("promote", "3")
    assert decision.sentence.startswith(
        "Release the RL student in place of version 3: all 8 rules hold"
    )
    refused = decided(evaluation(champion=equal), champion="3")
    assert refused.verdict == "refuse"
    assert (
        "it is not better than the champion on top-1: a gain of 0.030 is ruled out"
        in refused.sentence
    )


@pytest.mark.parametrize(
    ("name", "student", "teacher", "gate", "outcome"),
    [
        ("cost", {"cost_per_1000_usd": 0.6}, {}, {}, "fail"),
        ("cost", {"cost_per_1000_usd": None}, {}, {}, "unknown"),
        ("cost", {}, {"cost_per_1000_usd": None}, {}, "unknown"),
        ("cost", {}, {"cost_per_1000_usd": 0.0}, {}, "unknown"),
        ("latency", {"latency_p50_ms": 1000}, {}, {}, "fail"),
        ("latency", {"latency_p50_ms": 1000}, {}, {"max_latency_ratio": 2}, "pass"),
        ("latency", {"latency_p50_ms": None}, {}, {}, "unknown"),
        ("latency", {}, {"latency_p50_ms": None}, {}, "pass"),
        ("latency_p95", {}, {}, {"max_latency_p95_ms": 50}, "fail"),
        ("latency_p95", {}, {}, {"max_latency_p95_ms": 60}, "pass"),
        ("latency_p95", {"latency_p95_ms": None}, {}, {"max_latency_p95_ms": 60}, "unknown"),
    ],
)
def test_cost_and_latency_beside_the_teachers_or_a_limit(
    name: str, student: dict[str, Any], teacher: dict[str, Any], gate: dict[str, Any], outcome: str
):
    arms = {"teacher": TEACHER.model_copy(update=teacher), "rl": STUDENT.model_copy(update=student)}
    decision = decided(evaluation(arms=arms), **gate)
    assert rule(decision, name).outcome == outcome
    assert ("set gate.max_cost_ratio: null" in decision.sentence) == (
        teacher == {"cost_per_1000_usd": 0.0}
    )
    unlimited = decided(evaluation(arms=arms), max_latency_ratio=None, max_cost_ratio=None)
    assert {rule.name for rule in unlimited.rules}.isdisjoint({"cost", "latency"})


def test_a_failed_case_that_must_pass_refuses_and_is_named():
    decision = decided(evaluation(red_team={"rl": [tried(), tried(False)]}))
    assert decision.verdict == "refuse"
    assert (
        "it fails the red team on “英文指令” (injection-x: contains 'pwned')" in decision.sentence
    )
    many = decided(evaluation(red_team={"rl": [tried(False)] * 5}))
    assert rule(many, "red_team").found.render() == "0 of 5 passed"
    assert why(many, "red_team").endswith("; and 2 more")
    broken = tried(False, why=reason("contains", word="a\nb"))
    assert len(decided(evaluation(red_team={"rl": [broken]})).sentence.splitlines()) == 1
    unchecked = tried(None, why=reason("rag_no_answer"))
    cases = ([tried(False, must_pass=False)], [], [unchecked], [unchecked, tried(False)])
    verdicts = [decided(evaluation(red_team={"rl": results})).verdict for results in cases]
    assert verdicts == ["promote", "promote", "undecided", "refuse"]
    assert decided(evaluation(red_team={})).verdict == "undecided"


def rates(mine: str, theirs: str, rival: str = "teacher") -> Evaluation:
    """Cases that need not pass, a letter each: `+` passed, `-` failed, `?` not checked."""
    red_team = {
        arm: [
            tried(
                {"+": True, "-": False, "?": None}[mark],
                must_pass=False,
                why=reason("rag_no_answer"),
            ).model_copy(update={"case_id": f"{n}", "name": f"用例{n}"})
            for n, mark in enumerate(marks)
        ]
        for arm, marks in (("rl", mine), (rival, theirs))
    }
    return evaluation(red_team=red_team, champion=GOOD)


@pytest.mark.parametrize(
    ("mine", "theirs", "outcome", "text"),
    [
        (
            "+" * 25 + "-",
            "+" * 26,
            "pass",
            "25 of 26 cases passed, the teacher 26: −0.038 [−0.115, 0.000]",
        ),
        (
            "+" * 26,
            "+" * 26,
            "pass",
            ": 0.000 [0.000, 0.000]; so many cases can show a loss of 0.154",
        ),
        ("-" * 26, "-" * 26, "pass", "0 of 26 cases passed, the teacher 0"),
        ("+" * 20 + "-" * 6, "+" * 26, "fail", "20 of 26 cases passed, the teacher 26: −0.231"),
        (
            "+" * 20 + "-" * 6,
            "+" * 18 + "-" * 4 + "+" * 4,
            "pass",
            "20 of 26 cases passed, the teacher 22",
        ),
        ("+?+++++-", "?+++++++", "pass", "5 of 6 cases passed, the teacher 6"),
        ("-" * 5, "+" * 5, "pass", "so few cases can show no loss"),
        ("????????", "++++++++", "unknown", "not compared"),
    ],
)
def test_robustness_is_a_rate_that_must_not_be_lower_than_the_rivals(
    mine: str, theirs: str, outcome: str, text: str
):
    robustness = rule(decided(rates(mine, theirs)), "robustness_vs_teacher")
    assert robustness.outcome == outcome
    assert text in robustness.found.render()
    assert ("2 left out" in robustness.found.render()) == ("?" in theirs)
    assert robustness.reason is None or robustness.outcome != "pass"


def test_lost_cases_are_named_and_a_champion_is_a_rival_too():
    lost = decided(rates("-" * 6 + "+" * 20, "-" + "+" * 25, "champion"), champion="3")
    assert lost.verdict == "refuse"
    assert "robustness_vs_teacher" not in {rule.name for rule in lost.rules}
    unnamed = decide(rates("-" * 26, "+" * 26), [], Gate(rivals=("sft",)), None)
    assert rule(unnamed, "robustness_vs_teacher").outcome == "fail", (
        "its answers are there, whoever else is a rival"
    )
    assert why(lost, "robustness_vs_champion").startswith(
        "it passes fewer of the red team's cases than the champion"
    )
    assert "“用例1” (1: " in lost.sentence
    assert "用例0" not in lost.sentence
    assert "; and 2 more" in lost.sentence


def test_earlier_evaluations_on_the_test_split_are_told_and_decide_nothing():
    assert decided().note is None
    decision = decided(evaluation(earlier_evaluations=9))
    assert decision.verdict == "promote"
    assert decision.note
    assert "before this one: 9. Among 10 models" in decision.note.words.en
    assert "22%" in decision.note.words.zh


def test_an_alarm_refuses_unless_it_is_accepted():
    refused = decide(evaluation(), [alarm(), alarm(40)], Gate(), None)
    assert refused.verdict == "refuse"
    assert "reward_up_gold_down (step 22, 40)" in refused.sentence
    accepted = decide(evaluation(), [alarm()], Gate(accepted_alarms=("reward_up_gold_down",)), None)
    assert accepted.verdict == "promote"
    assert "reward_up_gold_down (step 22)" in rule(accepted, "alarms").found.render()
    of_sft = decide(evaluation(), [alarm()], Gate(challenger="sft"), None)
    assert rule(of_sft, "alarms").outcome == "pass", "RL's alarms say nothing about the SFT student"


@pytest.mark.parametrize(
    ("step", "chosen", "counts"),
    [(22, 12, False), (22, 13, True), (22, 90, True), (3, 0, False), (3, 1, True)],
)
def test_alarms_count_from_the_window_that_holds_the_chosen_step(
    step: int, chosen: int, counts: bool
):
    details = {"alarms": [alarm(step).model_dump()], "summary": {"chosen_step": chosen}}
    trained = StageResult(stage="rl", key="k", run_id="r", seconds=0, details=details)
    assert alarms_of(trained, 10) == ([alarm(step)] if counts else [])


def test_the_simulated_noise_is_that_of_real_runs_and_decides_what_differs_much():
    test_set, same = gate_power.TEST_SETS[1], {"rl": 0.8, "teacher": 0.8}
    comparisons = [
        gate_power.evaluation(np.random.default_rng(i), test_set, same).comparisons[0]
        for i in range(5)
    ]
    errors = [(simulated.detectable_diff or 0) / POWER_FACTOR for simulated in comparisons]
    assert 0.016 <= float(np.mean(errors)) <= 0.024
    small = gate_power.TestSet(500, 80)
    assert gate_power.verdicts(small, {"rl": 0.6, "teacher": 0.8}, 5, seed=0) == {"refuse": 5}
    assert gate_power.verdicts(small, {"rl": 0.99, "teacher": 0.7}, 5, seed=0) == {"promote": 5}
