"""Reads a filled-in review workbook back as verdicts, and stores nothing.

A line proves by its id and its fingerprint which row and which answer it is about
(`review.columns`). Every cell that can't be used gets a line, and one such cell stops the whole
import.
"""

import hashlib
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from openpyxl.cell import MergedCell

from qinglan.config import Profile, Select
from qinglan.data.review import Review, fingerprint
from qinglan.data.review.columns import (
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
from qinglan.data.sources.excel import CORRUPT, damage, sheets_of
from qinglan.data.sources.records import cell_text, column_letters, input_field
from qinglan.data.strata import CONTROL
from qinglan.errors import TeacherError, WorkbookError
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import ReviewVerdict, row_id
from qinglan.text import shown

# The English words are understood too, in any case.
_WORDS: dict[str, ReviewVerdict] = VERDICTS | {verdict: verdict for verdict in VERDICTS.values()}


class ControlResult(NamedTuple):
    """The reviewed control rows of a workbook, which tell the dataset's error rate."""

    rows: int
    reviewed: int
    wrong: int
    """Number of reviewed rows that were rejected or corrected."""

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the share that is wrong."""
        from scipy.stats import binomtest  # type: ignore[import-untyped]

        ends = binomtest(self.wrong, self.reviewed).proportion_ci(method="wilson")
        return float(ends.low), float(ends.high)


@dataclass(frozen=True, eq=False)
class ReviewLine:
    """A line of the sheet, below its header."""

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

    def is_filled_in(self, title: str) -> bool:
        """Tell whether a reviewer wrote into the cell, or may have: a merged cell can hide it."""
        return bool(self.text(title)) or isinstance(self.cells[title], MergedCell)

    @property
    def is_control(self) -> bool:
        return CONTROL.title in self.text(SAMPLED_FOR).split(BETWEEN_STRATA)


class ReviewSheet(NamedTuple):
    """A filled-in workbook; with any problem, none of it may be stored."""

    reviews: Sequence[Review]
    problems: Sequence[str]
    """A line per cell: place, problem and hint."""
    without_verdict: int
    lone_comments: int
    """Comments on rows without a verdict, which are not kept."""
    control: ControlResult


class _File(NamedTuple):
    """The imported file, as each of its reviews names it."""

    name: str
    sha256: str
    imported_at: str


def read_sheet(path: Path, profile: Profile) -> ReviewSheet:
    """Read a filled-in workbook, and store nothing.

    WorkbookError where the file as a whole can't be used.
    """
    content = _content(path)
    file = _File(
        name=path.name,
        sha256=hashlib.sha256(content).hexdigest(),
        imported_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    recipe = get_recipe(profile.recipe)
    lines = list(_lines_of(path, content, titles_of(recipe)))
    problems: list[str] = []
    reviews: dict[str, tuple[ReviewLine, Review]] = {}
    lines_without_verdict: list[ReviewLine] = []
    for line in lines:
        if not line.is_filled_in(VERDICT) and not line.is_filled_in(CORRECTED):
            lines_without_verdict.append(line)
            continue
        line_problems = _problems(line, profile, recipe)
        if line_problems:
            problems += [f"{line.sheet}!{problem}" for problem in line_problems]
            continue
        review = _review(line, profile, recipe, file)
        first_line, first_review = reviews.setdefault(review.row, (line, review))
        has_same_effect = first_review.effect == review.effect
        has_same_answer = first_review.fingerprint == review.fingerprint
        if not (has_same_effect and has_same_answer):
            problems.append(_contradiction(line, first_line))
    return ReviewSheet(
        reviews=[review for _, review in reviews.values()],
        problems=problems,
        without_verdict=len(lines_without_verdict),
        lone_comments=sum(bool(line.text(COMMENT)) for line in lines_without_verdict),
        control=_control(lines, reviews.values()),
    )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise WorkbookError(f"{path}: no such file; give the filled-in review workbook") from error
    except OSError as error:
        raise WorkbookError(
            f"{path}: can't be read: {error.strerror or error}; check its permissions"
        ) from error


def _lines_of(path: Path, content: bytes, titles: Mapping[str, str]) -> Iterator[ReviewLine]:
    """Every line below the header that has any text, wherever its columns are.

    Args:
        titles: the columns' titles by their meaning.
    """
    try:
        sheets = sheets_of(path, io.BytesIO(content))
    except CORRUPT as error:
        problem = f"is no readable .xlsx file ({damage(error)})"
        raise WorkbookError(f"{path}: {problem}; open it in Excel and save it again") from error
    if SHEET not in sheets:
        sheet_titles = ", ".join(sheets) or "none"
        raise WorkbookError(
            f"{path}: no sheet `{SHEET}` (sheets: {sheet_titles}); "
            "give one of `qinglan review export`"
        )
    sheet = sheets[SHEET]
    first_row = next(sheet.iter_rows(max_row=1), ())
    header = [_header_title(cell.value) for cell in first_row]
    for title in titles.values():
        if title not in header:
            raise WorkbookError(
                f"{path}!{SHEET}: no column `{title}` in row 1; put it back as it was exported"
            )
        if header.count(title) > 1:
            letters = column_letters(header, title)
            raise WorkbookError(
                f"{path}!{SHEET}: column `{title}` is in row 1 twice ({letters}); delete one"
            )
    places = {meaning: header.index(title) for meaning, title in titles.items()}
    for row in sheet.iter_rows(min_row=2):
        cells = {meaning: row[place] for meaning, place in places.items()}
        line = ReviewLine(f"{path.name}!{SHEET}", cells)
        if any(map(line.text, titles)):
            yield line


def _header_title(value: object) -> str:
    return "" if value is None else str(value).strip()


def _review(line: ReviewLine, profile: Profile, recipe: Recipe, file: _File) -> Review:
    """The review that a line without a problem holds."""
    verdict = _WORDS[line.text(VERDICT).casefold()]
    reviewed_id, _, _ = line.text(ROW_ID).partition("-")
    return Review(
        tenant=profile.tenant.id,
        row=reviewed_id,
        verdict=verdict,
        fingerprint=line.text(FINGERPRINT),
        answer=line.text(ANSWER),
        corrected=recipe.correction(line.text(CORRECTED)) if verdict == "correct" else None,
        comment=line.text(COMMENT),
        reviewer=line.text(REVIEWER),
        imported_at=file.imported_at,
        file=file.name,
        file_sha256=file.sha256,
    )


def _contradiction(line: ReviewLine, first_line: ReviewLine) -> str:
    """The problem that two lines of the same row have different verdicts."""
    return (
        f"{line.sheet}!{line.place(VERDICT)}: {line.text(VERDICT)} does not agree with "
        f"{first_line.text(VERDICT)} in {first_line.place(VERDICT)}, which is the same row; "
        "keep one of the two"
    )


def _problems(line: ReviewLine, profile: Profile, recipe: Recipe) -> list[str]:
    """A line per bad cell, which begins with its place."""
    # The values of these cells are not what the reviewer sees, so no other check makes sense.
    unreadable: list[str] = []
    for title, cell in line.cells.items():
        place = line.place(title)
        if isinstance(cell, MergedCell):
            unreadable.append(
                f"{place}: is merged with other cells; "
                "unmerge them and give every row its own value"
            )
        elif cell.data_type == "f":
            unreadable.append(f"{place}: holds a formula; paste its result as a value")
        elif cell.data_type == "e":
            unreadable.append(f"{place}: holds the error {line.text(title)}; write text")
    if unreadable:
        return unreadable
    return [
        *_verdict_problems(line, profile.select, recipe),
        *_identity_problems(line, profile, recipe),
    ]


def _identity_problems(line: ReviewLine, profile: Profile, recipe: Recipe) -> Iterator[str]:
    """Problems with telling which row and which answer the line is about."""
    restore = "restore it from the exported workbook, or clear the verdict"
    inputs: dict[str, str] = {}
    for recipe_input in recipe.INPUTS:
        if recipe_input.identifies:
            inputs[recipe_input.name] = line.text(input_field(recipe_input.name))
    question = (line.text(QUERY), line.text(PROFILE), line.text(HISTORY))
    shown_id = row_id(profile.tenant.id, *question, inputs)

    at_id = line.place(ROW_ID)
    id_text = line.text(ROW_ID)
    # It is `ROW` or, where the row was extracted from a dialogue, `ROW-SHOWN`.
    stated_id = id_text.partition("-")[2] or id_text
    if not id_text:
        yield f"{at_id}: the row id is missing; {restore}"
    elif stated_id != shown_id:
        yield (
            f"{at_id}: {shown(id_text, 40)} is unknown: "
            "it is not the id of this question and what belongs "
            f"to it for tenant `{profile.tenant.id}`; "
            f"one of them was changed, or it is another tenant's row; {restore}"
        )
    if line.text(FINGERPRINT) != fingerprint(line.text(ANSWER)):
        yield (
            f"{line.place(ANSWER)}: is not the answer of the fingerprint in "
            f"{line.place(FINGERPRINT)}; {restore}; your "
            f"own answer belongs into {line.place(CORRECTED)}"
        )


def _verdict_problems(line: ReviewLine, select: Select, recipe: Recipe) -> Iterator[str]:
    """Problems with the verdict, and with the correction beside it."""
    at_verdict = line.place(VERDICT)
    at_correction = line.place(CORRECTED)
    word = line.text(VERDICT)
    correction = " ".join(line.text(CORRECTED).split())
    verdict = _WORDS.get(word.casefold())
    if not word:
        yield (
            f"{at_verdict}: has no verdict, but {at_correction} has an answer; "
            "write 修改, or clear it"
        )
    elif verdict is None:
        yield f"{at_verdict}: {shown(word, 40)} is no verdict; write 通过, 拒绝 or 修改"
    elif verdict == "correct":
        yield from _correction_problems(line, select, recipe)
    else:
        if correction:
            yield (
                f"{at_correction}: an answer beside {word}; "
                f"write 修改 into {at_verdict}, or clear it"
            )
        if verdict == "accept" and not line.text(ANSWER):
            yield f"{at_verdict}: there is no answer to accept; write 拒绝, or 修改 with your own"


def _correction_problems(line: ReviewLine, select: Select, recipe: Recipe) -> Iterator[str]:
    """Problems with a reviewer's own answer: whether the student could learn it."""
    place = line.place(CORRECTED)
    text = line.text(CORRECTED)
    if not text:
        yield (
            f"{place}: is empty, but the verdict is {line.text(VERDICT)}; "
            "write your answer, or change the verdict"
        )
        return
    try:
        correction = recipe.correction(text)
    except TeacherError as error:
        yield f"{place}: is not what the recipe can read as an answer: {error}"
        return
    broken_limit = recipe.grader.limit_broken_by(correction, select)
    if broken_limit:
        yield f"{place}: {broken_limit}"


def _control(
    lines: Sequence[ReviewLine], reviews: Collection[tuple[ReviewLine, Review]]
) -> ControlResult:
    """Counts over the lines of control rows."""
    # Lines may be there twice, where several workbooks were put together.
    control_ids = {line.text(ROW_ID) for line in lines if line.is_control}
    reviewed = 0
    wrong = 0
    for line, review in reviews:
        if line.is_control:
            reviewed += 1
            if review.verdict != "accept":
                wrong += 1
    return ControlResult(rows=len(control_ids), reviewed=reviewed, wrong=wrong)
