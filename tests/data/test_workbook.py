"""Files, folders and their rows: one-line errors for bad files, reasons for bad rows, text that
stays text."""

import json
import os
import re
from datetime import date, datetime
from pathlib import Path
from typing import Any

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doubles import raising
from openpyxl.chart import BarChart, Reference
from openpyxl.styles import Font
from openpyxl.worksheet.formula import ArrayFormula

from qinglan.config import Columns, Data, Tenant
from qinglan.data.sources import excel, files
from qinglan.data.sources.files import digest_of, list_files
from qinglan.data.workbook import read_rows
from qinglan.errors import WorkbookError
from qinglan.recipes import Input
from qinglan.rows import HINTS, INPUT_REASONS, Row, row_id

HEADER = ["问题", "用户画像", "历史摘要", "标准文档", "划分", "意图"]
INPUTS = (Input("hint", "提示", required=True), Input("label", "标签", identifies=False))


def xlsx(path: Path, *rows: list[Any], sheet: str = "Sheet1", merged: str | None = None) -> Path:
    book = openpyxl.Workbook()
    book.active.title = sheet
    for row in rows:
        book.active.append(row)
    if merged:
        book.active.merge_cells(merged)
    book.save(path)
    return path


def text_file(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def read(path: Path, *inputs: Input, **data: Any) -> list[Row]:
    return list(read_rows(path, Data(**data), Tenant(id="t"), inputs=inputs))


def reasons(path: Path, *inputs: Input, **data: Any) -> list[str | None]:
    return [row.reason for row in read(path, *inputs, **data)]


def error_of(path: Path, *inputs: Input, **data: Any) -> str:
    with pytest.raises(WorkbookError) as caught:
        read(path, *inputs, **data)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_xlsx_row_carries_every_column_of_the_chosen_sheet(tmp_path: Path) -> None:
    path = xlsx(
        tmp_path / "q.xlsx", HEADER, [" 怎么吃？\n", "老人", "问过钙片", "doc-1", "Dev ", " 用法 "]
    )
    question = {"query": "怎么吃？", "profile": "老人", "history": "问过钙片"}
    expected = {"gold_id": "doc-1", "split": "dev", "intent": "用法", "source": "q.xlsx!Sheet1!A2"}
    assert read(path) == [Row(id=row_id("t", **question), tenant="t", **question, **expected)]
    path = xlsx(tmp_path / "q.xlsx", ["query"], ["头疼"], sheet="数据")
    (row,) = read(path, sheet="数据", columns=Columns(query="query"))
    assert row.source == "q.xlsx!数据!A2"
    assert "no sheet `Sheet2` (sheets: 数据)" in error_of(path, sheet="Sheet2")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030"])
def test_csv_in_each_encoding(tmp_path: Path, encoding: str) -> None:
    path = text_file(
        tmp_path / "q.csv", '问题,用户画像\r\n"头疼，\n怎么办",老人\r\n失眠,\r\n', encoding
    )
    rows = read(path)
    assert [(row.query, row.source) for row in rows] == [
        ("头疼，\n怎么办", "q.csv:2"),
        ("失眠", "q.csv:4"),
    ]


def test_json_lines_where_a_column_may_first_appear_far_down(tmp_path: Path) -> None:
    path = text_file(
        tmp_path / "q.jsonl",
        '{"问题": "头疼", "用户画像": "老人"}\n\n{"问题": "失眠\\ud800", "x": 1}\n',
    )
    rows = read(path)
    assert [(row.query, row.profile, row.source) for row in rows] == [
        ("头疼", "老人", "q.jsonl:1"),
        ("失眠", "", "q.jsonl:3"),
    ]
    lines = [f'{{"问题": "问{n}", "x{n}": 1}}' for n in range(1500)]
    (tmp_path / "q.jsonl").write_text("\n".join([*lines, '{"问题": "末", "文档": "d"}']))
    assert read(tmp_path / "q.jsonl", columns=Columns(gold="文档"))[-1].gold_id == "d"


def test_parquet_values_are_read_as_in_excel(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "q.parquet",
        问题=["头疼", "失眠", "胃疼"],
        用户画像=[35.0, float("nan"), 1.5],
        历史摘要=[date(2026, 1, 2), None, None],
        标准文档=[1234567890123456789, 7, 8],
        其他=[[1], [2], [3]],
    )
    rows = read(path)
    assert [row.profile for row in rows] == ["35", "", "1.5"]
    assert [row.reason for row in read(path, columns=Columns(query="其他"))] == ["not_text"] * 3
    assert (rows[0].history, rows[0].gold_id) == ("2026-01-02", "1234567890123456789")


def test_a_limit_takes_rows_of_every_split_and_reads_no_more(tmp_path: Path) -> None:
    trained = ([f"问{n}", "train"] for n in range(9))
    path = xlsx(tmp_path / "q.xlsx", ["问题", "划分"], *trained, ["验", "dev"], ["测", "test"])
    assert [row.query for row in read(path, limit=5)] == ["问0", "问1", "验", "测"]
    assert [row.query for row in read(path, limit=3)] == ["问0", "验", "测"]
    (tmp_path / "q.jsonl").write_text('{"问题": "一"}\n{"问题": "二"}\nnot JSON\n')
    assert [row.query for row in read(tmp_path / "q.jsonl", limit=2)] == ["一", "二"]
    assert "q.jsonl:3: not valid JSON" in error_of(tmp_path / "q.jsonl")


def test_empty_rows_at_the_end_are_no_rows(tmp_path: Path) -> None:
    book = openpyxl.load_workbook(
        xlsx(tmp_path / "q.xlsx", ["问题", "备注"], ["头疼"], [" ", None], [None, "\n"])
    )
    book.active["A1048576"].font = Font(bold=True)
    book.save(tmp_path / "q.xlsx")
    assert len(read(tmp_path / "q.xlsx")) == 1
    text = "问题,用户画像\n头疼,老人\n" + " ,\n" * 20_000
    assert len(read(text_file(tmp_path / "q.csv", text))) == 1
    rows = read(text_file(tmp_path / "q.csv", f"{text}失眠,\n"))
    assert (len(rows), rows[1].reason, rows[-1].source) == (20_002, "empty_query", "q.csv:20003")


def test_a_file_is_closed_when_reading_stops(tmp_path: Path) -> None:
    (tmp_path / "q.csv").write_text("问题\n" + "".join(f"问{n}\n" for n in range(100_000)))
    rows = read_rows(tmp_path / "q.csv", Data(), Tenant())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    next(rows)
    assert len(os.listdir("/proc/self/fd")) == before + 1  # noqa: PTH208
    rows.close()  # type: ignore[attr-defined]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.fixture
def drop(tmp_path: Path) -> Path:
    """A drop folder with one file of each kind, and what else lies in such folders."""
    folder = tmp_path / "drop"
    (folder / "done").mkdir(parents=True)
    (folder / "done" / "old.csv").write_text("问题\n旧的\n")
    (folder / "b.csv").write_text("问题\n失眠\n头疼\n\n")
    (folder / "c.JSONL").write_text('{"问题": "胃疼", "标准文档": 7}\n')
    parquet(folder / "d.parquet", 问题=["咳嗽", "头疼", None], 划分=["dev", None, None])
    xlsx(folder / "a.xlsx", ["问题"], ["头疼"], [None], ["发烧"])
    for name in ("~$a.xlsx", ".hidden.csv", "e.csv.partial", "f.tmp", "README.md"):
        (folder / name).write_text("x")
    return folder


def test_a_folder_is_one_stream_in_the_order_of_names(drop: Path) -> None:
    rows = read(drop)
    assert [row.source for row in rows] == [
        "a.xlsx!Sheet1!A2",
        "a.xlsx!Sheet1!A3",
        "a.xlsx!Sheet1!A4",
        "b.csv:2",
        "b.csv:3",
        "c.JSONL:1",
        "d.parquet:1",
        "d.parquet:2",
        "d.parquet:3",
    ]
    assert [row.query for row in rows] == [
        "头疼",
        "",
        "发烧",
        "失眠",
        "头疼",
        "胃疼",
        "咳嗽",
        "头疼",
        "",
    ]
    assert [row.reason for row in rows if row.query == "头疼"] == [None, "duplicate", "duplicate"]
    assert len({row.id for row in rows}) == len(rows)
    assert [row.query for row in read(drop, limit=3)] == ["头疼", "", "发烧"]
    assert [file.name for file in list_files(drop).skipped] == ["README.md"]


def test_a_folder_without_questions(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("x")
    expected = (
        f"{tmp_path}: holds no .xlsx, .csv, .jsonl, .parquet file; "
        "put one there or correct data.workbook"
    )
    assert error_of(tmp_path) == expected
    (tmp_path / "a.csv").write_text("问题\n\n")
    assert f"{tmp_path}: its files have headers but no rows" in error_of(tmp_path)
    (tmp_path / "b.csv").write_text("问题\n头疼\n")
    assert [row.source for row in read(tmp_path)] == ["b.csv:2"]


def test_a_digest_is_of_what_is_read(drop: Path) -> None:
    first = digest_of(drop)
    (drop / "README.md").write_text("y")
    (drop / "done" / "old.csv").unlink()
    assert digest_of(drop) == first
    (drop / "b.csv").rename(drop / "bb.csv")
    renamed = digest_of(drop)
    (drop / "bb.csv").write_text("问题\n失眠\n")
    assert len({first, renamed, digest_of(drop)}) == 3
    with pytest.raises(WorkbookError, match="no such file"):
        digest_of(drop / "no.csv")


@pytest.mark.parametrize("name", ["q.xlsx", "exact.xlsx", "q.csv", "q.jsonl", "q.parquet"])
def test_inputs_and_pool_are_read_from_every_kind_of_file(tmp_path: Path, name: str):
    path = tmp_path / name
    header = ["问题", "提示", "标签", "数据池"]
    lines = [["法国", "塞纳河", "巴黎", "red_team"], ["德国", "柏林墙", "", ""]]
    objects = [dict(zip(header, line, strict=True)) for line in lines]
    if path.suffix == ".xlsx":
        # A merged cell below takes the exact way.
        xlsx(path, header, *lines, merged="H8:H9" if name == "exact.xlsx" else None)
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(objects), path)
    elif path.suffix == ".csv":
        text_file(path, "\n".join(",".join(line) for line in [header, *lines]))
    else:
        text_file(path, "\n".join(map(json.dumps, objects)))
    france, germany = read(path, *INPUTS)
    assert (france.inputs, france.pool) == ({"hint": "塞纳河", "label": "巴黎"}, "red_team")
    assert (germany.inputs, germany.pool) == ({"hint": "柏林墙"}, None)
    assert france.id == row_id("t", "法国", inputs={"hint": "塞纳河"})


def test_a_column_without_a_name_is_not_read_and_a_cell_of_separators_names_no_document(
    tmp_path: Path,
):
    path = text_file(tmp_path / "q.csv", "问题,标准文档,划分\n法国,d1,test\n德国,；;,\n")
    france, _ = read(path, columns=Columns(gold="", split=""))
    assert (france.gold_id, france.split) == (None, None)
    assert [row.gold_id for row in read(path)] == ["d1", None]


def test_a_dialogue_is_read_where_its_column_is_named_and_something_is_missing(tmp_path: Path):
    lines = [
        "咋吃,女,问过,甲",
        "咋吃,,,甲",
        "咋吃,,,乙",
        "咋吃,,,甲",
        "咋吃,,,丙丙丙丙",
        "咋吃,女,,",
    ]
    path = text_file(tmp_path / "q.csv", "\n".join(["问题,用户画像,历史摘要,对话", *lines]))
    rows = read(path, columns=Columns(dialogue="对话"), max_dialogue_chars=3)
    assert [row.inputs.get("dialogue") for row in rows] == [
        None,
        "甲",
        "乙",
        "甲",
        "丙丙丙丙",
        None,
    ]
    assert [row.reason for row in rows] == [
        None,
        None,
        None,
        "duplicate",
        "dialogue_too_long",
        None,
    ]
    ids = [row_id("t", "咋吃", "女", "问过"), row_id("t", "咋吃", inputs={"dialogue": "甲"})]
    assert [row.id for row in rows[:2]] == ids
    assert [row.reason for row in read(path)] == [
        None,
        None,
        "duplicate",
        "duplicate",
        "duplicate",
        None,
    ]
    assert [row.inputs for row in read(path)] == [{}] * 6, (
        "no column of dialogues is read by itself"
    )
    assert "--set data.columns.dialogue=" in error_of(path, columns=Columns(dialogue="聊天记录"))


def test_a_required_column_must_be_there(tmp_path: Path):
    path = text_file(tmp_path / "q.csv", "问题,提醒,标签\n法国,塞纳河,巴黎\n德国,柏林墙,\n")
    message = error_of(path, *INPUTS)
    assert "no column `提示`" in message
    assert "--set data.columns.inputs.hint=" in message
    assert len(read(path, *INPUTS, columns=Columns(inputs={"hint": "提醒"}))) == 2
    columns = Columns(inputs={"hint": "提醒", "label": "答案"})
    assert "data.columns.inputs.label=" in error_of(path, *INPUTS, columns=columns)


def test_a_row_without_a_required_input_fails_and_a_long_one_counts_as_context(tmp_path: Path):
    # The last two are the same question: a label identifies nothing.
    lines = ["德国,,", "法国,长长长,", "法国,长长,长长长", "法国,长,甲", "法国,长,乙"]
    path = text_file(tmp_path / "q.csv", "\n".join(["问题,提示,标签", *lines]))
    expected = ["empty_input", "context_too_long", None, None, "duplicate"]
    assert reasons(path, *INPUTS, max_context_chars=2) == expected


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
        (["多少钱", "", "钙片"], None),
        # Another context, another question.
        (["多少钱", "", "鱼油"], None),
        (["多少钱", "", "钙片"], "duplicate"),
    ]
    path = xlsx(tmp_path / "q.xlsx", HEADER, *(row for row, _ in rows))
    assert reasons(path, max_query_chars=20) == [reason for _, reason in rows]
    path = xlsx(
        tmp_path / "q.xlsx",
        HEADER,
        ["头疼", "老人"],
        ["失眠", "青年", "x"],
        ["胃疼"],
        merged="B2:B3",
    )
    assert reasons(path) == [None, "merged_cell", None]


def test_lines_of_text_files_that_hold_no_question(tmp_path: Path) -> None:
    wide = "问题,用户画像\n头疼,怎么办,老人\n失眠,青年,,\n\n胃疼\n"  # an unquoted comma
    assert reasons(text_file(tmp_path / "q.csv", wide)) == [
        "extra_cells",
        None,
        "empty_query",
        None,
    ]
    numbers = "问题,标准文档\n12345,\n3.14,\nnan,\n头疼,007\n"
    assert reasons(text_file(tmp_path / "q.csv", numbers)) == [
        "not_text",
        "not_text",
        "empty_query",
        None,
    ]
    objects = [
        '{"问题": 1}',
        '{"问题": null}',
        '{"问题": NaN}',
        '{"问题": ["头疼"]}',
        '{"用户画像": "老人"}',
    ]
    objects.append('{"问题": "失眠", "历史摘要": ["钙片"]}')
    expected = ["not_text", "empty_query", "empty_query", "not_text", "empty_query", "not_text"]
    assert reasons(text_file(tmp_path / "q.jsonl", "\n".join(objects))) == expected


def test_a_sheet_is_read_as_the_user_sees_it(tmp_path: Path) -> None:
    path = xlsx(
        tmp_path / "q.xlsx",
        [None, "标准文档", "备注", "用户画像", "问题"],
        [None, 1007, None, "老人", " 怎么吃？\n两次 "],
        [None, 35.5, datetime(2026, 1, 2), 35.0, "头疼"],
        [None, None, None, None, None],
        [None, 123456789012345, 1.5e-7, "", "#N/A "],
        [None, "007", "x", "  ", "  "],
        [None, None, "\u200b", "<&>\"'", "胃疼 &amp; <失眠>"],
        [None, None, " ", None, None],
    )
    book = openpyxl.load_workbook(path)
    book.active["C14"].number_format = "yyyy-mm-dd"
    chart = BarChart()
    chart.add_data(Reference(book.active, min_col=2, min_row=2, max_row=3))
    book.create_chartsheet("图", 0).add_chart(chart)
    book.save(path)
    rows = read(path)
    assert [(row.source, row.reason) for row in rows[:2]] == [
        ("q.xlsx!Sheet1!E2", None),
        ("q.xlsx!Sheet1!E3", None),
    ]
    assert [row.gold_id for row in rows] == ["1007", "35.5", None, "123456789012345", "007", None]
    assert [row.profile for row in rows] == ["老人", "35", "", "", "", "<&>\"'"]
    assert rows[2].reason == rows[4].reason == "empty_query"
    assert rows[5].query == "胃疼 &amp; <失眠>"


def test_a_workbook_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = xlsx(tmp_path / "q.xlsx", ["问题"], *(["头疼"] for _ in range(10)))
    for limit, said in (
        ("MAX_CELLS", "has more than 10 cells,"),
        ("MAX_UNPACKED_BYTES", "unpacks to"),
    ):
        monkeypatch.setattr(excel, limit, 10)
        assert re.search(rf"q\.xlsx: {said} .* save the sheet as \.csv", error_of(path))


def test_problems_name_cell_reason_and_hint(tmp_path: Path) -> None:
    path = xlsx(tmp_path / "q.xlsx", ["问题"], ["头疼"], [None], ["头疼！"])
    lines: list[str] = []
    assert len(list(read_rows(path, Data(), Tenant(), lines.append))) == 3
    assert lines == [
        "q.xlsx!Sheet1!A3: empty_query: fill in the question or delete the row",
        "q.xlsx!Sheet1!A4: duplicate: repeats q.xlsx!Sheet1!A2; delete one of the two",
    ]
    assert frozenset(HINTS) == INPUT_REASONS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.pdf", "x", "unknown suffix `.pdf`; save it as .xlsx, .csv, .jsonl, .parquet"),
        ("h.csv", "问题\n", "has a header but no rows"),
        ("e.csv", "\ufeff", "is empty"),
        ("q.csv", "a,b\n1,2\n", "line 1: no column `问题` (found: a, b);"),
        ("s.csv", "问题;画像\n头疼;老人\n", "not separated by commas"),
        (
            "q.csv",
            '问题\n头疼\n"失眠\n胃疼\n',
            "q.csv:3: not readable as CSV",
        ),  # the rest is not swallowed
        ("q.jsonl", '{"query": "头疼"}', "no column `问题` (found: query)"),
        ("q.jsonl", '{"问题": "头疼"}\n{"问题": \n', "q.jsonl:2: not valid JSON"),
        ("q.jsonl", "[1]\n", "q.jsonl:1: expected a JSON object, found list"),
    ],
)
def test_text_files_that_cannot_be_used(tmp_path: Path, name: str, text: str, message: str) -> None:
    assert message in error_of(text_file(tmp_path / name, text))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the sheet is empty (sheets: Sheet1)"),
        ([["问题"], [None, "  "]], "has a header but no rows"),
        (
            [["用户问题", "画像"], ["头疼"]],
            "Sheet1, row 1: no column `问题` (found: 用户问题, 画像; nearest: 用户问题); "
            "rename it or run with --set data.columns.query=用户问题",
        ),
        (
            [["问题", "备注", "备注", " 问题"], ["头疼"]],
            "column `问题` is in the header twice (A and D); rename one",
        ),
    ],
)
def test_sheets_that_cannot_be_used(tmp_path: Path, rows: list[list[Any]], message: str) -> None:
    assert message in error_of(xlsx(tmp_path / "q.xlsx", *rows))


def test_parquet_files_that_cannot_be_used(tmp_path: Path) -> None:
    assert "no column `问题` (found: query" in error_of(
        parquet(tmp_path / "q.parquet", query=["x"])
    )
    assert "--set data.columns.gold=" in error_of(
        parquet(tmp_path / "q.parquet", 问题=["x"]), columns=Columns(gold="g")
    )
    whole = parquet(tmp_path / "w.parquet", 问题=["头疼"] * 1000).read_bytes()
    (tmp_path / "q.parquet").write_bytes(whole[: len(whole) // 2])
    assert "q.parquet: is damaged or no parquet file" in error_of(tmp_path / "q.parquet")
    assert "has a header but no rows" in error_of(
        parquet(tmp_path / "e.parquet", 问题=pa.array([], pa.string()))
    )


def test_files_that_are_not_there_or_not_readable(
    drop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no such file; correct data.workbook" in error_of(drop / "no.xlsx")
    (drop / "b.csv").write_text("question\nx\n")
    assert "b.csv, line 1: no column `问题`" in error_of(drop)
    (drop / "a.xlsx").rename(drop / "a.xls")
    assert f"{drop / 'a.xls'}: is the old Excel format; save it as .xlsx" in error_of(drop)
    # `is_dir` fails where the folder that it lies in can't be searched.
    for method in ("open", "is_dir"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, method, raising(PermissionError(13, "Permission denied")))
            assert "can't be read: Permission denied; check its permissions" in error_of(
                drop / "b.csv"
            )


def test_files_that_are_not_what_their_name_says_and_damaged_ones(tmp_path: Path) -> None:
    good = xlsx(tmp_path / "good.xlsx", ["问题"], ["头疼"]).read_bytes()
    path = tmp_path / "q.xlsx"
    ole = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
    for content, message in (
        (ole + b"Workbook", "old .xls file under the name .xlsx"),
        (ole + "EncryptedPackage".encode("utf-16-le"), "is encrypted; remove its password"),
        ("问题\n头疼\n".encode(), "is not an Excel file; if it is text, rename it to .csv"),
        (good[: len(good) // 2], "is damaged ("),
        (good.replace(b"xl/workbook.xml", b"xl/workbork.xml"), "is damaged ("),
    ):
        path.write_bytes(content)
        assert message in error_of(path)


def test_undecodable_bytes_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_bytes(b"query\n" + "头疼怎么办\n".encode() * 20 + "失".encode()[:2] + b"\n")
    message = error_of(path, columns=Columns(query="query"))
    assert "q.csv:22: byte" in message, "and it is not garbled as GB18030"
    path.write_bytes("问题\n头疼".encode("utf-16"))
    assert "save the file as UTF-8" in error_of(path)
    path = tmp_path / "q.jsonl"
    path.write_bytes(json.dumps({"问题": "头疼"}, ensure_ascii=False).encode("gb18030"))
    assert "q.jsonl:1: byte" in error_of(path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "gb18030"])
def test_characters_may_be_cut_by_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setattr(files, "BLOCK", 1)
    path = tmp_path / "q.csv"
    content = "问题\n头疼怎么办\n㐀𠀀失眠\n".encode(encoding)
    path.write_bytes(content)
    assert [row.query for row in read(path)] == ["头疼怎么办", "㐀𠀀失眠"]
    path.write_bytes(content + b"\xff\n")
    assert "q.csv:4: byte 0xff is neither UTF-8 nor GB18030" in error_of(path)
    path.write_bytes(content[:-2])
    assert "q.csv:3: byte" in error_of(path)


def test_a_file_that_is_one_line_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MAX_LINE", 20)
    (tmp_path / "q.jsonl").write_text('{"问题": "一"}\n[' + '{"问题": "一"}, ' * 9)
    assert "q.jsonl:2: longer than" in error_of(tmp_path / "q.jsonl")
