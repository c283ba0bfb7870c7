"""Splits that don't leak and don't move."""

import pytest
from question_rows import LONG, SAME, random_rows, row

from qinglan.config import Dataset
from qinglan.data.dataset.splits import place_rows
from qinglan.rows import Row, Split


def assign(rows: list[Row], seed: int = 1, pinned: dict[str, Split] | None = None) -> list[Row]:
    return list(place_rows(rows, Dataset(seed=seed), pinned, []).apply(rows))


def splits(rows: list[Row]) -> dict[str, str | None]:
    return {r.id: r.split for r in assign(rows)}


def test_splits_depend_on_the_row_alone_and_stay_what_they_were() -> None:
    rows = [*random_rows(300), row(LONG), row(SAME)]
    placed = splits(rows)
    assert splits(rows[::-1]) == placed
    grown = splits(random_rows(300, seed=9) + rows)
    assert {key: grown[key] for key in placed} == placed
    # By SHA-256 of seed and smallest id: the places of these rows must never change.
    placed = assign([*random_rows(40), row(LONG), row(SAME)])
    letters = {"train": ".", "dev": "d", "test": "t", None: "?"}
    assert "".join(letters[r.split] for r in placed) == "...........t....dd..d..t..dtd...d........."


def test_near_duplicates_have_a_group_by_which_intervals_go() -> None:
    alone, *twins = [row("什么时候吃钙片最好呢请问"), row(LONG), row(SAME)]
    placed = {r.id: r.group for r in assign([alone, *twins])}
    assert placed == {
        alone.id: None,
        **dict.fromkeys((r.id for r in twins), min(r.id for r in twins)),
    }
    assert {r.id: r.group for r in assign([*twins[::-1], alone])} == placed


@pytest.mark.parametrize(
    ("first", "second", "reasons"),
    [
        ("train", "test", ["near_duplicate_of_test", None]),
        ("test", "dev", [None, "near_duplicate_of_test"]),
        ("dev", "train", [None, "near_duplicate_of_dev"]),
    ],
)
def test_given_splits_are_kept_and_the_stricter_wins(
    first: Split, second: Split, reasons: list[str | None]
) -> None:
    split_rows = [row(LONG, split=first), row(SAME, split=second)]
    pins = {split_rows[0].id: first, split_rows[1].id: second}
    unsplit = [row(LONG), row(SAME)]
    mixed = [split_rows[0], unsplit[1]]
    for pair, pinned in ((split_rows, None), (unsplit, pins), (mixed, pins)):
        placed = assign([*pair, *random_rows(100)], pinned=pinned)[:2]
        assert [r.reason for r in placed] == reasons
        assert [r.split for r in placed] == [first, second]


def test_a_row_without_split_joins_its_twins_given_one() -> None:
    placed = assign([row(LONG, split="test"), row(SAME), *random_rows(100)])
    assert (placed[1].split, placed[1].status) == ("test", "ok")
    (own,) = assign([row(LONG, split="dev")], pinned={row(LONG).id: "test"})
    assert own.split == "dev", "the workbook outranks an earlier version"


def test_last_nights_splits_stay_whatever_is_new() -> None:
    tail = "谢谢您的回答啊啊"
    trained = row(LONG)
    tested = row(LONG + tail)
    new = row(LONG + tail[:4])
    pinned: dict[str, Split] = {trained.id: "train", tested.id: "test"}
    assert [r.reason for r in assign([trained, tested], pinned=pinned)] == [None, None]
    placed = assign([trained, tested, new], pinned=pinned)
    assert [r.split for r in placed] == ["train", "test", "test"]
    assert [r.reason for r in placed] == ["near_duplicate_of_test", None, None]
    rows = random_rows(200)
    pinned = {r.id: r.split for r in assign(rows) if r.split}
    grown = [
        *rows,
        *(row(r.query + "呢", history=r.query * 3) for r in rows),
        *random_rows(50, seed=3),
    ]
    placed = {r.id: r for r in assign(grown, seed=99, pinned=pinned)}
    assert {key: placed[key].split for key in pinned} == pinned


def test_rows_that_keep_all_their_splits_are_placed_as_they_were() -> None:
    rows = [*random_rows(100), row(LONG), row(SAME), *random_rows(100)]
    placed = assign(rows, pinned={row(SAME).id: "test", rows[3].id: "dev"})
    assert assign(rows, seed=2, pinned={r.id: r.split for r in placed if r.split}) == placed


def test_rows_that_failed_before() -> None:
    leak = row(LONG, split="train").failed("below_threshold")
    failed_test = row(SAME, split="test").failed("teacher_refused")
    placed = assign([leak, failed_test, *random_rows(100)])
    assert [r.reason for r in placed[:2]] == ["near_duplicate_of_test", "teacher_refused"]
    unread = row(LONG, split="test").failed("query_too_long")
    placed = assign([unread, row(SAME, split="train"), *random_rows(100)])
    assert (placed[0], placed[1].status) == (unread, "ok")
