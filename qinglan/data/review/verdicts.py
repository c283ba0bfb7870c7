"""Imports a review workbook: every cell that can't be used gets a line, and one such cell stops the whole import.

Each line proves by itself which row it is about: the row's id is a hash of question, profile, history and the recipe's
inputs, and the fingerprint one of the answer. So no other file is needed, and the workbook may be sorted, split among
several reviewers, or filled in on another machine.
"""

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from openpyxl.cell import MergedCell
from openpyxl.utils import get_column_letter

from qinglan.config import Profile, Select
from qinglan.data.review import Review, ReviewVerdict, fingerprint
from qinglan.data.review.sample import CONTROL
from qinglan.data.review.workbook import (
    ANSWER,
    BETWEEN_STRATA,
    COMMENT,
    CORRECTED,
    FINGERPRINT,
    HISTORY,
    PROFILE,
    QUERY,
    REVIEWER,
    ROW_ID,
    SAMPLED_FOR,
    SHEET,
    VERDICT,
    VERDICTS,
    titles_of,
)
from qinglan.data.sources.excel import CORRUPT, damage, load_book
from qinglan.data.sources.records import input_field
from qinglan.errors import TeacherError, WorkbookError
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import normalise, row_id

_WORDS: dict[str, ReviewVerdict] = VERDICTS | {verdict: verdict for verdict in VERDICTS.values()}


@dataclass(frozen=True)
class ControlResult:
    """The verdicts on the control rows."""

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


class ReviewLine:
    """A line of the sheet: its used cells by the meaning of their column."""

    def __init__(self, prefix: str, cells: Mapping[str, Any]) -> None:
        self._prefix, self._cells = prefix, cells

    def at(self, title: str) -> str:
        return f"{self._prefix}!{self.place(title)}"

    def place(self, title: str) -> str:
        """The cell's coordinate, such as `K7`."""
        return str(self._cells[title].coordinate)

    def text(self, title: str) -> str:
        """The cell's text, stripped; 12.0 as 12."""
        value = self._cells[title].value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return "" if value is None else str(value).strip()

    def expected_id(self, tenant: str, recipe: Recipe) -> str:
        """The id that belongs to its question, context and inputs."""
        inputs = {each.name: self.text(input_field(each.name)) for each in recipe.INPUTS if each.identifies}
        return row_id(tenant, self.text(QUERY), self.text(PROFILE), self.text(HISTORY), inputs)

    def has_answer(self) -> bool:
        """Is there a verdict, an answer, or a merged cell that hides one?"""
        return any(self.text(t) or isinstance(self._cells[t], MergedCell) for t in (VERDICT, CORRECTED))

    def unreadable(self) -> Iterator[str]:
        """A problem for each cell whose value is not what the reviewer sees."""
        for title, cell in self._cells.items():
            if isinstance(cell, MergedCell):
                yield f"{self.at(title)}: is merged with other cells; unmerge them and give every row its own value"
            elif cell.data_type == "f":
                yield f"{self.at(title)}: holds a formula; paste its result as a value"
            elif cell.data_type == "e":
                yield f"{self.at(title)}: holds the error {self.text(title)}; write text"


@dataclass(frozen=True)
class ReviewSheet:
    """A filled-in workbook; with any problem, none of it may be stored."""

    reviews: Sequence[Review]
    problems: Sequence[str]
    """A line per cell: place, problem and hint."""
    without_verdict: int
    lone_comments: int
    """Comments on rows without a verdict, which are not kept."""
    control: ControlResult


def read_sheet(path: Path, profile: Profile) -> ReviewSheet:
    """Read a filled-in workbook, and store nothing; WorkbookError where the file as a whole can't be used."""
    if not path.is_file():
        raise WorkbookError(f"{path}: no such file; give the filled-in review workbook")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WorkbookError(f"{path}: can't be read: {error.strerror or error}; check its permissions") from error
    recipe = get_recipe(profile.recipe)
    titles = titles_of(recipe)
    lines = [line for line in _lines_of(path, content, titles) if any(map(line.text, titles))]
    provenance = {
        "imported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "file": path.name,
        "file_sha256": hashlib.sha256(content).hexdigest(),
    }
    problems: list[str] = []
    reviews: dict[str, tuple[ReviewLine, Review]] = {}
    for line in lines:
        if not line.has_answer():
            continue
        if found := list(_problems(line, profile, recipe)):
            problems += found
            continue
        review = _review(line, recipe, profile.tenant.id, provenance)
        first_line, first = reviews.setdefault(review.row, (line, review))
        if (first.effect, first.fingerprint) != (review.effect, review.fingerprint):
            problems.append(
                f"{line.at(VERDICT)}: {line.text(VERDICT)} does not agree with {first_line.text(VERDICT)} in "
                f"{first_line.place(VERDICT)}, which is the same row; keep one of the two"
            )
    silent = [line for line in lines if not line.has_answer()]
    return ReviewSheet(
        reviews=[review for _, review in reviews.values()],
        problems=problems,
        without_verdict=len(silent),
        lone_comments=sum(bool(line.text(COMMENT)) for line in silent),
        control=_control(lines, [line for line, _ in reviews.values()]),
    )


def _lines_of(path: Path, content: bytes, columns: Mapping[str, str]) -> Iterator[ReviewLine]:
    """Every line below the header, wherever the columns are, whose titles are given by their meaning."""
    try:
        book = load_book(io.BytesIO(content))
    except CORRUPT as error:
        raise WorkbookError(
            f"{path}: is no readable .xlsx file ({damage(error)}); open it in Excel and save it again"
        ) from error
    sheets = {sheet.title: sheet for sheet in book.worksheets}  # without chart sheets
    if SHEET not in sheets:
        listed = ", ".join(sheets) or "none"
        raise WorkbookError(
            f"{path}: no sheet `{SHEET}` (sheets: {listed}); give a workbook of `qinglan review export`"
        )
    sheet = sheets[SHEET]
    header = next(sheet.iter_rows(max_row=1), ())
    titles = ["" if cell.value is None else str(cell.value).strip() for cell in header]
    for title in columns.values():
        if title not in titles:
            raise WorkbookError(f"{path}!{SHEET}: no column `{title}` in row 1; put it back as it was exported")
        if titles.count(title) > 1:
            letters = " and ".join(get_column_letter(n) for n, other in enumerate(titles, 1) if other == title)
            raise WorkbookError(f"{path}!{SHEET}: column `{title}` is in row 1 twice ({letters}); delete one")
    places = {each: titles.index(title) for each, title in columns.items()}
    for cells in sheet.iter_rows(min_row=2):
        yield ReviewLine(f"{path.name}!{SHEET}", {each: cells[place] for each, place in places.items()})


def _problems(line: ReviewLine, profile: Profile, recipe: Recipe) -> Iterator[str]:
    if unreadable := list(line.unreadable()):
        yield from unreadable
        return
    yield from _verdict_problems(line, profile.select, recipe)
    restore = "restore it from the exported workbook, or clear the verdict"
    if not line.text(ROW_ID):
        yield f"{line.at(ROW_ID)}: the row id is missing; {restore}"
    elif line.text(ROW_ID) != line.expected_id(profile.tenant.id, recipe):
        yield (
            f"{line.at(ROW_ID)}: {_quoted(line.text(ROW_ID))} is unknown: it is not the id of this question and what "
            f"belongs to it for tenant `{profile.tenant.id}`; one of them was changed, or the row is another tenant's; "
            f"{restore}"
        )
    if line.text(FINGERPRINT) != fingerprint(line.text(ANSWER)):
        yield (
            f"{line.at(ANSWER)}: is not the answer of the fingerprint in {line.place(FINGERPRINT)}; {restore}; your "
            f"own answer belongs into {line.place(CORRECTED)}"
        )


def _verdict_problems(line: ReviewLine, select: Select, recipe: Recipe) -> Iterator[str]:
    word, text = line.text(VERDICT), " ".join(line.text(CORRECTED).split())
    verdict = _WORDS.get(word.casefold())
    if not word:
        yield f"{line.at(VERDICT)}: has no verdict, but {line.place(CORRECTED)} has an answer; write 修改, or clear it"
    elif verdict is None:
        yield f"{line.at(VERDICT)}: {_quoted(word)} is no verdict; write 通过, 拒绝 or 修改"
    elif verdict != "correct":
        if text:
            yield f"{line.at(CORRECTED)}: an answer beside {word}; write 修改 into {line.place(VERDICT)}, or clear it"
        if verdict == "accept" and not line.text(ANSWER):
            yield f"{line.at(VERDICT)}: there is no answer to accept; write 拒绝, or 修改 with your own"
    elif not text:
        yield f"{line.at(CORRECTED)}: is empty, but the verdict is {word}; write your answer, or change the verdict"
    elif recipe.retrieves:
        if len(text) > (most := select.max_rewrite_chars):
            yield f"{line.at(CORRECTED)}: has {len(text)} characters, select.max_rewrite_chars is {most}"
        elif len(normalise(text)) < (least := select.min_rewrite_chars):
            yield f"{line.at(CORRECTED)}: {_quoted(text)} is shorter than select.min_rewrite_chars, {least}"
    else:
        try:
            recipe.parse_answer(line.text(CORRECTED))
        except TeacherError as error:
            yield f"{line.at(CORRECTED)}: is not what the recipe can read as an answer: {error}"


def _review(line: ReviewLine, recipe: Recipe, tenant: str, provenance: Mapping[str, str]) -> Review:
    verdict = _WORDS[line.text(VERDICT).casefold()]
    parse = recipe.clean if recipe.retrieves else recipe.parse_answer
    return Review(
        tenant=tenant,
        row=line.text(ROW_ID),
        verdict=verdict,
        fingerprint=line.text(FINGERPRINT),
        answer=line.text(ANSWER),
        corrected=parse(line.text(CORRECTED)) if verdict == "correct" else None,
        comment=line.text(COMMENT),
        reviewer=line.text(REVIEWER),
        **provenance,
    )


def _control(lines: Sequence[ReviewLine], reviewed: Sequence[ReviewLine]) -> ControlResult:
    def is_control(line: ReviewLine) -> bool:
        return CONTROL.title in line.text(SAMPLED_FOR).split(BETWEEN_STRATA)

    verdicts = [_WORDS[line.text(VERDICT).casefold()] for line in reviewed if is_control(line)]
    rows = {line.text(ROW_ID) for line in lines if is_control(line)}
    return ControlResult(len(rows), len(verdicts), sum(verdict != "accept" for verdict in verdicts))


def _quoted(text: str, chars: int = 40) -> str:
    """A cell's text without control characters, shortened."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:chars])
    return f'"{shown}…"' if len(text) > chars else f'"{shown}"'
