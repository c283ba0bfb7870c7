"""The workbook: one-line errors for bad files, reasons for bad rows, text that stays text."""

import json
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from openpyxl.worksheet.formula import ArrayFormula

from qinglan.config import Columns, Data, Tenant
from qinglan.data.workbook import read_rows
from qinglan.errors import WorkbookError
from qinglan.rows import HINTS, INPUT_REASONS, Row, row_id

HEADER = ["问题", "用户画像", "历史摘要", "标准文档", "划分", "意图"]
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


def xlsx(path: Path, *rows: list[Any], sheet: str = "Sheet1") -> Path:
    book = openpyxl.Workbook()
    book.active.title = sheet
    for row in rows:
        book.active.append(row)
    book.save(path)
    return path


def text_file(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def read(path: Path, **data: Any) -> list[Row]:
    return list(read_rows(path, Data(**data), Tenant(id="t")))


def reasons(path: Path, **data: Any) -> list[str | None]:
    return [row.reason for row in read(path, **data)]


def error_of(path: Path, **data: Any) -> str:
    with pytest.raises(WorkbookError) as caught:
        read(path, **data)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


# Good files


def test_xlsx_row_carries_every_column(tmp_path: Path) -> None:
    path = xlsx(tmp_path / "q.xlsx", HEADER, [" 怎么吃？\n", "老人", "问过钙片", "doc-1", "Dev ", " 用法 "])
    asked = {"query": "怎么吃？", "profile": "老人", "history": "问过钙片"}
    expected = {"gold_id": "doc-1", "split": "dev", "intent": "用法", "source": "q.xlsx!Sheet1!A2"}
    assert read(path) == [Row(id=row_id("t", **asked), tenant="t", **asked, **expected)]


def test_chosen_sheet_and_columns(tmp_path: Path) -> None:
    path = xlsx(tmp_path / "q.xlsx", ["query"], ["头疼"], sheet="数据")
    (row,) = read(path, sheet="数据", columns=Columns(query="query"))
    assert row.source == "q.xlsx!数据!A2"
    assert "no sheet `Sheet2` (sheets: 数据)" in error_of(path, sheet="Sheet2")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_csv_in_each_encoding(tmp_path: Path, encoding: str) -> None:
    path = text_file(tmp_path / "q.csv", '问题,用户画像\r\n"头疼，\n怎么办",老人\r\n失眠,\r\n', encoding)
    rows = read(path)
    assert [(row.query, row.source) for row in rows] == [("头疼，\n怎么办", "q.csv:2"), ("失眠", "q.csv:4")]


def test_jsonl(tmp_path: Path) -> None:
    path = text_file(tmp_path / "q.jsonl", '{"问题": "头疼", "用户画像": "老人"}\n\n{"问题": "失眠\\ud800", "x": 1}\n')
    rows = read(path)
    assert [(row.query, row.profile, row.source) for row in rows] == [
        ("头疼", "老人", "q.jsonl:1"),
        ("失眠", "", "q.jsonl:3"),
    ]


def test_limit_takes_rows_of_every_split_that_rows_name(tmp_path: Path) -> None:
    path = xlsx(
        tmp_path / "q.xlsx", ["问题", "划分"], *([f"问{n}", "train"] for n in range(9)), ["验", "dev"], ["测", "test"]
    )
    assert [row.query for row in read(path, limit=5)] == ["问0", "问1", "验", "测"]
    assert [row.query for row in read(path, limit=3)] == ["问0", "验", "测"]


def test_empty_rows_at_the_end_are_no_rows(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    for row in (["问题", "备注"], ["头疼"], [" ", None], [None, "\n"]):
        book.active.append(row)
    book.active["A1048576"].font = openpyxl.styles.Font(bold=True)
    book.save(tmp_path / "q.xlsx")
    assert len(read(tmp_path / "q.xlsx")) == 1


# Bad rows


def test_row_level_problems_are_kept_with_their_reason(tmp_path: Path) -> None:
    rows: list[tuple[list[Any], str | None]] = [
        (["头疼怎么办"], None),
        ([None, "老人"], "empty_query"),
        (["\u200b？？"], "empty_query"),
        ([42], "not_text"),
        (["长" * 21], "query_too_long"),
        (["头疼 怎么办？"], "duplicate"),
        (["=1+1"], "formula_cell"),
        (["失眠", "=A2"], "formula_cell"),
        (["#N/A"], "not_text"),
        (["胃疼", None, None, None, "validation"], "bad_split"),
        (["胃疼"], None),
        ([ArrayFormula("A11", "=B1:B2")], "formula_cell"),
    ]
    path = xlsx(tmp_path / "q.xlsx", HEADER, *(row for row, _ in rows))
    assert reasons(path, max_query_chars=20) == [reason for _, reason in rows]


def test_cells_under_a_merge_are_refused(tmp_path: Path) -> None:
    path = xlsx(tmp_path / "q.xlsx", HEADER, ["头疼", "老人"], ["失眠", "青年", "x"], ["胃疼"])
    book = openpyxl.load_workbook(path)
    book.active.merge_cells("B2:B3")
    book.save(path)
    assert reasons(path) == [None, "merged_cell", None]


def test_context_tells_questions_apart_and_ids_are_unique(tmp_path: Path) -> None:
    questions = [["多少钱", "", history] for history in ("钙片", "鱼油", "钙片", "钙片")]
    rows = read(xlsx(tmp_path / "q.xlsx", HEADER, *questions, [None], [1], [None, "x"]))
    assert [row.reason for row in rows[:4]] == [None, None, "duplicate", "duplicate"]
    assert len({row.id for row in rows}) == len(rows)


def test_csv_line_with_an_unquoted_comma_is_refused(tmp_path: Path) -> None:
    path = text_file(tmp_path / "q.csv", "问题,用户画像\n头疼,怎么办,老人\n失眠,青年,,\n\n胃疼\n")
    assert reasons(path) == ["extra_cells", None, "empty_query", None]


def test_csv_numbers_are_refused_as_in_excel(tmp_path: Path) -> None:
    path = text_file(tmp_path / "q.csv", "问题,标准文档\n12345,\n3.14,\nnan,\n头疼,007\n5.6是不是偏高,\n")
    rows = read(path)
    assert [row.reason for row in rows] == ["not_text", "not_text", "empty_query", None, None]
    assert (rows[0].query, rows[3].gold_id) == ("12345", "007")


def test_jsonl_values_that_are_not_text(tmp_path: Path) -> None:
    lines = ['{"问题": 1}', '{"问题": null}', '{"问题": NaN}', '{"问题": ["头疼"]}', '{"用户画像": "老人"}']
    lines.append('{"问题": "失眠", "历史摘要": ["钙片"]}')
    path = text_file(tmp_path / "q.jsonl", "\n".join(lines))
    assert reasons(path) == ["not_text", "empty_query", "empty_query", "not_text", "empty_query", "not_text"]


def test_problems_name_cell_reason_and_hint(tmp_path: Path) -> None:
    path, lines = xlsx(tmp_path / "q.xlsx", ["问题"], ["头疼"], [None], ["头疼！"]), list[str]()
    assert len(list(read_rows(path, Data(), Tenant(), lines.append))) == 3
    assert lines == [
        "q.xlsx!Sheet1!A3: empty_query: fill in the question or delete the row",
        "q.xlsx!Sheet1!A4: duplicate: repeats q.xlsx!Sheet1!A2; delete one of the two",
    ]
    assert frozenset(HINTS) == INPUT_REASONS


# Bad files


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.xls", "x", "save it as .xlsx"),
        ("q.pdf", "x", "unknown suffix `.pdf`; save it as .xlsx, .csv, .jsonl, .parquet"),
        ("h.csv", "问题\n", "has a header but no rows"),
        ("e.csv", "\ufeff", "is empty"),
        ("q.csv", "a,b\n1,2\n", "line 1: no column `问题` (found: a, b);"),
        ("s.csv", "问题;画像\n头疼;老人\n", "not separated by commas"),
        ("q.csv", '问题\n头疼\n"失眠\n胃疼\n', "q.csv:3: not readable as CSV"),  # the rest is not swallowed
        ("q.jsonl", '{"query": "头疼"}', "no column `问题` (found: query)"),
        ("q.jsonl", '{"问题": "头疼"}\n{"问题": \n', "q.jsonl:2: not valid JSON"),
        ("q.jsonl", "[1]\n", "q.jsonl:1: expected a JSON object, found list"),
    ],
)
def test_text_files_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in error_of(text_file(tmp_path / name, text))


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = text_file(tmp_path / "q.csv", "问题\n头疼\n")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    assert "no such file; correct data.workbook" in error_of(tmp_path / "no.xlsx")
    monkeypatch.setattr(Path, "open", refuse)
    assert "can't be read: Permission denied; check its permissions" in error_of(path)


def test_files_that_are_not_what_their_name_says_and_damaged_ones(tmp_path: Path) -> None:
    good = xlsx(tmp_path / "good.xlsx", ["问题"], ["头疼"]).read_bytes()
    path = tmp_path / "q.xlsx"
    for content, message in (
        (OLE + b"Workbook", "old .xls file under the name .xlsx"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "is encrypted; remove its password"),
        ("问题\n头疼\n".encode(), "is not an Excel file; if it is text, rename it to .csv"),
        (good[: len(good) // 2], "is damaged ("),
        (good.replace(b"xl/workbook.xml", b"xl/workbork.xml"), "is damaged ("),
    ):
        path.write_bytes(content)
        assert message in error_of(path)


def test_empty_workbooks(tmp_path: Path) -> None:
    assert "the sheet is empty (sheets: Sheet1)" in error_of(xlsx(tmp_path / "q.xlsx"))
    assert "has a header but no rows" in error_of(xlsx(tmp_path / "h.xlsx", ["问题"], [None, "  "]))


def test_missing_query_column_names_the_nearest_and_a_hint(tmp_path: Path) -> None:
    message = error_of(xlsx(tmp_path / "q.xlsx", ["用户问题", "画像"], ["头疼"]))
    assert "Sheet1, row 1: no column `问题` (found: 用户问题, 画像; nearest: 用户问题)" in message
    assert "--set data.columns.query=用户问题" in message


def test_a_column_that_is_in_the_header_twice(tmp_path: Path) -> None:
    message = error_of(xlsx(tmp_path / "q.xlsx", ["问题", "备注", "备注", " 问题"], ["头疼"]))
    assert "column `问题` is in the header twice (A and D); rename one" in message


def test_undecodable_bytes_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_bytes("问题\n头疼怎么办\n失眠".encode() + b"\xff\n")
    assert "q.csv:3: byte 0xff is neither UTF-8 nor GB18030" in error_of(path)
    path.write_bytes(b"query\n" + "头疼怎么办\n".encode() * 20 + "失".encode()[:2] + b"\n")
    assert "q.csv:22: byte" in error_of(path, columns=Columns(query="query"))  # and not garbled as GB18030
    path.write_bytes("问题\n头疼".encode("utf-16"))
    assert "save the file as UTF-8" in error_of(path)
    path = tmp_path / "q.jsonl"
    path.write_bytes(json.dumps({"问题": "头疼"}, ensure_ascii=False).encode("gb18030"))
    assert "q.jsonl:1: byte" in error_of(path)
