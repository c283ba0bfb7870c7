"""Selection marks rows; it never loses, reorders or rewrites them."""

from typing import Any

import pytest

from qinglan.config import Select
from qinglan.rows import Retrieved, Row
from qinglan.selection import count_reasons, select

CONFIG = Select(min_top1_score=0.6, max_rewrite_chars=10)


def scored(*scores: float) -> Retrieved:
    return Retrieved(ids=tuple("abc"[: len(scores)]), scores=scores, titles=("",) * len(scores))


def row(**changes: Any) -> Row:
    good = {"rewrite": "头疼 缓解", "rewrite_retrieved": scored(0.9, 0.8, 0.7), "original_retrieved": scored(0.5)}
    return Row(id="1", tenant="t", query="头疼", source="q.csv:2", **(good | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rewrite": None}, "empty_rewrite"),
        ({"rewrite": " \n"}, "empty_rewrite"),
        ({"rewrite_retrieved": None}, "not_validated"),
        ({"original_retrieved": None}, "not_validated"),
        ({"rewrite_retrieved": scored()}, "nothing_recalled"),
        ({"rewrite": "长" * 10}, None),
        ({"rewrite": "长" * 11}, "rewrite_too_long"),
        ({"rewrite_retrieved": scored(0.6)}, None),
        ({"rewrite_retrieved": scored(0.59, 0.59, 0.59)}, "below_threshold"),
        ({"original_retrieved": scored(0.9, 0.8, 0.7)}, None),
        ({"original_retrieved": scored(0.9, 0.8, 0.8)}, "worse_than_original"),
    ],
)
def test_first_reason_that_applies(changes: dict[str, Any], reason: str | None) -> None:
    (selected,) = select([row(**changes)], CONFIG)
    assert (selected.reason, selected.status) == (reason, "failed" if reason else "ok")
    assert selected.model_copy(update={"status": "ok", "reason": None}) == row(**changes)


def test_nothing_recalled_is_told_before_length_because_rl_needs_a_baseline() -> None:
    (selected,) = select([row(rewrite="长" * 11, rewrite_retrieved=scored())], CONFIG)
    assert selected.reason == "nothing_recalled"


def test_comparison_with_the_original_can_be_switched_off() -> None:
    config = Select(not_worse_than_original=False)
    rows = [row(original_retrieved=scored(1, 1, 1)), row(original_retrieved=None)]
    assert [r.reason for r in select(rows, config)] == [None, None]


def test_earlier_failures_and_order_are_kept() -> None:
    rows = [row(rewrite=None).failed("teacher_refused"), row(), row(rewrite="")]
    selected = select(rows, CONFIG)
    assert [r.reason for r in selected] == ["teacher_refused", None, "empty_rewrite"]
    assert selected[:2] == rows[:2]


def test_reasons_are_counted_most_frequent_first() -> None:
    rows = [row(), row().failed("b"), row().failed("c"), row().failed("a"), row().failed("c")]
    assert list(count_reasons(rows).items()) == [("c", 2), ("a", 1), ("b", 1)]
