"""The data card: its counts, its examples, and texts that stay text."""

import re

from question_rows import taught

from qinglan.data.versions.card import Card, CardBuilder, Origin
from qinglan.data.versions.card_markdown import card_markdown
from qinglan.data.versions.drift import Drift, RowSummary, RowSummaryBuilder, drift
from qinglan.rows import Row

ORIGIN = Origin(
    id="abc",
    tenant="shop",
    profile="p",
    run_id="r1",
    created="2026-11-21T02:00:00+00:00",
    recipe="query_rewrite",
    recipe_version="1",
    teacher="gpt-5",
    judge="deepseek",
)
EVIL = "a|b\n| `c` | <img src=x onerror=1> [click](javascript:1) **d** \\| & " + "e" * 200


def card(
    *rows: Row, drift: Drift | None = None, augmented: dict[str, dict[str, int]] | None = None
) -> Card:
    builder = CardBuilder()
    for row in rows:
        builder.add(row)
    return builder.build(ORIGIN, {}, drift, augmented or {})


def test_counts():
    counted = card(
        taught("鱼油怎么吃", profile="老人", gold_id="g1", review="accept"),
        taught("钙片", history="问过鱼油", gold_id="g2; g1", split="dev"),
        taught("硒").failed("near_duplicate_of_test"),
        taught("锌").failed("near_duplicate_of_evaluation"),
        taught("铁").failed("rag_unavailable"),
        taught("").failed("empty_query"),
    )
    assert (counted.rows, counted.ok, counted.labelled) == (6, 2, 2)
    assert (counted.with_profile, counted.with_history) == (1, 1)
    assert counted.reasons["empty_query"] == 1
    assert counted.splits == {"dev": {"rows": 1, "ok": 1}, "train": {"rows": 4, "ok": 1}}
    assert (counted.near_duplicates, counted.decontaminated, counted.reviews) == (
        1,
        1,
        {"accept": 1},
    )
    assert (counted.intents, counted.intent_count, counted.lengths) == (
        {"g1": 2, "g2": 1},
        2,
        {"0–5": 5},
    )


def test_words_count_by_sft_training_rows():
    rows = [taught(f"q{n}", answer=f"鱼油 用法 稀有{n} 鱼油") for n in range(4)]
    corrected = taught("q4", corrected="鱼油 用法 稀有4")
    counted = card(
        *rows, corrected, taught("dev", split="dev"), taught("x").failed("below_threshold")
    )
    assert list(counted.terms.items())[:2] == [("鱼油", 5), ("用法", 5)]
    assert (counted.term_count, counted.rare_terms) == (7, 5)


def test_ten_examples_drawn_by_id():
    rows = [taught(f"问{n}") for n in range(30)] + [
        taught(f"答{n}").failed("rag_unavailable") for n in range(30)
    ]
    examples = card(*rows).examples
    assert [e.status for e in examples] == ["ok"] * 5 + ["failed"] * 5
    assert examples == card(*reversed(rows)).examples


def test_a_cell_stays_a_cell():
    text = card_markdown(
        card(taught(EVIL, answer=EVIL, source=EVIL, gold_id=EVIL).failed("rag_unavailable"))
    )
    table = text[text.index("## Examples") :].splitlines()[2:5]
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table} == {8}
    assert "<img" not in text.replace("\\<", "")
    assert "](java" not in text.replace("\\]", "")
    assert "e" * 130 not in text


def test_the_card_for_people():
    rows = [taught(f"鱼油怎么吃{n}", answer_request="e4a92e451656b03b") for n in range(20)]
    summary = RowSummaryBuilder()
    for row in rows:
        summary.add(row)
    assert "| Rows | 0, of which 0 ok |" in card_markdown(card())
    same = drift("parent0", summary.build(), RowSummary(), summary.build(), 0.2)
    text = card_markdown(card(*rows, drift=same))
    assert same.sentence in text
    assert "| vocabulary, all rows | 0.000 |" in text
    assert "| rewrite | 0.800 | 0.800 | 0.800 | 0.800 | 0.800 |" in text
    assert "## Words of the rewrites: 21, of which 20 are rare" in text
    assert "| `e4a92e451656` |" in text
    counts = {"emoji": {"sft": 61, "rl": 3, "left_out": 2}}
    counted = card(taught("鱼油怎么吃"), augmented=counts)
    assert (counted.rows, counted.ok, counted.augmented) == (1, 1, counts)
    assert "## Training questions with noise" in card_markdown(counted)
    assert "| emoji | 61 | 3 | 2 |" in card_markdown(counted)
    assert "noise" not in card_markdown(card(taught("鱼油怎么吃")))


def test_answers_are_shown_by_pool_and_by_what_they_were_graded():
    graded = {"answer_retrieved": None, "original_retrieved": None, "judge_score": 4.0}
    counted = card(
        taught("a", pool="red_team", parts={"safe": 1.0, "format": 1.0}, **graded),
        taught("b", pool="red_team", parts={"safe": 0.5}, **graded).failed("bad_format"),
        taught("c", **graded | {"judge_score": None}, parts={"safe": 0.0}),
    )
    assert counted.pools == {"red_team": {"rows": 2, "ok": 1, "train": 1, "dev": 0, "test": 0}}
    assert (counted.parts, counted.judge_mean) == ({"format": 1.0, "safe": 0.5}, 4.0)
    assert counted.terms == {}, "an answer is no list of keywords"
    text = card_markdown(counted)
    assert r"| red_team | 2 | 1 | 1 | 0 | 0 |" in text
    assert r"**No usable row**: red_team in dev, red_team in test." in text
    assert "| safe | 0.500 |" in text
    assert "| judge's score (0–5) | 4.00 |" in text
    assert "Words of the rewrites" not in text
