"""Tombstones: what they cover, what is in their file, and that no row of theirs is read again."""

import os
from pathlib import Path

import pytest
from fixture_types import Qinglan
from question_rows import row

from qinglan.config import Data, Tenant
from qinglan.data.forgotten import FORGOTTEN_FILE, Tombstones
from qinglan.data.workbook import read_rows, without_forgotten
from qinglan.errors import ArtifactError, ConfigError
from qinglan.evaluation.reasons import words
from qinglan.rows import Row, row_id
from qinglan.runs.artifacts import write_jsonl
from qinglan.tasks.session import open_session

QUESTION = "鱼油能一起吃吗"
TENANT = Tenant(id="t")
ID = row_id("t", QUESTION, "王小明")


def test_a_row_is_covered_by_its_id_and_a_question_however_it_is_written_and_whoever_asks(
    tmp_path: Path,
):
    by_row = Tombstones().adding(rows=[ID])
    by_question = Tombstones().adding(questions=[QUESTION, " \n"])
    assert [by_row.cover(row(QUESTION, who)) for who in ("王小明", "")] == [True, False]
    assert [by_question.cover(row(text, "李")) for text in (f"{QUESTION}？ ", "别的", "")] == [
        True,
        False,
        False,
    ]
    by_row.write(tmp_path)
    assert Tombstones.read(tmp_path) == by_row == by_row.adding(rows=[ID])
    content = (tmp_path / FORGOTTEN_FILE).read_text()
    assert QUESTION not in content
    assert ID not in content
    both = by_row | by_question
    assert both.has_row(ID), "each has its own key"
    assert both.has_question(QUESTION), "each has its own key"
    assert both.digest not in (by_row.digest, by_question.digest)


def test_a_damaged_tombstone_is_an_error_as_none_may_be_skipped(tmp_path: Path):
    (tmp_path / FORGOTTEN_FILE).write_text('{"kind": "row"}\n')
    with pytest.raises(ArtifactError, match=r"forgotten\.jsonl:1: is no tombstone"):
        Tombstones.read(tmp_path)


def test_a_forgotten_row_is_read_as_a_failed_one_without_its_texts(tmp_path: Path):
    questions = tmp_path / "q.csv"
    questions.write_text(
        f"问题,用户画像,标准文档\n{QUESTION},王小明,d1\n{QUESTION},,d1\n{QUESTION},王小明,d1\n"
    )
    reports: list[str] = []
    read = read_rows(
        questions, Data(), TENANT, reports.append, forgotten=Tombstones().adding(rows=[ID])
    )
    gone, row_of_another, again = list(read)
    assert (row_of_another.status, row_of_another.query) == ("ok", QUESTION)
    assert gone == Row(
        id=gone.id, tenant="t", query="", source="q.csv:2", status="failed", reason="forgotten"
    )
    assert len({gone.id, row_of_another.id, again.id, ID}) == 4
    assert QUESTION not in "".join(reports)
    assert reports[0].startswith("q.csv:2: forgotten: ")
    assert words("forgotten").en != words("forgotten").zh != "forgotten"


def test_the_snapshot_of_a_database_never_has_it():
    records = [{"问题": QUESTION, "用户画像": "王小明"}, {"问题": "别的", "用户画像": None}]
    snapshot = without_forgotten(records, Data(), TENANT, (), Tombstones().adding(rows=[ID]))
    assert list(snapshot) == [{"问题": None, "用户画像": None}, records[1]]


@pytest.mark.parametrize("by", ["command", "flow"])
@pytest.mark.parametrize(
    ("before", "file", "folder"), [(0o022, 0o640, 0o750), (0o077, 0o600, 0o700)]
)
def test_files_of_rows_are_for_owner_and_group_and_never_opened_wider(
    qinglan: Qinglan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    file: int,
    folder: int,
    by: str,
):
    monkeypatch.setattr("gc.freeze", lambda: None)  # the tests' process goes on
    umask = os.umask(before)
    try:
        if by == "command":
            qinglan("--help")
        else:
            with (
                pytest.raises(ConfigError),
                open_session("no such profile", (), "refresh", fresh=True),
            ):
                pass
        written = write_jsonl(tmp_path / "ingest" / "rows.jsonl", [row(QUESTION)]).path
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (written, written.parent)] == [file, folder]
