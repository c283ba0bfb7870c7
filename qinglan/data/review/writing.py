"""Writes the review workbook: a sheet with cells to fill in, and a guide.

The cells to fill in have the text format, so that a reviewer's ``=1`` or ``3-4`` stays as typed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openpyxl
from openpyxl.cell import WriteOnlyCell
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.datavalidation import DataValidation

from qinglan.data.grade_columns import grade_columns
from qinglan.data.review.columns import (
    BETWEEN_STRATA,
    COMMENT,
    PROFILE,
    REVIEWER,
    SAMPLED_FOR,
    SHEET,
    VERDICT,
    VERDICTS,
    columns_of,
)
from qinglan.data.review.sample import ReviewSample
from qinglan.data.sheets import WRAPPED, fill_sheet, header_cell, text_cell
from qinglan.recipes import Recipe
from qinglan.runs.artifacts import written_whole

_GUIDE = "说明"


def write_sample(
    path: Path,
    sample: ReviewSample,
    recipe: Recipe,
    explanations: Mapping[str, str],
    *,
    tenant: str,
    source: str,
) -> None:
    """Write the workbook, whole or not at all.

    Args:
        explanations: by row id, why the judge gave its score.
        source: where the rows are from; the guide names it.
    """
    reasons = {}
    for row, strata in sample.rows:
        reasons[row.id] = BETWEEN_STRATA.join(stratum.title for stratum in strata)
    columns = columns_of(recipe, reasons, explanations)
    titles = [column.title for column in columns]
    # The reason and the question stay in sight while the other columns scroll.
    first_free_letter = get_column_letter(titles.index(PROFILE) + 1)
    verdict_letter = get_column_letter(titles.index(VERDICT) + 1)

    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet(SHEET)
    rows = (row for row, _ in sample.rows)
    count = fill_sheet(sheet, columns, rows, freeze=f"{first_free_letter}2", wrapped=True)
    verdict_cells = f"{verdict_letter}2:{verdict_letter}{count + 1}"
    sheet.data_validations.append(_verdict_choice(verdict_cells))
    _write_guide(book.create_sheet(_GUIDE), sample, recipe, tenant, source)
    with written_whole(path) as partial:
        book.save(partial)


def _verdict_choice(cells: str) -> DataValidation:
    """A list of the verdicts to choose from in these cells."""
    verdicts = ",".join(VERDICTS)
    choice = DataValidation("list", formula1=f'"{verdicts}"', allow_blank=True, sqref=cells)
    choice.showErrorMessage = True
    # `stop` would refuse the English words.
    choice.errorStyle = "warning"
    choice.errorTitle = "结论"
    choice.error = "请填 通过、拒绝 或 修改（也可以写 accept、reject、correct）"
    return choice


def _write_guide(
    sheet: Any, sample: ReviewSample, recipe: Recipe, tenant: str, source: str
) -> None:
    """Write the second sheet: where the rows are from, how to fill them in, why they were drawn."""
    for letter, width in zip("ABCD", (24, 90, 14, 14), strict=True):
        sheet.column_dimensions[letter].width = width
    _append_lines(sheet, (("租户", tenant), ("来源", source), ("行数", len(sample.rows))))
    _append_header(sheet, ("怎样填写", ""))
    _append_lines(sheet, _rules(recipe))
    _append_header(sheet, (SAMPLED_FOR, "含义", "符合的行", "本表行数"))
    _append_lines(sheet, _strata_lines(sample))


def _rules(recipe: Recipe) -> Sequence[tuple[str, str]]:
    """Rules for filling in: a column's title, and what belongs into it."""
    text_zh = recipe.grader.wording.text_zh
    graded = grade_columns(recipe)
    return [
        (
            VERDICT,
            f"通过：{text_zh}可以用来训练；拒绝：不可以；修改：用您写的{text_zh}代替。"
            "留空表示没有审核，以后还会再抽到。",
        ),
        (f"修改后的{text_zh}", f"只在结论为“修改”时填写：{graded.correction}。"),
        (COMMENT, "可选：理由，供以后查阅。"),
        (REVIEWER, "可选：您的姓名或代号。"),
        (
            "其他列",
            f"请不要改动，尤其是问题、{text_zh}、行编号和{text_zh}指纹："
            f"导入时用它们核对您看到的是哪一条{text_zh}。",
        ),
        ("可以", "排序、筛选、隐藏列、删除不审核的整行；分给几个人填写，再逐个导入。"),
        (
            "导入",
            "qinglan review import 文件名.xlsx"
            "（写错的单元格会逐个指出，全部改好之前什么都不会导入）。",
        ),
        *graded.review_rules,
    ]


def _strata_lines(sample: ReviewSample) -> list[tuple[str | int, ...]]:
    """A line for each stratum: how many rows it has in the run, and how many in this workbook."""
    drawn = sample.drawn
    lines: list[tuple[str | int, ...]] = []
    for stratum in sample.strata:
        population = sample.population[stratum.name]
        lines.append((stratum.title, stratum.meaning, population, drawn[stratum.name]))
    return lines


def _append_header(sheet: Any, titles: Sequence[str]) -> None:
    """An empty line, then the titles of a section."""
    sheet.append([])
    sheet.append([header_cell(sheet, title) for title in titles])


def _append_lines(sheet: Any, lines: Sequence[Sequence[str | int]]) -> None:
    """Lines of wrapped cells; a text stays text."""
    for values in lines:
        cells = []
        for value in values:
            if isinstance(value, str):
                cell = text_cell(sheet, value)
            else:
                cell = WriteOnlyCell(sheet, value)
            cell.alignment = WRAPPED
            cells.append(cell)
        sheet.append(cells)
