"""Shares of simulated evaluations in which the gate releases a model, better and no better ones.

    make bench NAME=gate_power          (a minute of one core)

Simulated evaluations through the real `compare` and the real `decide`: answers that are right or
wrong by a probit model with effects of document and question that the arms share, and an effect of
the document on each arm alone, which is what makes whole groups differ. In the tables of the gain,
the judge's score, cost, latency, red team and alarms always pass, so that what is measured is the
worst case: a gate that hangs on retrieval alone. In the table of robustness all but the red team
passes, and the same simulated cases are tried by both rules. Intervals of the gain rest on 2,000
bootstrap resamples instead of 10,000, and so do p-values, which no rule looks at.

Writes benchmarks/results/gate_power.json and the tables in gate_power.md beside it.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Before numpy is loaded: threads that wait for a core which is not free are slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm

from qinglan import statistics
from qinglan.config import Gate
from qinglan.evaluation.gate import decide
from qinglan.evaluation.models import ArmFigures, Evaluation, Verdict
from qinglan.evaluation.red_team import RedTeamResult
from qinglan.grading.by_retrieval import RETRIEVAL_METRICS
from qinglan.statistics import ArmScores, Comparison, compare

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/gate_power.json"
PAGE = ROOT / "benchmarks/results/gate_power.md"
BEGIN = "<!-- benchmarks/gate_power.py begins -->"
END = "<!-- benchmarks/gate_power.py ends -->"

NULL_DRAWS = 1_000
POWER_DRAWS = 100
CASE_DRAWS = 500
RESAMPLES = 2_000
GAINS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.10)
TEACHER_TOP1 = 0.80
# Standard deviations beside the answer's own noise of 1. With them the difference of two arms has a
# standard error of 0.018 on 1,000 questions about 159 documents, as in the embedded profile's runs
# (0.016 to 0.024).
SHARED_GROUP = 1.5
OWN_GROUP = 1.5
SHARED_QUESTION = 2.5
SILENT = 0.10
CASES = 26
"""Cases of query rewriting that need not pass."""
FEW_CASES = 8
"""Cases of the medical recipe that need not pass: it has the fewest."""

METRIC = next(metric for metric in RETRIEVAL_METRICS if metric.name == "top1")

Bits = NDArray[np.float64]


class TestSet(NamedTuple):
    """So many questions about so many documents."""

    questions: int
    groups: int

    def __str__(self) -> str:
        return f"{self.questions:,} questions about {self.groups} documents"


TEST_SETS = (TestSet(500, 80), TestSet(1_000, 159), TestSet(2_000, 318), TestSet(2_000, 159))


class RedTeamSetting(NamedTuple):
    """The number of cases, and the chance with which student and teacher pass one."""

    cases: int
    student: float
    teacher: float

    @property
    def relation(self) -> str:
        """The student, measured by the teacher."""
        if self.student < self.teacher:
            return "worse"
        return "as good" if self.student == self.teacher else "better"


ROBUSTNESS = (
    RedTeamSetting(CASES, 0.95, 0.95),
    RedTeamSetting(CASES, 0.85, 0.85),
    RedTeamSetting(CASES, 0.7, 0.7),
    RedTeamSetting(FEW_CASES, 0.85, 0.85),
    RedTeamSetting(CASES, 0.95, 0.85),
    RedTeamSetting(CASES, 0.75, 0.85),
    RedTeamSetting(CASES, 0.65, 0.85),
    RedTeamSetting(CASES, 0.55, 0.85),
    RedTeamSetting(CASES, 0.45, 0.85),
    RedTeamSetting(FEW_CASES, 0.45, 0.85),
)


class Share(NamedTuple):
    """Share of the draws that had a verdict, with the exact 95% interval of Clopper and Pearson."""

    count: int
    draws: int

    @property
    def interval(self) -> tuple[float, float]:
        ends = binomtest(self.count, self.draws).proportion_ci(method="exact")
        return float(ends.low), float(ends.high)

    @property
    def text(self) -> str:
        low, high = self.interval
        return f"{self.count / self.draws:.1%} [{low:.1%}, {high:.1%}]"

    def as_dict(self) -> dict[str, float | int]:
        low, high = self.interval
        return {"count": self.count, "draws": self.draws, "low": low, "high": high}


PowerCurve = Mapping[float, Mapping[TestSet, Share]]
"""Share of models that are released, by their gain and the test set."""
Refusals = Mapping[RedTeamSetting, tuple[Share, Share]]
"""Share of models that are refused where every case must pass, and where the rates are compared."""


def right_answers(
    rng: np.random.Generator, groups: NDArray[np.int64], chances: Sequence[float]
) -> list[Bits]:
    """Each arm's answers: 1 for a first document that is the right one, else 0.

    Args:
        groups: the document of each question, by its number.
        chances: the chance of each arm that the document is the right one.
    """
    group_count = int(groups.max()) + 1
    question_count = len(groups)
    shared_by_group = rng.normal(0, SHARED_GROUP, group_count)[groups]
    shared = shared_by_group + rng.normal(0, SHARED_QUESTION, question_count)
    spread = np.sqrt(1 + SHARED_GROUP**2 + OWN_GROUP**2 + SHARED_QUESTION**2)
    answers = []
    for chance in chances:
        own = rng.normal(0, OWN_GROUP, group_count)[groups]
        noise = rng.normal(size=question_count)
        is_right = norm.ppf(chance) * spread + shared + own + noise > 0
        answers.append(is_right.astype(float))
    return answers


def evaluation(
    rng: np.random.Generator, test_set: TestSet, chances: dict[str, float], silent: str = ""
) -> Evaluation:
    """One simulated evaluation of `rl` against the teacher and, if it has a chance, the champion.

    Args:
        silent: the arm that does not give a share of its wrong answers at all.
    """
    groups = np.arange(test_set.questions) % test_set.groups
    ids = [f"{place:04d}" for place in range(test_set.questions)]
    group_of = dict(zip(ids, (f"{group:04d}" for group in groups), strict=True))
    answers = dict(zip(chances, right_answers(rng, groups, list(chances.values())), strict=True))
    is_mute = rng.random(test_set.questions) < SILENT
    if silent:
        answers[silent][(answers[silent] == 0) & is_mute] = np.nan
    scores: dict[str, ArmScores] = {}
    for name, bits in answers.items():
        bit_of = dict(zip(ids, bits.tolist(), strict=True))
        scores[name] = ArmScores(arm=name, scores={METRIC.name: bit_of})
    comparisons = [
        compare(scores["rl"], scores[rival], METRIC.name, group_of, RESAMPLES)
        for rival in chances
        if rival != "rl"
    ]
    return _evaluation(comparisons, {"rl": red_team_results(np.ones(1), must_pass=True)})


def red_team_results(passed: Bits, *, must_pass: bool) -> list[RedTeamResult]:
    return [
        RedTeamResult(
            case_id=f"{place}", name="", kind="emoji", must_pass=must_pass, passed=bool(bit)
        )
        for place, bit in enumerate(passed)
    ]


def _evaluation(
    comparisons: list[Comparison], red_team: dict[str, list[RedTeamResult]]
) -> Evaluation:
    questions = comparisons[0].n
    arms = {"rl": _cheap_arm(questions)}
    for comparison in comparisons:
        is_teacher = comparison.b == "teacher"
        arms[comparison.b] = _teacher_arm(questions) if is_teacher else _cheap_arm(questions)
    return Evaluation(
        metrics=[METRIC],
        arms=arms,
        comparisons=comparisons,
        examples=[],
        shared=[],
        red_team=red_team,
    )


def _cheap_arm(questions: int) -> ArmFigures:
    return ArmFigures(n=questions, latency_p50_ms=20, cost_per_1000_usd=0.01)


def _teacher_arm(questions: int) -> ArmFigures:
    return ArmFigures(n=questions, latency_p50_ms=900, cost_per_1000_usd=1.0)


def verdicts(
    test_set: TestSet, chances: dict[str, float], draws: int, seed: int, silent: str = ""
) -> Counter[Verdict]:
    """Number of each verdict of the gate over so many evaluations."""
    champion = "1" if "champion" in chances else None
    counts: Counter[Verdict] = Counter()
    for rng in np.random.default_rng([seed, *test_set]).spawn(draws):
        simulated = evaluation(rng, test_set, chances, silent)
        counts[decide(simulated, [], Gate(), champion).verdict] += 1
    return counts


def promotions(
    test_set: TestSet, chances: dict[str, float], draws: int, seed: int, silent: str = ""
) -> Share:
    """Share of so many evaluations after which the gate releases the model."""
    return Share(verdicts(test_set, chances, draws, seed, silent)["promote"], draws)


def refused(setting: RedTeamSetting, *, must_pass: bool) -> Share:
    """Share of models, better on retrieval, that are not released for their red team."""
    better = Comparison(
        a="rl",
        b="teacher",
        metric=METRIC.name,
        n=1_000,
        groups=159,
        diff=0.1,
        ci95=(0.05, 0.15),
        wins=0,
        ties=0,
        losses=0,
        p_value=None,
        detectable_diff=None,
    )
    cases, student, teacher = setting
    seeds = [5, cases, round(100 * student), round(100 * teacher)]
    count = 0
    for rng in np.random.default_rng(seeds).spawn(CASE_DRAWS):
        student_passed, teacher_passed = right_answers(rng, np.arange(cases), [student, teacher])
        red_team = {
            "rl": red_team_results(student_passed, must_pass=must_pass),
            "teacher": red_team_results(teacher_passed, must_pass=must_pass),
        }
        decision = decide(_evaluation([better], red_team), [], Gate(), None)
        if decision.verdict != "promote":
            count += 1
    return Share(count, CASE_DRAWS)


def robustness() -> Refusals:
    """Shares of models that either rule for the red team refuses, by setting."""
    return {
        setting: (refused(setting, must_pass=True), refused(setting, must_pass=False))
        for setting in ROBUSTNESS
    }


def standard_error(test_set: TestSet, draws: int = 50) -> float:
    """Standard error of the difference in top-1, as the bootstrap sees it.

    The simulation's spread is chosen so that this matches the embedded profile's runs.
    """
    chances = dict.fromkeys(("rl", "teacher"), TEACHER_TOP1)
    errors = []
    for rng in np.random.default_rng([9, *test_set]).spawn(draws):
        comparison = evaluation(rng, test_set, chances).comparisons[0]
        errors.append((comparison.detectable_diff or 0) / statistics.POWER_FACTOR)
    return float(np.mean(errors))


def false_promotions() -> dict[str, Share]:
    """Shares of models that are released though no better than what they must beat."""
    same = dict.fromkeys(("rl", "teacher"), TEACHER_TOP1)
    better = TEACHER_TOP1 + 0.1
    champion = {"rl": better, "teacher": TEACHER_TOP1, "champion": better}
    usual = TEST_SETS[1]
    silence = f"on {SILENT:.0%} of what it gets wrong, {usual}"
    shares = {
        f"as good as the teacher, {test_set}": promotions(test_set, same, NULL_DRAWS, 1)
        for test_set in TEST_SETS
    }
    shares[f"as good as the champion and 0.10 better than the teacher, {usual}"] = promotions(
        usual, champion, NULL_DRAWS, 2
    )
    shares[f"as good as the teacher, silent {silence}"] = promotions(
        usual, same, NULL_DRAWS, 4, "rl"
    )
    shares[f"as good as the teacher, which is silent {silence}"] = promotions(
        usual, same, NULL_DRAWS, 4, "teacher"
    )
    return shares


def power() -> PowerCurve:
    """Shares of models that are released, by how much better than the teacher they are."""
    curve: dict[float, dict[TestSet, Share]] = {}
    for gain in GAINS:
        chances = {"rl": TEACHER_TOP1 + gain, "teacher": TEACHER_TOP1}
        curve[gain] = {
            test_set: promotions(test_set, chances, POWER_DRAWS, 3) for test_set in TEST_SETS
        }
    return curve


def markdown(
    null: Mapping[str, Share], curve: PowerCurve, refusals: Refusals, error: float
) -> Iterator[str]:
    """The lines of the tables."""
    yield (
        f"Released although no better ({NULL_DRAWS:,} simulated evaluations each, exact 95% "
        f"intervals; the standard error of the difference is {error:.3f} on {TEST_SETS[1]}):"
    )
    yield ""
    yield "| The model is | Released |"
    yield "| --- | ---: |"
    for model, share in null.items():
        yield f"| {model} | {share.text} |"
    yield ""
    yield (
        f"Released, by how much better than the teacher's {TEACHER_TOP1:.2f} top-1 it really is "
        f"({POWER_DRAWS} each):"
    )
    yield ""
    yield f"| Gain | {' | '.join(map(str, TEST_SETS))} |"
    yield "| ---: |" + " ---: |" * len(TEST_SETS)
    for gain, shares in curve.items():
        cells = [shares[test_set].text for test_set in TEST_SETS]
        yield f"| {gain:.2f} | {' | '.join(cells)} |"
    yield ""
    yield (
        "Refused for its red team, by the chance with which student and teacher pass a case "
        f"({CASE_DRAWS} each). Where the student is as good or better, a refusal is false; where "
        "it is worse, a release is:"
    )
    yield ""
    yield "| The student is | Cases | Student | Teacher | Every case must pass | Rates |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for setting, (every_case, rates) in refusals.items():
        chances = f"{setting.cases} | {setting.student:.2f} | {setting.teacher:.2f}"
        yield f"| {setting.relation} | {chances} | {every_case.text} | {rates.text} |"


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the tables between the page's markers."""
    old = page.read_text(encoding="utf-8")
    new, replaced = re.subn(
        f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{text}\n{END}", old, flags=re.DOTALL
    )
    if replaced != 1:
        raise SystemExit(f"{page}: needs the lines {BEGIN} and {END} once each")
    page.write_text(new, encoding="utf-8")


def results(
    null: Mapping[str, Share], curve: PowerCurve, refusals: Refusals, error: float
) -> dict[str, object]:
    """The content of the results' file."""
    power_by_gain = {}
    for gain, shares in curve.items():
        by_test_set = {str(test_set): share.as_dict() for test_set, share in shares.items()}
        power_by_gain[f"{gain:g}"] = by_test_set
    robustness_rows = []
    for setting, (every_case, rates) in refusals.items():
        rules = {"every_case_must_pass": every_case.as_dict(), "rates": rates.as_dict()}
        robustness_rows.append(setting._asdict() | rules)
    return {
        "settings": {
            "resamples": RESAMPLES,
            "teacher_top1": TEACHER_TOP1,
            "standard_error": error,
            "gate": Gate().model_dump(mode="json"),
        },
        "false_promotions": {model: share.as_dict() for model, share in null.items()},
        "power": power_by_gain,
        "robustness": robustness_rows,
    }


def main() -> None:
    """Simulate, print and write down."""
    start = time.process_time()
    # The p-values are dear, and the gate does not look at them.
    statistics.MIN_FLIPS = RESAMPLES
    error = standard_error(TEST_SETS[1])
    null = false_promotions()
    curve = power()
    refusals = robustness()
    text = "\n".join(markdown(null, curve, refusals, error))
    print(f"\n{text}\n\n{time.process_time() - start:.0f} s of processor time")
    content = results(null, curve, refusals, error)
    RESULTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_page(text)


if __name__ == "__main__":
    main()
