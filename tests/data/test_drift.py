"""Drift beyond chance: the same population is none, another one is, and few rows claim nothing."""

import random

import pytest

from qinglan.data.versions.drift import (
    BoundedCounter,
    RowSummary,
    RowSummaryBuilder,
    distance,
    drift,
    shift,
    unseen,
)
from qinglan.rows import Retrieved, Row, row_id

TOPICS = {
    "supplement": (
        "鱼油",
        "钙片",
        "蛋白粉",
        "益生菌",
        "维生素",
        "怎么吃",
        "多少钱",
        "饭前",
        "孕妇",
        "老人",
    ),
    "insurance": ("车险", "理赔", "保单", "续保", "定损", "报案", "免赔", "额度", "退保", "受益人"),
}


def questions(topic: str, number: int, seed: int = 0, score: float = 0.7) -> list[Row]:
    source = random.Random(f"{topic}{seed}")
    rows = []
    for n in range(number):
        query = "".join(source.sample(TOPICS[topic], 3)) + str(source.randrange(9))
        top1_score = min(1.0, max(0.0, source.gauss(score, 0.1)))
        retrieved = Retrieved(ids=("a",), scores=(top1_score,))
        row = Row(
            id=row_id("t", f"{query}{seed}-{n}"),
            tenant="t",
            query=query,
            source="q",
            answer=query,
            original_retrieved=retrieved,
            answer_retrieved=retrieved,
            gold_id=query[:2],
        )
        rows.append(row)
    return rows


def summary(rows: list[Row]) -> RowSummary:
    builder = RowSummaryBuilder()
    for row in rows:
        builder.add(row)
    return builder.build()


@pytest.mark.parametrize("arrivals", [2, 60, 400])
def test_more_of_the_same_is_no_drift(arrivals: int):
    old = questions("supplement", 400)
    new = questions("supplement", arrivals, seed=1)
    report = drift("abc", summary(old), summary(new), summary([]), 0.2)
    distances = report.arrivals.distances
    assert set(distances) == {"vocabulary", "length", "original score", "rewrite score"}
    assert not report.warnings
    least = 0.2 if arrivals == 2 else 0
    assert distances["vocabulary"].distance > least, "two samples are never 0 apart"


def test_another_subject_is_drift_in_vocabulary_and_worse_scores_in_scores():
    old = questions("supplement", 400)
    new = questions("insurance", 60)
    report = drift("abc", summary(old), summary(new), summary([]), 0.2)
    assert [*report.warnings] == ["vocabulary of the new rows"]
    assert report.arrivals.new_intents is not None
    assert report.arrivals.new_intents.share == 1
    assert summary([old[0].model_copy(update={"gold_id": "d1; d2"})]).intents == {"d1": 1, "d2": 1}
    before = questions("supplement", 300)
    after = questions("supplement", 300, score=0.4)
    report = drift("abc", summary(before), summary([]), summary(after), 0.2)
    assert [*report.warnings] == ["original score of all rows", "rewrite score of all rows"]
    assert report.sentence.startswith(
        "No question came in since abc; failures 0.0% → 0.0%. Drift: original score of"
    )


def test_the_numbers_of_known_cases():
    same = [["a"], ["b"], ["b"]] * 20
    near = distance(same, same)
    assert near is not None
    assert (near.distance, near.excess, near.p_value) == (0, 0, 1)
    apart = distance([["a"]] * 50, [["b"]] * 50)
    assert apart is not None
    assert apart.distance == 1
    assert apart.p_value == pytest.approx(1 / 201)
    share_unseen = unseen({"a": 3, "b": 1}, {"a": 1, "c": 3})
    assert share_unseen is not None
    assert (share_unseen.share, share_unseen.expected) == (0.75, 0.25)
    rows = questions("supplement", 20)
    unscored = [row.with_retrieved(row.original_retrieved, None) for row in rows]
    assert "rewrite score" not in shift(summary(rows), summary(unscored)).distances


def test_what_was_no_question_is_left_out():
    rows = questions("supplement", 3)
    counted = summary([rows[0], rows[1].failed("duplicate"), rows[2].failed("teacher_refused")])
    assert (counted.rows, counted.failed, len(counted.sample)) == (2, 1, 2)


def test_counters_stay_bounded():
    counter = BoundedCounter(limit=10)
    for n in range(100):
        counter.add(["often", f"once {n}"])
    assert counter.counts["often"] == 100
    assert len(counter.counts) <= 20 < counter.forgotten
