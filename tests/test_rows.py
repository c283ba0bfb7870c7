"""Row ids and retrieval quality."""

import pytest

from qinglan.rows import Retrieved, Row, RowCounts, normalise, row_id


@pytest.mark.parametrize(
    "text", ["维生素C 怎么吃？", "维生素c怎么吃", "维生素Ｃ，怎么吃！", "维生素_C\n怎么吃❤\ufe0f"]
)
def test_the_same_words_normalise_to_the_same_text(text: str) -> None:
    assert normalise(text) == "维生素c怎么吃"


def test_signs_that_make_another_question_stay() -> None:
    pairs = ["血糖＞7 血糖<7", "血压≥140 血压≤140", "C# C", "5% 5", "किला कला", "ม้าไหม มาไหม"]
    assert [pair for pair in pairs if len(set(map(normalise, pair.split()))) == 1] == []
    assert [*map(normalise, ("COVID-19", "###? <%+>"))] == ["covid19", ""]


def test_id_is_stable_across_versions() -> None:
    same = {
        row_id("t", "头疼？"),
        row_id("t", " 头疼 "),
        row_id("t", "头疼", inputs={}),
        row_id("t", "头疼", inputs={"hint": " "}),
    }
    assert same == {"6f7f1da2966d7691"}


def test_id_depends_on_every_part_in_its_place() -> None:
    ids = {
        row_id("t", "a"),
        row_id("u", "a"),
        row_id("t", "b"),
        row_id("t", "a", "b"),
        row_id("t", "a", "", "b"),
        row_id("t", "a", inputs={"a": "x"}),
        row_id("t", "a", inputs={"b": "x"}),
        row_id("t", "a", inputs={"a": "y"}),
    }
    assert len(ids) == 8
    in_order = row_id("t", "q", inputs={"a": "1", "b": "2"})
    assert row_id("t", "q", inputs={"b": "2", "a": "1"}) == in_order


def test_quality_counts_missing_places_as_zero() -> None:
    assert Retrieved(scores=(0.9, 0.6, 0.3, 0.1)).quality == pytest.approx(0.6 * 0.9 + 0.4 * 0.6)
    assert Retrieved(scores=(0.9,)).quality == pytest.approx(0.6 * 0.9 + 0.4 * 0.3)
    assert (Retrieved().quality, Retrieved().top1_score) == (0.0, 0.0)


def test_rank_is_one_based_and_zero_where_missed_and_each_of_several_documents_counts() -> None:
    retrieved = Retrieved(ids=("a", None, "b"), scores=(3, 2, 1))
    assert [retrieved.rank(key) for key in ("a", "b", "c", None)] == [1, 3, 0, 0]
    assert [retrieved.rank(key) for key in ("c; b", "b；a", "c;", ";")] == [3, 1, 0, 0]
    row = Row(id="1", tenant="t", query="q", gold_id="d2; d1", source="s")
    assert row.unit == "d2", "a bootstrap draws it with the other questions about that document"
    whole = Retrieved(ids=("kb;12", None))
    assert [whole.rank(key) for key in ("kb;12", "kb;1", None)] == [1, 0, 0], (
        "an id may hold a semicolon"
    )


def test_a_failed_row_keeps_what_was_paid_for() -> None:
    row = Row(id="1", tenant="t", query="q", source="s", answer="r")
    failed = row.failed("below_threshold")
    assert (failed.status, failed.reason, failed.answer) == ("failed", "below_threshold", "r")
    assert row.status == "ok"


def test_reasons_are_counted_most_frequent_first() -> None:
    row = Row(id="1", tenant="t", query="q", source="f:1")
    rows = [row, *(row.failed(reason) for reason in "bcac")]
    counts = RowCounts()
    assert list(counts.pass_through(rows)) == rows
    assert list(counts.dropped_since(RowCounts()).items()) == [("c", 2), ("a", 1), ("b", 1)]
