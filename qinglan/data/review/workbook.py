"""Writes the review workbook: a sheet with a row to judge per line and cells to fill in, and a sheet with a guide.

The cells to fill in have the text format too, so that a reviewer's ``=1`` or ``3-4`` stays as typed.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openpyxl
from openpyxl.cell import Cell, WriteOnlyCell
from openpyxl.styles import Alignment, Font, PatternFill
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.datavalidation import DataValidation

from qinglan.data.review import ReviewVerdict, fingerprint
from qinglan.data.review.sample import ReviewSample, SampledRow
from qinglan.data.sources.records import input_field
from qinglan.data.workbook_writer import (
    CellValue,
    Column,
    gold_rank,
    header_cell,
    input_titles,
    input_value,
    of_retrieval,
    part_columns,
    text_cell,
    top1_score,
)
from qinglan.recipes import Recipe
from qinglan.rows import Retrieved, Row

SHEET, GUIDE = "审核", "说明"
VERDICTS: dict[str, ReviewVerdict] = {"通过": "accept", "拒绝": "reject", "修改": "correct"}
QUERY, PROFILE, HISTORY, ANSWER = "问题", "用户画像", "历史摘要", "回答"
SAMPLED_FOR, VERDICT, CORRECTED, COMMENT, REVIEWER = "抽样原因", "结论", "修改后的回答", "备注", "审核人"
ROW_ID, FINGERPRINT = "行编号", "回答指纹"
"""Columns by their meaning; `titles_of` gives their titles in a recipe's sheet."""
BETWEEN_STRATA = "；"

_TITLES = 3
_YELLOW, _GREY = PatternFill("solid", fgColor="FFF8DC"), Font(color="999999", size=9)
_WRAPPED = Alignment(wrap_text=True, vertical="top")
_TEXT_FORMAT = "@"


def titles_of(recipe: Recipe) -> dict[str, str]:
    """The titles of the columns that an import reads; those of inputs by `input_field`."""
    named = (SAMPLED_FOR, QUERY, PROFILE, HISTORY, ANSWER, VERDICT, CORRECTED, COMMENT, REVIEWER, ROW_ID, FINGERPRINT)
    titles = {each: each.replace("回答", _thing(recipe)) for each in named}
    taken = [*titles.values(), *(column.title for column in _columns(recipe))]
    asked = (each for each in recipe.INPUTS if each.identifies)
    return titles | {input_field(name): title for name, title in input_titles(asked, taken).items()}


def _thing(recipe: Recipe) -> str:
    return "改写" if recipe.retrieves else "回答"


def write_sample(path: Path, sample: ReviewSample, recipe: Recipe, *, tenant: str, source: str) -> None:
    """Write the workbook, whole or not at all; its guide names `source`, where the rows are from."""
    book = openpyxl.Workbook(write_only=True)
    _write_rows(book.create_sheet(SHEET), sample.rows, _all_columns(recipe))
    _write_guide(book.create_sheet(GUIDE), sample, recipe, tenant, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    book.save(partial)
    partial.replace(path)


def _write_rows(sheet: Any, rows: Sequence[SampledRow], columns: Sequence[Column]) -> None:
    titles = [column.title for column in columns]
    sheet.freeze_panes = f"{get_column_letter(titles.index(QUERY) + 2)}2"
    for number, column in enumerate(columns, 1):
        sheet.column_dimensions[get_column_letter(number)].width = column.width
    header = [header_cell(sheet, column.title) for column in columns]
    for cell, column in zip(header, columns, strict=True):
        if column.fill_in:
            cell.fill = _YELLOW
    sheet.append(header)
    for row, strata in rows:
        reasons = BETWEEN_STRATA.join(stratum.title for stratum in strata)
        values = [reasons if column.title == SAMPLED_FOR else column.value(row) for column in columns]
        sheet.append([_cell(sheet, column, value) for column, value in zip(columns, values, strict=True)])
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(columns))}{len(rows) + 1}"
    letter = get_column_letter(titles.index(VERDICT) + 1)
    cells = f"{letter}2:{letter}{len(rows) + 1}"
    choice = DataValidation("list", formula1=f'"{",".join(VERDICTS)}"', allow_blank=True, sqref=cells)
    choice.showErrorMessage, choice.errorStyle = True, "warning"  # `stop` would refuse the English words
    choice.errorTitle, choice.error = "结论", "请填 通过、拒绝 或 修改（也可以写 accept、reject、correct）"
    sheet.data_validations.append(choice)


def _cell(sheet: Any, column: Column, value: CellValue) -> Cell:
    cell = text_cell(sheet, value) if isinstance(value, str) else WriteOnlyCell(sheet, value)
    cell.alignment = _WRAPPED
    if column.fill_in:
        cell.fill = _YELLOW
    if column.machine:
        cell.font = _GREY
    if column.fill_in or column.machine:
        cell.number_format = _TEXT_FORMAT
    return cell


def _titles(found: Retrieved, _: Row) -> CellValue:
    return "\n".join(f"{place}. {title}" for place, title in enumerate(found.titles[:_TITLES], 1))


def _all_columns(recipe: Recipe) -> tuple[Column, ...]:
    columns = _columns(recipe)
    titles = input_titles(recipe.INPUTS, [column.title for column in columns])
    inputs = tuple(Column(title, 36, input_value(name)) for name, title in titles.items())
    place = [column.title for column in columns].index(HISTORY) + 1
    return (*columns[:place], *inputs, *columns[place:])


def _columns(recipe: Recipe) -> tuple[Column, ...]:
    thing = _thing(recipe)
    found = _FOUND if recipe.retrieves else (Column("数据池", 10, lambda row: row.pool), *part_columns(recipe, 10))
    return (
        Column(SAMPLED_FOR, 16),
        Column(QUERY, 40, lambda row: row.query),
        Column(PROFILE, 18, lambda row: row.profile),
        Column(HISTORY, 28, lambda row: row.history),
        Column(thing, 36, lambda row: row.answer),
        Column("状态", 8, lambda row: row.status),
        Column("原因", 20, lambda row: row.reason),
        Column("裁判分", 8, lambda row: row.judge_score),
        *found,
        Column(VERDICT, 9, fill_in=True),
        Column(f"修改后的{thing}", 36, fill_in=True),
        Column(COMMENT, 24, fill_in=True),
        Column(REVIEWER, 10, fill_in=True),
        Column(ROW_ID, 19, lambda row: row.id, machine=True),
        Column(f"{thing}指纹", 19, lambda row: fingerprint(row.answer), machine=True),
    )


_FOUND = (
    Column("原问题首条得分", 10, of_retrieval("original_retrieved", top1_score)),
    Column("改写首条得分", 10, of_retrieval("answer_retrieved", top1_score)),
    Column("原问题召回", 34, of_retrieval("original_retrieved", _titles)),
    Column("改写召回", 34, of_retrieval("answer_retrieved", _titles)),
    Column("标准文档", 16, lambda row: row.gold_id),
    Column("原问题标准文档名次", 10, of_retrieval("original_retrieved", gold_rank)),
    Column("改写标准文档名次", 10, of_retrieval("answer_retrieved", gold_rank)),
)
"""The retrieval of a rewrite."""


def _rules(recipe: Recipe) -> Sequence[tuple[str, str]]:
    thing, retrieves = _thing(recipe), recipe.retrieves
    wanted = "一行检索关键词，保留用户的意图，不添加问题里没有的内容" if retrieves else "完整的回答，格式与原回答相同"
    return (
        (
            VERDICT,
            f"通过：{thing}可以用来训练；拒绝：不可以；修改：用您写的{thing}代替。留空表示没有审核，以后还会再抽到。",
        ),
        (f"修改后的{thing}", f"只在结论为“修改”时填写：{wanted}。"),
        (COMMENT, "可选：理由，供以后查阅。"),
        (REVIEWER, "可选：您的姓名或代号。"),
        ("其他列", f"请不要改动，尤其是问题、{thing}、行编号和{thing}指纹：导入时用它们核对您看到的是哪一条{thing}。"),
        ("可以", "排序、筛选、隐藏列、删除不审核的整行；分给几个人填写，再逐个导入。"),
        ("导入", "qinglan review import 文件名.xlsx（写错的单元格会逐个指出，全部改好之前什么都不会导入）。"),
        *((("名次", "标准文档在召回结果中的名次，0 表示没有召回；空白表示没有标注标准文档。"),) if retrieves else ()),
    )


def _write_guide(sheet: Any, sample: ReviewSample, recipe: Recipe, tenant: str, source: str) -> None:
    for letter, width in zip("ABCD", (24, 90, 14, 14), strict=True):
        sheet.column_dimensions[letter].width = width
    drawn = Counter(stratum.name for sampled in sample.rows for stratum in sampled.strata)
    _append(sheet, "租户", tenant)
    _append(sheet, "来源", source)
    _append(sheet, "行数", len(sample.rows))
    sheet.append([])
    sheet.append([header_cell(sheet, title) for title in ("怎样填写", "")])
    for name, text in _rules(recipe):
        _append(sheet, name, text)
    sheet.append([])
    sheet.append([header_cell(sheet, title) for title in (SAMPLED_FOR, "含义", "符合的行", "本表行数")])
    for stratum in sample.strata:
        _append(sheet, stratum.title, stratum.meaning, sample.population[stratum.name], drawn[stratum.name])


def _append(sheet: Any, *values: str | int) -> None:
    cells = [text_cell(sheet, v) if isinstance(v, str) else WriteOnlyCell(sheet, v) for v in values]
    for cell in cells:
        cell.alignment = _WRAPPED
    sheet.append(cells)
