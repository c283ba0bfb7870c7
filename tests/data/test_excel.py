"""The fast way and the exact way through an Excel sheet give the same rows, and only plain sheets go the fast one."""

import re
import zipfile
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import openpyxl
import pytest
from openpyxl.styles import Font

from qinglan.config import Columns, Data, Tenant
from qinglan.data.sources import excel
from qinglan.data.sources.excel import scan
from qinglan.data.workbook import read_rows
from qinglan.errors import WorkbookError
from qinglan.rows import Row

FULL = Data(columns=Columns(query="问题", profile="用户画像", gold="标准文档"))
Edit = Callable[[Any], object]


def book_of(path: Path, edit: Edit) -> Path:
    book = openpyxl.Workbook()
    edit(book.active)
    book.save(path)
    return path


def edited(source: Path, edit: Callable[[str], str], member: str = "xl/worksheets/sheet1.xml") -> Path:
    """The workbook with one of its parts edited as text, as another program may have written it."""
    with zipfile.ZipFile(source) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    parts[member] = edit(parts.get(member, ""))
    with zipfile.ZipFile(source, "w") as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return source


def shared(source: Path, *items: str) -> Path:
    """The workbook with shared strings as Excel writes them (openpyxl writes inline ones), from A2 downwards."""
    kind = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/sharedStrings"
    link = f'<Relationship Id="rId99" Type="{kind}" Target="/xl/sharedStrings.xml"/></Relationships>'
    content = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"
    part = f'<Override PartName="/xl/sharedStrings.xml" ContentType="{content}"/></Types>'
    strings = "".join(f"<si>{item}</si>" for item in items)
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    cells = (f'<row r="{n + 2}"><c r="A{n + 2}" t="s"><v>{n}</v></c></row>' for n in range(len(items)))
    rows = "".join(cells) + "</sheetData>"
    edited(source, lambda text: text.replace("</Relationships>", link), "xl/_rels/workbook.xml.rels")
    edited(source, lambda text: text.replace("</Types>", part), "[Content_Types].xml")
    edited(source, lambda _: f'<sst xmlns="{main}">{strings}</sst>', "xl/sharedStrings.xml")
    return edited(source, lambda text: text.replace("</sheetData>", rows))


def is_fast(path: Path, data: Data = FULL) -> bool:
    def refuse(*_: Any) -> Any:
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(excel, "_exact_records", refuse)
        try:
            list(read_rows(path, data, Tenant()))
        except AssertionError:
            return False
    return True


def exact(path: Path, data: Data = FULL) -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(excel, "_plain_records", lambda *_: None)
        return list(read_rows(path, data, Tenant()))


def fast(path: Path, data: Data = FULL) -> list[Row]:
    assert is_fast(path, data)
    return list(read_rows(path, data, Tenant()))


def plain(sheet: Any) -> None:
    """All that may stand on a plain sheet, header in row 1 and nothing in column A."""
    rows: list[list[Any]] = [
        [None, "标准文档", "备注", "用户画像", "问题"],
        [None, 1007, None, "老人", " 怎么吃？\n两次 "],
        [None, 35.5, datetime(2026, 1, 2), 35.0, "头疼"],
        [None, None, None, None, None],
        [None, "007", True, False, True],
        [None, 0.1 + 0.2, 1e22, -0.0, 42],
        [None, 123456789012345, 1.5e-7, "", "#N/A "],
        [None, "", "x", "  ", "  "],
        [None, None, "\u200b", "<&>\"'", "胃疼 &amp; <失眠>"],
        [None, None, None, None, "头疼"],
        [None, None, " ", None, None],
    ]
    for row in rows:
        sheet.append(row)
    sheet["C14"].number_format = "yyyy-mm-dd"
    sheet["A1048576"].font = Font(bold=True)
    sheet["B3"].number_format = "0.00%"


def test_both_ways_give_the_same_rows(tmp_path: Path) -> None:
    path = book_of(tmp_path / "q.xlsx", plain)
    rows = fast(path)
    assert rows == exact(path)
    assert [(row.source, row.reason) for row in rows[1:3]] == [
        ("q.xlsx!Sheet!E3", None), ("q.xlsx!Sheet!E4", "empty_query"),
    ]  # fmt: skip
    assert (len(rows), rows[1].profile, rows[1].gold_id, rows[5].gold_id) == (9, "35", "35.5", "123456789012345")


RICH = '<r><t>头</t></r><r><rPr><b/></rPr><t xml:space="preserve"> 疼 </t></r><r><t>吗</t></r>'


def test_shared_and_rich_texts_are_the_same_both_ways(tmp_path: Path) -> None:
    path = book_of(tmp_path / "q.xlsx", lambda sheet: sheet.append(["问题"]))
    phonetic = '<t>多少</t><rPh sb="0" eb="1"><t>duo</t></rPh>'
    shared(path, RICH, phonetic, '<t xml:space="preserve">一\n二&#10;三 &lt;四&gt;</t>', "<t/>", "<t>_x_</t>")
    inline = (
        f'<row r="7"><c r="A7" t="inlineStr"><is>{RICH}</is></c></row><row r="8"><c r="A8" t="str"><v>串</v></c></row>'
    )
    edited(path, lambda text: text.replace("</sheetData>", f"{inline}</sheetData>"))
    rows = fast(path, Data())
    assert rows == exact(path, Data())
    assert [row.query for row in rows] == ["头 疼 吗", "多少", "一\n二\n三 <四>", "", "_x_", "头 疼 吗", "串"]
    assert rows[5].reason == "duplicate"


@pytest.mark.parametrize("text", ["a_x000D_b", "a\r\nb", "a&#13;b", "<![CDATA[a]]>"])
def test_shared_texts_that_readers_differ_about_go_the_exact_way(tmp_path: Path, text: str) -> None:
    path = book_of(tmp_path / "q.xlsx", lambda sheet: sheet.append(["问题"]))
    assert not is_fast(shared(path, f"<t>{text}</t>"), Data())


def plain_and(cell: str, value: object, number_format: str | None = None) -> Edit:
    def edit(sheet: Any) -> None:
        plain(sheet)
        sheet[cell] = value
        sheet[cell].number_format = number_format or sheet[cell].number_format

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        plain_and("G2", "=1+1"),
        plain_and("G2", "#N/A"),
        plain_and("D2", date(2026, 1, 2)),
        plain_and("XFD20000", "x"),
        lambda sheet: (plain(sheet), sheet.merge_cells("G2:G3")),
        plain_and("D2", 46024, 'yyyy"年"m"月"'),
    ],
)
def test_what_is_not_plain_goes_the_exact_way(tmp_path: Path, edit: Edit) -> None:
    assert not is_fast(book_of(tmp_path / "q.xlsx", edit))


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: re.sub(r"<(/?)(\w+)", r"<\1x:\2", text).replace("xmlns=", "xmlns:x="),
        lambda text: text.replace('<c r="E2"', "<c\tr='E2'"),
        lambda text: text.replace('<c r="E2"', '<c cm="1" r="E2"'),
        lambda text: re.sub(r'<c r="\w+"', "<c", text),
        lambda text: text.replace("<v>1007</v>", "<v>1234567890123456789</v>"),
    ],
)
def test_what_others_write_in_another_way_goes_the_exact_way(tmp_path: Path, edit: Callable[[str], str]) -> None:
    path = edited(book_of(tmp_path / "q.xlsx", plain), edit)
    assert not is_fast(path)
    assert "35.5" in {row.gold_id for row in read_rows(path, FULL, Tenant())}


def test_what_excel_writes_is_plain_and_a_chart_sheet_no_sheet(tmp_path: Path) -> None:
    path = book_of(tmp_path / "q.xlsx", lambda sheet: (plain(sheet), sheet.parent.create_chartsheet("图", 0)))
    assert fast(path)[0].source == "q.xlsx!Sheet!E2"
    assert scan(path, None).dated == {2}  # dates in a column that nothing reads
    head = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\r\n'
    assert is_fast(edited(path, lambda text: head + text))


def test_cells_may_be_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qinglan.data.sources.excel._BLOCK", 7)
    path = book_of(tmp_path / "q.xlsx", plain)
    assert is_fast(path)
    assert not is_fast(book_of(tmp_path / "f.xlsx", plain_and("G2", "=1+1")))
    assert not is_fast(edited(path, lambda text: text.replace("<v>1007<", "<v>1234567890123456<")))


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = book_of(tmp_path / "q.xlsx", lambda sheet: (plain(sheet), sheet.append(["长" * 200])))
    monkeypatch.setattr(excel, "_BLOCK", 50)
    monkeypatch.setattr(excel, "_MAX_TEXT", 100)
    with pytest.raises(WorkbookError, match=r"is damaged \(a text of more than"):
        list(read_rows(path, FULL, Tenant()))
    monkeypatch.setattr(excel, "MAX_CELLS", 10)
    with pytest.raises(WorkbookError, match=r"q\.xlsx: has more than 10 cells, .* save the sheet as \.csv"):
        list(read_rows(path, FULL, Tenant()))
    monkeypatch.setattr(excel, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(WorkbookError, match=r"q\.xlsx: unpacks to .* save the sheet as \.csv"):
        list(read_rows(path, FULL, Tenant()))
