"""How often does the gate release a model that is no better, and how often one that is?

    make bench NAME=gate_power          (a minute of one core)

Simulated evaluations through the real `compare` and the real `decide`: answers that are right or
wrong by a probit model with effects of document and question that the arms share, and an effect of
the document on each arm alone, which is what makes whole groups differ. In the tables of the gain,
the judge's score, cost, latency, red team and alarms always pass, so that what is measured is the
worst case: a gate that hangs on retrieval alone. In the table of robustness all but the red team
passes, and the same simulated cases are tried by both rules. Intervals of the gain rest on 2,000
bootstrap resamples instead of 10,000, and so do p-values, which no rule looks at.

Writes benchmarks/results/gate_power.json and the tables in docs/reference/gate.md.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before numpy: threads that wait for a core which is not free are slow

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
BEGIN, END = "<!-- benchmarks/gate_power.py begins -->", "<!-- benchmarks/gate_power.py ends -->"

NULL_DRAWS, POWER_DRAWS, CASE_DRAWS, RESAMPLES = 1_000, 100, 500, 2_000
GAINS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.10)
TEACHER_TOP1 = 0.80
SHARED_GROUP, OWN_GROUP, SHARED_QUESTION = 1.5, 1.5, 2.5
"""Standard deviations beside the answer's own noise of 1. With them the difference of two arms has
a standard error of
0.018 on 1,000 questions about 159 documents, as in the embedded profile's runs (0.016 to 0.024)."""
SILENT = 0.10
CASES, FEW_CASES = 26, 8
"""Cases that need not pass: of query rewriting, and of the medical recipe, which has the fewest."""
ROBUSTNESS = (
    *(
        (CASES, 0.95, 0.95),
        (CASES, 0.85, 0.85),
        (CASES, 0.7, 0.7),
        (FEW_CASES, 0.85, 0.85),
        (CASES, 0.95, 0.85),
    ),
    *(
        (CASES, 0.75, 0.85),
        (CASES, 0.65, 0.85),
        (CASES, 0.55, 0.85),
        (CASES, 0.45, 0.85),
        (FEW_CASES, 0.45, 0.85),
    ),
)
"""How many cases there are, and with what chance student and teacher pass one."""

METRIC = next(metric for metric in RETRIEVAL_METRICS if metric.name == "top1")

Bits = NDArray[np.float64]


class TestSet(NamedTuple):
    """So many questions about so many documents."""

    questions: int
    groups: int

    def __str__(self) -> str:
        return f"{self.questions:,} questions about {self.groups} documents"


TEST_SETS = (TestSet(500, 80), TestSet(1_000, 159), TestSet(2_000, 318), TestSet(2_000, 159))


class Share(NamedTuple):
    """How many of the draws had a verdict, with the exact 95% interval of Clopper and Pearson."""

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


def right_answers(
    rng: np.random.Generator, groups: NDArray[np.int64], chances: Sequence[float]
) -> list[Bits]:
    """Whether each arm's first document is the right one, for arms whose chances of it are
    these."""
    count, questions = int(groups.max()) + 1, len(groups)
    shared = rng.normal(0, SHARED_GROUP, count)[groups] + rng.normal(0, SHARED_QUESTION, questions)
    spread = np.sqrt(1 + SHARED_GROUP**2 + OWN_GROUP**2 + SHARED_QUESTION**2)
    return [
        (norm.ppf(p) * spread + shared + rng.normal(0, OWN_GROUP, count)[groups] + rng.normal(size=questions) > 0)
        .astype(float)
        for p in chances
    ]  # fmt: skip


def evaluation(
    rng: np.random.Generator, test_set: TestSet, chances: dict[str, float], silent: str = ""
) -> Evaluation:
    """One simulated evaluation of `rl` against the teacher and, where it has a chance, the
    champion.

    Args:
        silent: the arm that does not give a share of its wrong answers at all.
    """
    groups = np.arange(test_set.questions) % test_set.groups
    ids = [f"{place:04d}" for place in range(test_set.questions)]
    group_of = dict(zip(ids, (f"{group:04d}" for group in groups), strict=True))
    answers = dict(zip(chances, right_answers(rng, groups, list(chances.values())), strict=True))
    mute = rng.random(test_set.questions) < SILENT
    if silent:
        answers[silent][(answers[silent] == 0) & mute] = np.nan
    scores = {
        name: ArmScores(arm=name, scores={METRIC.name: dict(zip(ids, bits.tolist(), strict=True))})
        for name, bits in answers.items()
    }
    found = [
        compare(scores["rl"], scores[b], METRIC.name, group_of, RESAMPLES)
        for b in chances
        if b != "rl"
    ]
    return _evaluation(found, {"rl": tried(np.ones(1), must_pass=True)})


def tried(passed: Bits, *, must_pass: bool) -> list[RedTeamResult]:
    return [
        RedTeamResult(
            case_id=f"{place}", name="", kind="emoji", must_pass=must_pass, passed=bool(each)
        )
        for place, each in enumerate(passed)
    ]


def _evaluation(
    comparisons: list[Comparison], red_team: dict[str, list[RedTeamResult]]
) -> Evaluation:
    arms = ["rl", *(found.b for found in comparisons)]
    return Evaluation(
        metrics=[METRIC],
        arms={name: _arm(comparisons[0].n, cheap=name != "teacher") for name in arms},
        comparisons=comparisons,
        examples=[],
        shared=[],
        red_team=red_team,
    )


def _arm(questions: int, *, cheap: bool) -> ArmFigures:
    return ArmFigures(
        n=questions, latency_p50_ms=20 if cheap else 900, cost_per_1000_usd=0.01 if cheap else 1.0
    )


def verdicts(
    test_set: TestSet, chances: dict[str, float], draws: int, seed: int, silent: str = ""
) -> Counter[Verdict]:
    """What the gate says to each of so many evaluations."""
    champion = "1" if "champion" in chances else None
    streams = np.random.default_rng([seed, *test_set]).spawn(draws)
    found = (evaluation(rng, test_set, chances, silent) for rng in streams)
    return Counter(decide(one, [], Gate(), champion).verdict for one in found)


def refused(cases: int, student: float, teacher: float, *, must_pass: bool) -> Share:
    """How often a model that is better on retrieval is not released for its red team."""
    count, better = 0, Comparison(
        a="rl", b="teacher", metric=METRIC.name, n=1_000, groups=159, diff=0.1, ci95=(0.05, 0.15), wins=0, ties=0,
        losses=0, p_value=None, detectable_diff=None,
    )  # fmt: skip
    for rng in np.random.default_rng([5, cases, round(100 * student), round(100 * teacher)]).spawn(
        CASE_DRAWS
    ):
        mine, theirs = right_answers(rng, np.arange(cases), [student, teacher])
        red_team = {
            "rl": tried(mine, must_pass=must_pass),
            "teacher": tried(theirs, must_pass=must_pass),
        }
        count += decide(_evaluation([better], red_team), [], Gate(), None).verdict != "promote"
    return Share(count, CASE_DRAWS)


def robustness() -> dict[tuple[int, float, float], tuple[Share, Share]]:
    """By cases and chances, how often every case must pass refuses, and how often the rates do."""
    return {
        each: (refused(*each, must_pass=True), refused(*each, must_pass=False))
        for each in ROBUSTNESS
    }


def standard_error(test_set: TestSet, draws: int = 50) -> float:
    """Of the difference in top-1, as the bootstrap sees it: what the simulation is matched by."""
    streams = np.random.default_rng([9, *test_set]).spawn(draws)
    found = (
        evaluation(rng, test_set, dict.fromkeys(("rl", "teacher"), TEACHER_TOP1)) for rng in streams
    )
    return float(
        np.mean(
            [(one.comparisons[0].detectable_diff or 0) / statistics.POWER_FACTOR for one in found]
        )
    )


def false_promotions() -> dict[str, Share]:
    """Models that are no better than what they must beat, by what that is."""
    same = dict.fromkeys(("rl", "teacher"), TEACHER_TOP1)
    found = {
        f"as good as the teacher, {test_set}": verdicts(test_set, same, NULL_DRAWS, 1)["promote"]
        for test_set in TEST_SETS
    }
    champion = {"rl": TEACHER_TOP1 + 0.1, "teacher": TEACHER_TOP1, "champion": TEACHER_TOP1 + 0.1}
    found[f"as good as the champion and 0.10 better than the teacher, {TEST_SETS[1]}"] = verdicts(
        TEST_SETS[1], champion, NULL_DRAWS, 2
    )["promote"]
    for arm, which in (("rl", "silent"), ("teacher", "which is silent")):
        found[
            f"as good as the teacher, {which} on {SILENT:.0%} of what it gets wrong, {TEST_SETS[1]}"
        ] = verdicts(TEST_SETS[1], same, NULL_DRAWS, 4, arm)["promote"]
    return {what: Share(count, NULL_DRAWS) for what, count in found.items()}


def power() -> dict[float, dict[TestSet, Share]]:
    """Models that are better than the teacher by so much: how often are they promoted?"""
    return {
        gain: {
            test_set: Share(
                verdicts(
                    test_set, {"rl": TEACHER_TOP1 + gain, "teacher": TEACHER_TOP1}, POWER_DRAWS, 3
                )["promote"],
                POWER_DRAWS,
            )
            for test_set in TEST_SETS
        }
        for gain in GAINS
    }


def markdown(
    null: dict[str, Share],
    curve: dict[float, dict[TestSet, Share]],
    robust: dict[tuple[int, float, float], tuple[Share, Share]],
    error: float,
) -> str:
    """The tables."""
    lines = [
        f"Released although no better ({NULL_DRAWS:,} simulated evaluations each, exact 95% intervals; the standard "
        f"error of the difference is {error:.3f} on {TEST_SETS[1]}):",
        "",
        "| The model is | Released |",
        "| --- | ---: |",
        *(f"| {what} | {share.text} |" for what, share in null.items()),
        "",
        f"Released, by how much better than the teacher's {TEACHER_TOP1:.2f} top-1 it really is ({POWER_DRAWS} each):",
        "",
        "| Gain | " + " | ".join(map(str, TEST_SETS)) + " |",
        "| ---: |" + " ---: |" * len(TEST_SETS),
        *(
            f"| {gain:.2f} | " + " | ".join(shares[test_set].text for test_set in TEST_SETS) + " |"
            for gain, shares in curve.items()
        ),
        "",
        f"Refused for its red team, by the chance with which student and teacher pass a case ({CASE_DRAWS} each). "
        "Where the student is as good or better, a refusal is false; where it is worse, a release is:",
        "",
        "| The student is | Cases | Student | Teacher | Every case must pass | Rates |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {'worse' if student < teacher else 'as good' if student == teacher else 'better'} | {cases} "
            f"| {student:.2f} | {teacher:.2f} | {every.text} | {rates.text} |"
            for (cases, student, teacher), (every, rates) in robust.items()
        ),
    ]
    return "\n".join(lines)


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the tables between the page's markers."""
    old = page.read_text(encoding="utf-8")
    new, found = re.subn(
        f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{text}\n{END}", old, flags=re.DOTALL
    )
    if found != 1:
        raise SystemExit(f"{page}: needs the lines {BEGIN} and {END} once each")
    page.write_text(new, encoding="utf-8")


def main() -> None:
    """Simulate, print and write down."""
    start = time.process_time()
    statistics.MIN_FLIPS = RESAMPLES  # p-values are dear, and the gate does not look at them
    error = standard_error(TEST_SETS[1])
    null, curve, robust = false_promotions(), power(), robustness()
    text = markdown(null, curve, robust, error)
    print(f"\n{text}\n\n{time.process_time() - start:.0f} s of processor time")
    content = {
        "settings": {
            "resamples": RESAMPLES,
            "teacher_top1": TEACHER_TOP1,
            "standard_error": error,
            "gate": Gate().model_dump(mode="json"),
        },
        "false_promotions": {what: share.as_dict() for what, share in null.items()},
        "power": {
            f"{gain:g}": {str(t): s.as_dict() for t, s in shares.items()}
            for gain, shares in curve.items()
        },
        "robustness": [
            {"cases": cases, "student": student, "teacher": teacher}
            | {"every_case_must_pass": every.as_dict(), "rates": rates.as_dict()}
            for (cases, student, teacher), (every, rates) in robust.items()
        ],
    }
    RESULTS.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_page(text)


if __name__ == "__main__":
    main()
