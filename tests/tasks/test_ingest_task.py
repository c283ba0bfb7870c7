"""The ingest stage in its frame: files, drop folders and databases become rows.

Nothing is asked twice.
"""

import logging
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fixture_types import ProfileOf

from qinglan.data.public_layouts import Layout, import_rows
from qinglan.data.versions import publish
from qinglan.errors import StageError, WorkbookError
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.runs.run import finish_run, open_run
from qinglan.tasks import ingest as ingest_module
from qinglan.tasks.ingest import ingest_workbook
from qinglan.tasks.session import _inputs

EXAMPLES = Path(__file__).parents[2] / "examples" / "layouts"
Ingest = Callable[..., StageResult]
NO_SECTIONS: Mapping[str, object] = {}


@pytest.fixture
def ingest(profile_of: ProfileOf, tracker: Any, monkeypatch: pytest.MonkeyPatch) -> Ingest:
    monkeypatch.setattr(ingest_module, "get_run_logger", lambda: logging.getLogger("test"))

    def work(
        *, finish: bool = False, sections: Mapping[str, object] = NO_SECTIONS, **settings: object
    ) -> StageResult:
        profile = profile_of(data=settings, **sections)
        with open_run(profile, "refresh") as run:
            workbook, _ = _inputs(profile, run.directory)
            result = ingest_workbook.fn(run, workbook)
            if finish:
                finish_run(run)
            return result

    return work


def usable_rows(result: StageResult) -> list[Row]:
    return [row for row in read_jsonl(result.path("rows"), Row) if row.status == "ok"]


def test_a_drop_folder(ingest: Ingest, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    drop = tmp_path / "drop"
    drop.mkdir()
    (drop / "a.csv").write_text("问题\n头疼\n42\n" + "头疼\n" * 25)
    (drop / "b.jsonl").write_text('{"问题": "失眠"}\n')
    (drop / "README.md").write_text("x")
    result = ingest(workbook=str(drop), finish=True)
    assert (result.rows_in, result.rows_out) == (28, 2)
    assert result.dropped == {"duplicate": 25, "not_text": 1}
    assert [row.source for row in usable_rows(result)] == ["a.csv:2", "b.jsonl:1"]
    assert "README.md: skipped" in caplog.text
    assert "a.csv:4: duplicate: repeats a.csv:2" in caplog.text
    assert "... and 6 more" in caplog.text
    assert ingest(workbook=str(drop)).run_id == result.run_id
    (drop / "c.csv").write_text("问题\n胃疼\n")
    assert ingest(workbook=str(drop)).rows_out == 3


@pytest.mark.parametrize(
    ("layout", "recipe", "lines"), [("flashrag", "answer_judge", 37), ("medical-r1", "medical", 20)]
)
def test_an_imported_example(
    ingest: Ingest, tmp_path: Path, layout: Layout, recipe: str, lines: int
) -> None:
    source = EXAMPLES / f"{layout}.jsonl"
    workbook = tmp_path / "q.xlsx"
    assert import_rows(layout, source, workbook, pytest.fail) == (lines, 20, 0)
    result = ingest(workbook=str(workbook), sections={"recipe": recipe})
    assert (result.rows_in, result.rows_out, result.dropped) == (lines, lines, {})


def test_a_database_is_asked_once_a_run(
    ingest: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = sqlite3.connect(tmp_path / "log.db")
    monkeypatch.setenv("LOG_DB", f"sqlite:///{tmp_path / 'log.db'}")
    connection.execute("CREATE TABLE log (问题)")
    connection.execute("INSERT INTO log VALUES ('头疼')")
    connection.commit()
    sql = {"url_env": "LOG_DB", "query": "SELECT 问题 FROM log"}
    first = ingest(sql=sql)
    connection.execute("INSERT INTO log VALUES ('失眠')")
    connection.commit()
    monkeypatch.delenv("LOG_DB")
    continued = ingest(sql=sql, finish=True)
    assert (continued.run_id, continued.rows_out) == (first.run_id, 1)
    monkeypatch.setenv("LOG_DB", f"sqlite:///{tmp_path / 'log.db'}")
    tomorrow = ingest(sql=sql, finish=True)
    assert [row.source for row in read_jsonl(tomorrow.path("rows"), Row)] == ["sql:1", "sql:2"]
    assert ingest(sql=sql).run_id == tomorrow.run_id, "asked again, and nothing is new"
    connection.close()


def test_no_usable_row_and_a_file_that_changes(
    ingest: Ingest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "q.csv"
    path.write_text("问题\n42\n")
    with pytest.raises(
        StageError, match=r"none of its 1 rows can be used; first: q.csv:2: not_text: "
    ):
        ingest(workbook=str(path))
    path.write_text("问题\n头疼\n")
    digests = iter(["one", "two"])
    monkeypatch.setattr(ingest_module, "digest_of", lambda _: next(digests))
    with pytest.raises(WorkbookError, match="was changed while it was read; run again"):
        ingest(workbook=str(path))


def test_of_a_request_log_the_most_frequent_new_questions_are_taken_and_the_others_by_later_runs(
    ingest: Ingest, profile_of: ProfileOf, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for day, questions in enumerate(("甲甲 乙乙 丙丙", "甲甲 丁丁", "戊戊 ？"), 1):
        lines = (f'{{"问题": "{question}"}}\n' for question in questions.split())
        (log / f"2026-11-0{day}.jsonl").write_text("".join(lines))
    sections = {"serve": {"request_log": {"folder": str(log)}}, "budget": {"per_run_usd": 1}}

    def take(*, finish: bool) -> tuple[StageResult, str]:
        result = ingest(workbook=str(log), max_new_rows=2, sections=sections, finish=finish)
        return result, "".join(row.query[0] for row in usable_rows(result))

    first, questions = take(finish=False)
    assert questions == "甲戊"
    assert first.dropped == {"left_for_later": 3, "duplicate": 1, "empty_query": 1}
    publish(profile_of(**sections), first.run_id, first.artifacts)
    continued, questions = take(finish=True)
    assert (questions, continued.key) == ("甲戊", first.key)
    tomorrow, questions = take(finish=True)
    assert (questions, tomorrow.dropped["left_for_later"]) == ("甲丙丁戊", 1)
    publish(profile_of(**sections), tomorrow.run_id, tomorrow.artifacts)
    _, questions = take(finish=True)
    assert questions == "甲乙丙丁戊"
