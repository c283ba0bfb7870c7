"""The sample: by risk and at random, each row once, the same for the same rows."""

from collections.abc import Iterator
from typing import Any

import pytest

from qinglan.config import Select
from qinglan.data.review.sample import ANSWER_STRATA, CONTROL, STRATA, ReviewSample, draw_sample
from qinglan.rows import Retrieved, Row

CONFIG = Select(min_top1_score=0.6)


def found(score: float, *ids: str) -> Retrieved:
    return Retrieved(ids=ids or ("d",), scores=(score,), titles=("",))


def row(number: int = 0, **changes: Any) -> Row:
    good = {"answer": "改写", "judge_score": 3.5, "answer_retrieved": found(0.9), "original_retrieved": found(0.5)}
    return Row(id=f"r{number}", tenant="t", query="头疼", source="q.csv:2", **(good | changes))


def names(sample: ReviewSample) -> dict[str, tuple[str, ...]]:
    return {each.row.id: tuple(stratum.name for stratum in each.strata) for each in sample.rows}


@pytest.mark.parametrize(
    ("changes", "strata"),
    [
        ({}, ("control",)),
        ({"judge_score": 2.9}, ("control", "judge_low")),
        ({"judge_score": 4.0, "answer_retrieved": found(0.52)}, ("control", "judge_high")),
        ({"judge_score": 4.0, "answer_retrieved": found(0.6)}, ("control", "just_above")),
        ({"answer_retrieved": found(0.59)}, ("control", "just_below")),
        ({"answer_retrieved": found(0.54), "original_retrieved": found(0.55)}, ("control", "worse_than_original")),
        ({"gold_id": "g"}, ("control", "gold_missed")),
        ({"gold_id": "d"}, ("control",)),
    ],
)
def test_what_is_drawn_and_why(changes: dict[str, Any], strata: tuple[str, ...]):
    assert names(draw_sample([row(**changes)], CONFIG, 5)) == {"r0": strata}


@pytest.mark.parametrize("reason", ["teacher_timeout", "empty_query", "near_duplicate_of_test"])
def test_what_no_verdict_could_change_is_not_drawn(reason: str):
    rewrite = "改写" if reason.startswith("near") else None
    assert not draw_sample([row(answer=rewrite, gold_id="g").failed(reason)], CONFIG, 5).rows
    dropped = row(answer=None, answer_retrieved=None).failed("teacher_refused")
    assert names(draw_sample([dropped], CONFIG, 5)) == {"r0": ("by_rule",)}  # may be corrected


def mixed(count: int = 2000) -> Iterator[Row]:
    """Mostly good rows, and some of every kind of risk."""
    for n in range(count):
        risk = {
            0: {"judge_score": 1.0},
            1: {"judge_score": 5.0, "answer_retrieved": found(0.3), "original_retrieved": found(0.1)},
            2: {"answer_retrieved": found(0.62)},
            3: {"answer_retrieved": found(0.58)},
            4: {"original_retrieved": found(0.95)},
            5: {"gold_id": "g"},
        }.get(n % 20, {})
        made = row(n, **risk)
        yield (
            made.failed("below_threshold") if n % 20 in (1, 3) else made.failed("refusal_text") if n % 20 == 6 else made
        )


def test_every_stratum_gets_its_share():
    sample = draw_sample(mixed(), CONFIG, 200)
    counts = {s.name: sum(s in each.strata for each in sample.rows) for s in STRATA}
    assert len(sample.rows) == len(names(sample)) == 200
    assert all(counts[stratum.name] >= stratum.share * 200 for stratum in STRATA)
    assert sample.population["judge_low"] == 100


def test_the_sample_depends_neither_on_the_order_of_the_rows_nor_on_its_size():
    small, big = draw_sample(mixed(), CONFIG, 40), draw_sample(mixed(), CONFIG, 80)
    assert small == draw_sample(reversed(list(mixed())), CONFIG, 40)
    controls, more = ({i for i, strata in names(each).items() if "control" in strata} for each in (small, big))
    assert controls <= more


def test_places_that_a_stratum_cannot_fill_go_to_the_others():
    rows = [row(n, judge_score=1.0) for n in range(100)] + [row(n).failed("refusal_text") for n in range(100, 103)]
    sample = draw_sample(rows, CONFIG, 40)
    assert len(sample.rows) == 40
    assert sum("by_rule" in strata for strata in names(sample).values()) == 3
    assert len(draw_sample(rows, CONFIG, 500).rows) == 103


def test_controls_are_a_random_sample_of_what_teaches():
    """Their share of each kind is the population's, though the risky kinds are drawn far more often."""
    rows = list(mixed(20_000))
    teaching = [r for r in rows if r.status == "ok"]
    share = sum(r.judge_score == 1.0 for r in teaching) / len(teaching)
    controls = [each.row for each in draw_sample(rows, CONFIG, 2000).rows if CONTROL in each.strata]
    assert {r.status for r in controls} == {"ok"}
    assert abs(sum(r.judge_score == 1.0 for r in controls) / len(controls) - share) < 0.03


def answer(number: int = 0, **changes: Any) -> Row:
    good = {"answer": "答", "judge_score": 3.5, "parts": {"format": 1.0, "safe": 1.0}}
    return Row(id=f"a{number}", tenant="t", query="头疼", source="q.csv:2", **(good | changes))


@pytest.mark.parametrize(
    ("changes", "strata"),
    [
        ({}, ("control",)),
        ({"judge_score": 2.9}, ("control", "low_score")),
        ({"judge_score": 4.0, "parts": {"format": 1.0, "safe": 0.4}}, ("control", "high_score_low_part", "low_part")),
        ({"judge_score": None, "parts": {"safe": 0.9}}, ("control", "low_part")),
        ({"pool": "red_team"}, ("control", "in_pool")),
        ({"parts": None, "judge_score": None}, ("control",)),
    ],
)
def test_which_answers_are_drawn_and_why(changes: dict[str, Any], strata: tuple[str, ...]):
    assert names(draw_sample([answer(**changes)], CONFIG, 5, ANSWER_STRATA)) == {"a0": strata}
