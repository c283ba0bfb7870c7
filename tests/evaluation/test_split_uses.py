"""The count of evaluations of a test split: by other models, on the same rows, whatever arrived
since."""

import pytest
from fixture_types import ProfileOf

from qinglan.data.versions import tenant_folder
from qinglan.errors import ArtifactError
from qinglan.evaluation.split_uses import note_evaluation

ROWS = [f"{n:04}" for n in range(1000)]


def test_other_models_on_the_same_rows_are_counted_also_where_the_split_grew(profile_of: ProfileOf):
    profile = profile_of()
    grown = [*ROWS, *(f"new {n}" for n in range(300))]
    noted = [
        ("a", ROWS),
        ("b", ROWS[::-1]),
        ("b", ROWS),
        ("c", grown),
        ("a", grown),
        ("d", grown[-300:]),
    ]
    assert [note_evaluation(profile, f"run-{models}", models, rows) for models, rows in noted] == [
        0,
        1,
        1,
        2,
        0,
        0,
    ]
    few = [("a", ["1"]), ("b", ["1", "2"]), ("c", ["3"]), ("e", ROWS)]
    other_tenant = profile_of(tenant={"id": "other"})
    assert [note_evaluation(other_tenant, "r", models, rows) for models, rows in few] == [
        0,
        1,
        0,
        0,
    ]


def test_a_damaged_record_is_one_line(profile_of: ProfileOf):
    note_evaluation(profile_of(), "r", "a", ROWS)
    path = tenant_folder(profile_of()) / "evaluated.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"sample"', '"rows"'), encoding="utf-8"
    )
    with pytest.raises(
        ArtifactError,
        match=r"evaluated.json: not readable .*; remove it, and the count starts anew",
    ):
        note_evaluation(profile_of(), "r", "b", ROWS)
