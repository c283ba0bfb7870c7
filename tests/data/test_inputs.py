"""The columns that a recipe adds to the workbook, in every kind of file."""

import csv
import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet
import pytest

from qinglan.config import Columns, Data, Sql, Tenant
from qinglan.data.sources.database import check_database, take_snapshot
from qinglan.data.workbook import read_rows
from qinglan.errors import WorkbookError
from qinglan.recipes import Input
from qinglan.rows import Row, row_id

INPUTS = (Input("hint", "提示", required=True), Input("label", "标签", identifies=False))
HEADER = ["问题", "提示", "标签", "数据池"]
LINES = [["法国", "塞纳河", "巴黎", "red_team"], ["德国", "柏林墙", "", ""]]


def xlsx(path: Path, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    book = openpyxl.Workbook()
    for line in (header, *lines):
        book.active.append([None if cell == "" else cell for cell in line])
    book.save(path)


def dated_xlsx(path: Path, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    """With a merged cell below, which takes the exact way."""
    xlsx(path, header, lines)
    book = openpyxl.load_workbook(path)
    book.active.merge_cells("H8:H9")
    book.save(path)


def as_csv(path: Path, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([header, *lines])


def jsonl(path: Path, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    objects = (json.dumps(dict(zip(header, line, strict=True)), ensure_ascii=False) for line in lines)
    path.write_text("\n".join(objects), encoding="utf-8")


def parquet(path: Path, header: Sequence[str], lines: Sequence[Sequence[Any]]) -> None:
    columns = {name: [line[place] for line in lines] for place, name in enumerate(header)}
    pyarrow.parquet.write_table(pa.table(columns), path)


WRITERS: dict[str, Callable[[Path, Sequence[str], Sequence[Sequence[Any]]], None]] = {
    "q.xlsx": xlsx, "dated.xlsx": dated_xlsx, "q.csv": as_csv, "q.jsonl": jsonl, "q.parquet": parquet,
}  # fmt: skip


def read(path: Path, **data: Any) -> list[Row]:
    return list(read_rows(path, Data(**data), Tenant(id="t"), inputs=INPUTS))


@pytest.mark.parametrize("name", WRITERS)
def test_inputs_and_pool_are_read(tmp_path: Path, name: str):
    WRITERS[name](tmp_path / name, HEADER, LINES)
    france, germany = read(tmp_path / name)
    assert (france.inputs, france.pool) == ({"hint": "塞纳河", "label": "巴黎"}, "red_team")
    assert (germany.inputs, germany.pool) == ({"hint": "柏林墙"}, None)
    assert france.id == row_id("t", "法国", inputs={"hint": "塞纳河"})


def test_a_required_column_must_be_there(tmp_path: Path):
    as_csv(tmp_path / "q.csv", ["问题", "提醒", "标签"], [line[:3] for line in LINES])
    with pytest.raises(WorkbookError, match=r"no column `提示` .*--set data\.columns\.inputs\.hint="):
        read(tmp_path / "q.csv")
    assert len(read(tmp_path / "q.csv", columns=Columns(inputs={"hint": "提醒"}))) == 2
    with pytest.raises(WorkbookError, match=r"data\.columns\.inputs\.label="):
        read(tmp_path / "q.csv", columns=Columns(inputs={"hint": "提醒", "label": "答案"}))


def test_a_row_without_a_required_input_fails_and_is_reported(tmp_path: Path):
    as_csv(tmp_path / "q.csv", ["问题", "提示"], [["法国", ""], ["德国", "柏林墙"]])
    told: list[str] = []
    rows = list(read_rows(tmp_path / "q.csv", Data(), Tenant(), told.append, inputs=INPUTS))
    assert [row.reason for row in rows] == ["empty_input", None]
    assert told == ["q.csv:2: empty_input: fill in every column that the recipe needs, or delete the row"]


def test_long_inputs_count_as_context_but_labels_do_not(tmp_path: Path):
    lines = [["法国", "长" * 11, ""], ["德国", "长" * 10, "长" * 11]]
    as_csv(tmp_path / "q.csv", HEADER[:3], lines)
    assert [row.reason for row in read(tmp_path / "q.csv", max_context_chars=10)] == ["context_too_long", None]


def test_the_same_question_with_another_input_is_no_duplicate(tmp_path: Path):
    lines = [["法国", "塞纳河", "甲"], ["法国", "卢瓦尔河", "甲"], ["法国", "塞纳河", "乙"]]
    as_csv(tmp_path / "q.csv", HEADER[:3], lines)
    assert [row.reason for row in read(tmp_path / "q.csv")] == [None, None, "duplicate"]


def test_a_databases_snapshot_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with closing(sqlite3.connect(tmp_path / "q.db")) as connection:
        connection.execute("create table q as select '法国' as 问题, '塞纳河' as 提示, 'x' as 别的")
    monkeypatch.setenv("Q_DB", f"sqlite:///{tmp_path / 'q.db'}")
    data = Data(sql=Sql(url_env="Q_DB", query="select * from q"))
    take_snapshot(data, tmp_path / "source.jsonl", INPUTS)
    (row,) = read_rows(tmp_path / "source.jsonl", data, Tenant(), inputs=INPUTS)
    assert (row.inputs, row.source) == ({"hint": "塞纳河"}, "sql:1")
    with pytest.raises(WorkbookError, match="no column `缺`"):
        check_database(data, (Input("gap", "缺", required=True),))
