"""What stands in an Excel sheet is read as the user sees it, and a workbook that would fill the memory is refused."""

from datetime import datetime
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from openpyxl.chart import BarChart, Reference
from openpyxl.styles import Font

from qinglan.config import Columns, Data, Tenant
from qinglan.data.sources import excel
from qinglan.data.workbook import read_rows
from qinglan.errors import WorkbookError
from qinglan.rows import Row

COLUMNS = Data(columns=Columns(query="问题", profile="用户画像", gold="标准文档"))


def read(path: Path, data: Data = COLUMNS) -> list[Row]:
    return list(read_rows(path, data, Tenant()))


def book_of(path: Path, *rows: list[Any]) -> Any:
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)  # type: ignore[union-attr]
    book.save(path)
    return book


def test_a_sheet_is_read_as_the_user_sees_it(tmp_path: Path) -> None:
    path = tmp_path / "q.xlsx"
    book = book_of(
        path,
        [None, "标准文档", "备注", "用户画像", "问题"],
        [None, 1007, None, "老人", " 怎么吃？\n两次 "],
        [None, 35.5, datetime(2026, 1, 2), 35.0, "头疼"],
        [None, None, None, None, None],
        [None, 123456789012345, 1.5e-7, "", "#N/A "],
        [None, "007", "x", "  ", "  "],
        [None, None, "\u200b", "<&>\"'", "胃疼 &amp; <失眠>"],
        [None, None, " ", None, None],
    )
    book.active["C14"].number_format = "yyyy-mm-dd"
    book.active["A1048576"].font = Font(bold=True)
    chart = BarChart()
    chart.add_data(Reference(book.active, min_col=2, min_row=2, max_row=3))
    book.create_chartsheet("图", 0).add_chart(chart)
    book.save(path)
    rows = read(path)
    assert [(row.source, row.reason) for row in rows[:2]] == [("q.xlsx!Sheet!E2", None), ("q.xlsx!Sheet!E3", None)]
    assert [row.gold_id for row in rows] == ["1007", "35.5", None, "123456789012345", "007", None]
    assert [row.profile for row in rows] == ["老人", "35", "", "", "", "<&>\"'"]
    assert rows[2].reason == rows[4].reason == "empty_query" and rows[5].query == "胃疼 &amp; <失眠>"


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book_of(path := tmp_path / "q.xlsx", ["问题"], *(["头疼"] for _ in range(10)))
    monkeypatch.setattr(excel, "MAX_CELLS", 10)
    with pytest.raises(WorkbookError, match=r"q\.xlsx: has more than 10 cells, .* save the sheet as \.csv"):
        read(path)
    monkeypatch.setattr(excel, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(WorkbookError, match=r"q\.xlsx: unpacks to .* save the sheet as \.csv"):
        read(path)
