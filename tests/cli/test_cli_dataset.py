"""`qinglan dataset`, in this process."""

from functools import partial
from pathlib import Path

import pytest
from fixture_types import Qinglan
from question_rows import taught

from qinglan.config import Profile
from qinglan.data.versions import Version, note_training, publish
from qinglan.rows import Retrieved
from qinglan.runs.artifacts import write_jsonl

FOUND = Retrieved(ids=("b", "g"), scores=(0.8, 0.1), titles=("", ""))
LABELLED = taught(
    "钙片", gold_id="g", original_retrieved=None, answer_retrieved=FOUND, judge_score=4.5
)
ROWS = [taught("鱼油"), LABELLED, taught("硒\x1b[2J[bold]").failed("rag_unavailable")]


@pytest.fixture
def qinglan(qinglan: Qinglan, profile: Profile) -> Qinglan:
    return partial(qinglan, "dataset", profile=profile)


@pytest.fixture
def two(profile: Profile, tmp_path: Path) -> tuple[Version, Version]:
    """A version, and one with a row more, a row less and a row changed."""
    later = [ROWS[0].failed("below_threshold"), ROWS[1], taught("叶黄素")]
    files = [
        write_jsonl(tmp_path / f"{n}" / "rows.jsonl", rows) for n, rows in enumerate((ROWS, later))
    ]
    first, second = (publish(profile, "run-1", {"rows": file}) for file in files)
    note_training(profile, first.id, "run-1")
    return first, second


def test_list_and_show(qinglan: Qinglan, two: tuple[Version, Version]):
    status, out, _ = qinglan("list")
    _, newest, oldest = out.splitlines()
    assert status == 0
    assert newest.startswith(f"{two[1].id} ")
    assert newest.split()[-5:] == [two[0].id, "3", "2", "2", "none"]
    assert oldest.startswith(f"{two[0].id} (trained)")
    status, out, _ = qinglan("show", two[0].id[:6])
    assert status == 0
    assert f"Dataset {two[0].id}" in out
    assert f"Files: {two[0].directory}" in out


def test_a_rows_lineage_leads_to_its_cell_and_its_call(
    qinglan: Qinglan, two: tuple[Version, Version]
):
    status, out, _ = qinglan("show", "--row", LABELLED.id)
    facts = {line[:20].strip(): line[20:].strip() for line in out.splitlines()}
    assert status == 0
    assert facts["source"] == "q.xlsx!问题!A2"
    assert facts["ledger request"] == "e4a9"
    assert facts["top-1 score"] == "– → 0.800"
    assert facts["gold document's rank"] == "– → 2"
    assert (facts["verdict"], facts["split"], facts["judge"], facts["run"]) == (
        "ok",
        "train",
        "4.50",
        "run-1",
    )


def test_diff_is_against_the_parent_by_default(qinglan: Qinglan, two: tuple[Version, Version]):
    status, out, _ = qinglan("diff")
    assert status == 0
    assert out.startswith(
        f"{two[0].id} → {two[1].id}: 1 rows added, 1 removed, 1 changed, 1 as they were\n"
    )
    assert "  ok → below_threshold: 1\n" in out
    assert {line.split()[0] for line in out.splitlines()[3:]} == {"added", "removed", "changed"}
    assert qinglan("diff", two[0].id, two[1].id)[1] == out
    assert "\x1b" not in out, "a text can't steer the terminal"
    assert "[bold]" in out, "a text can't be markup"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nope"], "dataset version `nope`: not found for tenant `default`; newest: "),
        (["diff", "nope"], "dataset version `nope`: not found"),
        (["diff", "latest", "nope"], "dataset version `nope`: not found"),
        (["show", "--row", "nope"], ": has no row `nope`; ids are in "),
    ],
)
def test_a_mistake_is_one_line(
    qinglan: Qinglan, two: tuple[Version, Version], words: list[str], message: str
):
    status, out, err = qinglan(*words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_before_the_second_version(qinglan: Qinglan, profile: Profile, tmp_path: Path):
    assert "no dataset version yet; run `qinglan run refresh` first" in qinglan("list")[2]
    publish(profile, "run-1", {"rows": write_jsonl(tmp_path / "rows.jsonl", ROWS)})
    assert "is the tenant's first, so there is none to compare it with" in qinglan("diff")[2]
