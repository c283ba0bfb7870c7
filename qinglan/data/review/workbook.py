"""The review workbook: written with cells to fill in and a guide, and read back as verdicts.

Each line proves by itself which row it is about: the row's id is a hash of question, profile,
history and the recipe's inputs, and the fingerprint one of the answer. So no other file is needed,
and the workbook may be sorted, split among several reviewers, or filled in on another machine.
Every cell that can't be used gets a line, and one such cell stops the whole import. The cells to
fill in have the text format, so that a reviewer's ``=1`` or ``3-4`` stays as typed.
"""

import hashlib
import io
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import openpyxl
from openpyxl.cell import MergedCell, WriteOnlyCell
from openpyxl.utils import get_column_letter
from openpyxl.worksheet.datavalidation import DataValidation

from qinglan.config import Profile, Select
from qinglan.data.review import Review, ReviewVerdict, fingerprint
from qinglan.data.review.sample import CONTROL, ReviewSample
from qinglan.data.sources.excel import CORRUPT, damage, sheets_of
from qinglan.data.sources.records import cell_text, input_field
from qinglan.data.workbook_writer import (
    WRAPPED,
    CellValue,
    Column,
    fill_sheet,
    gold_rank,
    header_cell,
    input_columns,
    input_titles,
    of_retrieval,
    part_columns,
    text_cell,
    thing_of,
)
from qinglan.errors import TeacherError, WorkbookError
from qinglan.recipes import Recipe, get_recipe, identifying
from qinglan.rows import Retrieved, Row, normalise, row_id
from qinglan.runs.artifacts import written_whole
from qinglan.text import shown

SHEET, GUIDE = "审核", "说明"
VERDICTS: dict[str, ReviewVerdict] = {"通过": "accept", "拒绝": "reject", "修改": "correct"}
QUERY, PROFILE, HISTORY, ANSWER = "问题", "用户画像", "历史摘要", "回答"
SAMPLED_FOR, VERDICT, CORRECTED, COMMENT, REVIEWER = (
    "抽样原因",
    "结论",
    "修改后的回答",
    "备注",
    "审核人",
)
ROW_ID, FINGERPRINT = "行编号", "回答指纹"
"""Columns by their meaning; `titles_of` gives their titles in a recipe's sheet."""
BETWEEN_STRATA = "；"
_WORDS: dict[str, ReviewVerdict] = VERDICTS | {verdict: verdict for verdict in VERDICTS.values()}


def titles_of(recipe: Recipe) -> dict[str, str]:
    """The titles of the columns that an import reads; those of inputs by `input_field`."""
    named = (
        SAMPLED_FOR,
        QUERY,
        PROFILE,
        HISTORY,
        ANSWER,
        VERDICT,
        CORRECTED,
        COMMENT,
        REVIEWER,
        ROW_ID,
        FINGERPRINT,
    )
    taken = [column.title for column in _columns(recipe, {}, {})]
    asked = input_titles((each for each in recipe.INPUTS if each.identifies), taken)
    inputs = {input_field(name): title for name, title in asked.items()}
    return {each: each.replace("回答", thing_of(recipe)) for each in named} | inputs


def write_sample(
    path: Path,
    sample: ReviewSample,
    recipe: Recipe,
    said: Mapping[str, str],
    *,
    tenant: str,
    source: str,
) -> None:
    """Write the workbook, whole or not at all.

    Args:
        said: by row id, the judge's reason.
        source: where the rows are from; the guide names it.
    """
    book = openpyxl.Workbook(write_only=True)
    reasons = {
        row.id: BETWEEN_STRATA.join(stratum.title for stratum in strata)
        for row, strata in sample.rows
    }
    known = _columns(recipe, reasons, said)
    place = [column.title for column in known].index(HISTORY) + 1
    columns = (*known[:place], *input_columns(recipe, known, 36), *known[place:])
    sheet, titles = book.create_sheet(SHEET), [column.title for column in columns]
    free, verdict = (get_column_letter(titles.index(title) + 1) for title in (PROFILE, VERDICT))
    count = fill_sheet(
        sheet, columns, (row for row, _ in sample.rows), freeze=f"{free}2", wrapped=True
    )
    verdicts = f"{verdict}2:{verdict}{count + 1}"
    choice = DataValidation(
        "list", formula1=f'"{",".join(VERDICTS)}"', allow_blank=True, sqref=verdicts
    )
    choice.showErrorMessage, choice.errorStyle = (
        True,
        "warning",
    )  # `stop` would refuse the English words
    choice.errorTitle, choice.error = (
        "结论",
        "请填 通过、拒绝 或 修改（也可以写 accept、reject、correct）",
    )
    sheet.data_validations.append(choice)
    _write_guide(book.create_sheet(GUIDE), sample, recipe, tenant, source)
    with written_whole(path) as partial:
        book.save(partial)


def _titles(found: Retrieved, _: Row) -> CellValue:
    return "\n".join(f"{place}. {title}" for place, title in enumerate(found.titles[:3], 1))


def _columns(
    recipe: Recipe, reasons: Mapping[str, str], said: Mapping[str, str]
) -> tuple[Column, ...]:
    """All but those of the recipe's inputs. By row id, `reasons` tells why it was drawn, `said`
    what the judge said."""
    thing = thing_of(recipe)
    found = (
        _FOUND
        if recipe.grader.retrieves
        else (Column("数据池", 10, lambda row: row.pool), *part_columns(recipe, 10))
    )
    return (
        Column(SAMPLED_FOR, 16, lambda row: reasons[row.id]),
        Column(QUERY, 40, lambda row: row.query),
        Column(PROFILE, 18, lambda row: row.profile),
        Column(HISTORY, 28, lambda row: row.history),
        Column(thing, 36, lambda row: row.answer),
        Column("状态", 8, lambda row: row.status),
        Column("原因", 20, lambda row: row.reason),
        Column("裁判分", 8, lambda row: row.judge_score),
        Column("裁判理由", 28, lambda row: said.get(row.id)),
        *found,
        Column(VERDICT, 9, fill_in=True),
        Column(f"修改后的{thing}", 36, fill_in=True),
        Column(COMMENT, 24, fill_in=True),
        Column(REVIEWER, 10, fill_in=True),
        Column(ROW_ID, 19, lambda row: cell_of(row, recipe), machine=True),
        Column(f"{thing}指纹", 19, lambda row: fingerprint(row.answer), machine=True),
    )


_FOUND = (
    Column(
        "原问题首条得分",
        10,
        of_retrieval("original_retrieved", lambda found, _: round(found.top1_score, 4)),
    ),
    Column(
        "改写首条得分",
        10,
        of_retrieval("answer_retrieved", lambda found, _: round(found.top1_score, 4)),
    ),
    Column("原问题召回", 34, of_retrieval("original_retrieved", _titles)),
    Column("改写召回", 34, of_retrieval("answer_retrieved", _titles)),
    Column("标准文档", 16, lambda row: row.gold_id),
    Column("原问题标准文档名次", 10, of_retrieval("original_retrieved", gold_rank)),
    Column("改写标准文档名次", 10, of_retrieval("answer_retrieved", gold_rank)),
)
"""The retrieval of a rewrite."""


def cell_of(row: Row, recipe: Recipe) -> str:
    """The row's id; where profile or history were extracted, with the id that the sheet's cells
    have."""
    shown_id = row_id(
        row.tenant, row.query, row.profile, row.history, identifying(row.inputs, recipe.INPUTS)
    )
    return row.id if shown_id == row.id else f"{row.id}-{shown_id}"


def _rules(recipe: Recipe) -> Sequence[tuple[str, str]]:
    thing, retrieves = thing_of(recipe), recipe.grader.retrieves
    wanted = (
        "一行检索关键词，保留用户的意图，不添加问题里没有的内容"
        if retrieves
        else "完整的回答，格式与原回答相同"
    )
    return (
        (
            VERDICT,
            f"通过：{thing}可以用来训练；拒绝：不可以；修改：用您写的{thing}代替。留空表示没有审核，以后还会再抽到。",
        ),
        (f"修改后的{thing}", f"只在结论为“修改”时填写：{wanted}。"),
        (COMMENT, "可选：理由，供以后查阅。"),
        (REVIEWER, "可选：您的姓名或代号。"),
        (
            "其他列",
            f"请不要改动，尤其是问题、{thing}、行编号和{thing}指纹：导入时用它们核对您看到的是哪一条{thing}。",
        ),
        ("可以", "排序、筛选、隐藏列、删除不审核的整行；分给几个人填写，再逐个导入。"),
        (
            "导入",
            "qinglan review import 文件名.xlsx（写错的单元格会逐个指出，全部改好之前什么都不会导入）。",
        ),
        *(
            (("名次", "标准文档在召回结果中的名次，0 表示没有召回；空白表示没有标注标准文档。"),)
            if retrieves
            else ()
        ),
    )


def _write_guide(
    sheet: Any, sample: ReviewSample, recipe: Recipe, tenant: str, source: str
) -> None:
    for letter, width in zip("ABCD", (24, 90, 14, 14), strict=True):
        sheet.column_dimensions[letter].width = width
    drawn = Counter(stratum.name for sampled in sample.rows for stratum in sampled.strata)
    facts = (("租户", tenant), ("来源", source), ("行数", len(sample.rows)))
    strata = [(s.title, s.meaning, sample.population[s.name], drawn[s.name]) for s in sample.strata]
    sections: tuple[tuple[Sequence[str], Sequence[Sequence[str | int]]], ...] = (
        ((), facts),
        (("怎样填写", ""), _rules(recipe)),
        ((SAMPLED_FOR, "含义", "符合的行", "本表行数"), strata),
    )
    for header, lines in sections:
        if header:
            sheet.append([])
            sheet.append([header_cell(sheet, title) for title in header])
        for values in lines:
            cells = [
                text_cell(sheet, v) if isinstance(v, str) else WriteOnlyCell(sheet, v)
                for v in values
            ]
            for cell in cells:
                cell.alignment = WRAPPED
            sheet.append(cells)


class ControlResult(NamedTuple):
    rows: int
    reviewed: int
    wrong: int
    """Rejected or corrected."""

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the share that is wrong."""
        from scipy.stats import binomtest  # type: ignore[import-untyped]

        ends = binomtest(self.wrong, self.reviewed).proportion_ci(method="wilson")
        return float(ends.low), float(ends.high)


@dataclass(frozen=True, eq=False)
class ReviewLine:
    sheet: str
    """The names of its file and sheet."""
    cells: Mapping[str, Any]
    """Its used cells by the meaning of their column."""

    def place(self, title: str) -> str:
        """The cell's coordinate, such as `K7`."""
        return str(self.cells[title].coordinate)

    def text(self, title: str) -> str:
        """The cell's text, stripped; 12.0 as 12."""
        return cell_text(self.cells[title].value)


class ReviewSheet(NamedTuple):
    """A filled-in workbook; with any problem, none of it may be stored."""

    reviews: Sequence[Review]
    problems: Sequence[str]
    """A line per cell: place, problem and hint."""
    without_verdict: int
    lone_comments: int
    """Comments on rows without a verdict, which are not kept."""
    control: ControlResult


def read_sheet(path: Path, profile: Profile) -> ReviewSheet:
    """Read a filled-in workbook, and store nothing; WorkbookError where the file as a whole can't
    be used."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise WorkbookError(f"{path}: no such file; give the filled-in review workbook") from error
    except OSError as error:
        raise WorkbookError(
            f"{path}: can't be read: {error.strerror or error}; check its permissions"
        ) from error
    recipe = get_recipe(profile.recipe)
    parse = recipe.grader.clean if recipe.grader.retrieves else recipe.correction
    titles, now, digest = titles_of(recipe), datetime.now(UTC), hashlib.sha256(content).hexdigest()
    lines = [line for line in _lines_of(path, content, titles) if any(map(line.text, titles))]
    problems: list[str] = []
    reviews: dict[str, tuple[ReviewLine, Review]] = {}
    silent = []
    for line in lines:
        if not any(
            line.text(t) or isinstance(line.cells[t], MergedCell) for t in (VERDICT, CORRECTED)
        ):
            silent.append(line)  # nor can a merged cell hide a verdict
            continue
        if found := _problems(line, profile, recipe):
            problems += [f"{line.sheet}!{each}" for each in found]
            continue
        verdict = _WORDS[line.text(VERDICT).casefold()]
        review = Review(
            tenant=profile.tenant.id,
            row=line.text(ROW_ID).partition("-")[0],
            verdict=verdict,
            fingerprint=line.text(FINGERPRINT),
            answer=line.text(ANSWER),
            corrected=parse(line.text(CORRECTED)) if verdict == "correct" else None,
            comment=line.text(COMMENT),
            reviewer=line.text(REVIEWER),
            imported_at=now.isoformat(timespec="seconds"),
            file=path.name,
            file_sha256=digest,
        )
        first_line, first = reviews.setdefault(review.row, (line, review))
        if (first.effect, first.fingerprint) != (review.effect, review.fingerprint):
            problems.append(
                f"{line.sheet}!{line.place(VERDICT)}: {line.text(VERDICT)} does not agree with "
                f"{first_line.text(VERDICT)} in {first_line.place(VERDICT)}, which is the same row; keep one of the two"
            )
    return ReviewSheet(
        reviews=[review for _, review in reviews.values()],
        problems=problems,
        without_verdict=len(silent),
        lone_comments=sum(bool(line.text(COMMENT)) for line in silent),
        control=_control(lines, reviews.values()),
    )


def _lines_of(path: Path, content: bytes, columns: Mapping[str, str]) -> Iterator[ReviewLine]:
    """Every line below the header, wherever the columns are, whose titles are given by their
    meaning."""
    try:
        sheets = sheets_of(path, io.BytesIO(content))
    except CORRUPT as error:
        problem = f"is no readable .xlsx file ({damage(error)})"
        raise WorkbookError(f"{path}: {problem}; open it in Excel and save it again") from error
    if SHEET not in sheets:
        found = ", ".join(sheets) or "none"
        raise WorkbookError(
            f"{path}: no sheet `{SHEET}` (sheets: {found}); give one of `qinglan review export`"
        )
    sheet = sheets[SHEET]
    header = next(sheet.iter_rows(max_row=1), ())
    titles = ["" if cell.value is None else str(cell.value).strip() for cell in header]
    for title in columns.values():
        if title not in titles:
            raise WorkbookError(
                f"{path}!{SHEET}: no column `{title}` in row 1; put it back as it was exported"
            )
        if titles.count(title) > 1:
            letters = " and ".join(
                get_column_letter(n) for n, other in enumerate(titles, 1) if other == title
            )
            raise WorkbookError(
                f"{path}!{SHEET}: column `{title}` is in row 1 twice ({letters}); delete one"
            )
    places = {each: titles.index(title) for each, title in columns.items()}
    for cells in sheet.iter_rows(min_row=2):
        yield ReviewLine(
            f"{path.name}!{SHEET}", {each: cells[place] for each, place in places.items()}
        )


def _problems(line: ReviewLine, profile: Profile, recipe: Recipe) -> list[str]:
    """A line per bad cell, which begins with its place."""
    unreadable = []  # values that are not what the reviewer sees
    for title, cell in line.cells.items():
        place = line.place(title)
        if isinstance(cell, MergedCell):
            unreadable.append(
                f"{place}: is merged with other cells; unmerge them and give every row its own value"
            )
        elif cell.data_type == "f":
            unreadable.append(f"{place}: holds a formula; paste its result as a value")
        elif cell.data_type == "e":
            unreadable.append(f"{place}: holds the error {line.text(title)}; write text")
    return unreadable or [
        *_verdict_problems(line, profile.select, recipe),
        *_identity_problems(line, profile, recipe),
    ]


def _identity_problems(line: ReviewLine, profile: Profile, recipe: Recipe) -> Iterator[str]:
    """Which row and which answer is it about?"""
    found, restore = (
        line.text(ROW_ID),
        "restore it from the exported workbook, or clear the verdict",
    )
    inputs = {
        each.name: line.text(input_field(each.name)) for each in recipe.INPUTS if each.identifies
    }
    shown_id = row_id(
        profile.tenant.id, line.text(QUERY), line.text(PROFILE), line.text(HISTORY), inputs
    )
    if not found:
        yield f"{line.place(ROW_ID)}: the row id is missing; {restore}"
    elif (found.partition("-")[2] or found) != shown_id:
        yield (
            f"{line.place(ROW_ID)}: {shown(found, 40)} is unknown: it is not the id of this question and what belongs "
            f"to it for tenant `{profile.tenant.id}`; one of them was changed, or it is another tenant's row; {restore}"
        )
    if line.text(FINGERPRINT) != fingerprint(line.text(ANSWER)):
        yield (
            f"{line.place(ANSWER)}: is not the answer of the fingerprint in {line.place(FINGERPRINT)}; {restore}; your "
            f"own answer belongs into {line.place(CORRECTED)}"
        )


def _verdict_problems(line: ReviewLine, select: Select, recipe: Recipe) -> Iterator[str]:
    word, text = line.text(VERDICT), " ".join(line.text(CORRECTED).split())
    at_verdict, at_answer, verdict = (
        line.place(VERDICT),
        line.place(CORRECTED),
        _WORDS.get(word.casefold()),
    )
    if not word:
        yield f"{at_verdict}: has no verdict, but {at_answer} has an answer; write 修改, or clear it"
    elif verdict is None:
        yield f"{at_verdict}: {shown(word, 40)} is no verdict; write 通过, 拒绝 or 修改"
    elif verdict != "correct":
        if text:
            yield f"{at_answer}: an answer beside {word}; write 修改 into {at_verdict}, or clear it"
        if verdict == "accept" and not line.text(ANSWER):
            yield f"{at_verdict}: there is no answer to accept; write 拒绝, or 修改 with your own"
    elif not text:
        yield f"{at_answer}: is empty, but the verdict is {word}; write your answer, or change the verdict"
    elif recipe.grader.retrieves:
        if len(text) > (most := select.max_rewrite_chars):
            yield f"{at_answer}: has {len(text)} characters, select.max_rewrite_chars is {most}"
        elif len(normalise(text)) < (least := select.min_rewrite_chars):
            yield f"{at_answer}: {shown(text, 40)} is shorter than select.min_rewrite_chars, {least}"
    else:
        try:
            recipe.correction(line.text(CORRECTED))
        except TeacherError as error:
            yield f"{at_answer}: is not what the recipe can read as an answer: {error}"


def _control(
    lines: Sequence[ReviewLine], reviews: Collection[tuple[ReviewLine, Review]]
) -> ControlResult:
    controls = {
        line for line in lines if CONTROL.title in line.text(SAMPLED_FOR).split(BETWEEN_STRATA)
    }
    verdicts = [review.verdict for line, review in reviews if line in controls]
    rows = {line.text(ROW_ID) for line in controls}
    return ControlResult(len(rows), len(verdicts), sum(verdict != "accept" for verdict in verdicts))
