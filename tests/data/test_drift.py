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
    made = []
    for n in range(number):
        query = "".join(source.sample(TOPICS[topic], 3)) + str(source.randrange(9))
        found = Retrieved(ids=("a",), scores=(min(1.0, max(0.0, source.gauss(score, 0.1))),))
        known = {
            "answer": query,
            "original_retrieved": found,
            "answer_retrieved": found,
            "gold_id": query[:2],
        }
        made.append(
            Row(id=row_id("t", f"{query}{seed}-{n}"), tenant="t", query=query, source="q", **known)
        )
    return made


def summary(rows: list[Row]) -> RowSummary:
    builder = RowSummaryBuilder()
    for row in rows:
        builder.add(row)
    return builder.build()


@pytest.mark.parametrize("arrivals", [2, 60, 400])
def test_more_of_the_same_is_no_drift(arrivals: int):
    old, new = questions("supplement", 400), questions("supplement", arrivals, seed=1)
    report = drift("abc", summary(old), summary(new), summary([]), 0.2)
    found = report.arrivals
    assert set(found.distances) == {"vocabulary", "length", "original score", "rewrite score"}
    assert not report.warnings
    assert found.distances["vocabulary"].distance > (
        0.2 if arrivals == 2 else 0
    )  # though never 0 apart


def test_another_subject_is_drift_in_vocabulary_and_worse_scores_in_scores():
    old, new = questions("supplement", 400), questions("insurance", 60)
    report = drift("abc", summary(old), summary(new), summary([]), 0.2)
    found = report.arrivals
    assert [*report.warnings] == ["vocabulary of the new rows"]
    assert found.new_intents and found.new_intents.share == 1
    assert summary([old[0].model_copy(update={"gold_id": "d1; d2"})]).intents == {"d1": 1, "d2": 1}
    before, after = questions("supplement", 300), questions("supplement", 300, score=0.4)
    report = drift("abc", summary(before), summary([]), summary(after), 0.2)
    assert [*report.warnings] == ["original score of all rows", "rewrite score of all rows"]
    assert report.sentence.startswith(
        "No question came in since abc; failures 0.0% → 0.0%. Drift: original score of"
    )


def test_the_numbers_of_known_cases():
    same = [["a"], ["b"], ["b"]] * 20
    found = distance(same, same)
    assert found and (found.distance, found.excess, found.p_value) == (0, 0, 1)
    apart = distance([["a"]] * 50, [["b"]] * 50)
    assert apart and apart.distance == 1 and apart.p_value == pytest.approx(1 / 201)
    found_unseen = unseen({"a": 3, "b": 1}, {"a": 1, "c": 3})
    assert found_unseen and (found_unseen.share, found_unseen.expected) == (0.75, 0.25)
    unscored = [
        row.model_copy(update={"answer_retrieved": None}) for row in questions("supplement", 20)
    ]
    assert (
        "rewrite score"
        not in shift(summary(questions("supplement", 20)), summary(unscored)).distances
    )


def test_what_was_no_question_is_left_out():
    rows = questions("supplement", 3)
    made = summary([rows[0], rows[1].failed("duplicate"), rows[2].failed("teacher_refused")])
    assert (made.rows, made.failed, len(made.sample)) == (2, 1, 2)


def test_counters_stay_bounded():
    counter = BoundedCounter(limit=10)
    for n in range(100):
        counter.add(["often", f"once {n}"])
    assert counter.counts["often"] == 100
    assert len(counter.counts) <= 20 < counter.forgotten
