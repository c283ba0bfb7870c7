"""The review workbook coming back: every cell that can't be taken as it is gets a line, and then nothing is imported.

That a line is about the row it says it is can be seen from the line alone: the row's id is a hash of question, profile,
history and the recipe's inputs, and the fingerprint one of the answer. So no other file is needed, and the workbook may
come back sorted, in parts, from several people, or on another machine.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist

from qinglan.config import Profile, Select
from qinglan.data.review import Review, Verdict, fingerprint
from qinglan.data.review.reader import Line, lines_of, read_file
from qinglan.data.review.sample import CONTROL
from qinglan.data.review.sheet import (
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
    VERDICT,
    VERDICTS,
    titles_of,
)
from qinglan.data.sources.records import input_field
from qinglan.errors import TeacherError
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import normalise, row_id

_WORDS: dict[str, Verdict] = VERDICTS | {verdict: verdict for verdict in VERDICTS.values()}


@dataclass(frozen=True)
class Control:
    """What people said of the control rows."""

    rows: int
    """In the workbook."""
    reviewed: int
    wrong: int
    """Rejected or corrected."""

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the share that is wrong; it stays within [0, 1] and holds for few rows."""
        z, n, share = NormalDist().inv_cdf(0.975), self.reviewed, self.wrong / self.reviewed
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class ReviewSheet:
    """A workbook that was read; with any problem, none of it may be stored."""

    reviews: Sequence[Review]
    """One per row with a verdict."""
    problems: Sequence[str]
    """A line per cell: where, what, and what to do."""
    without_verdict: int
    lone_comments: int
    """Comments on rows without a verdict, which are not kept."""
    control: Control


def read_sheet(path: Path, profile: Profile) -> ReviewSheet:
    """Read a filled-in workbook, and store nothing.

    Raises:
        WorkbookError: the file as a whole can't be used.
    """
    content = read_file(path)
    recipe = get_recipe(profile.recipe)
    lines = [line for line in lines_of(path, content, titles_of(recipe)) if not line.is_blank()]
    provenance = {
        "imported_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "file": path.name,
        "file_sha256": hashlib.sha256(content).hexdigest(),
    }
    problems: list[str] = []
    reviews: dict[str, tuple[Line, Review]] = {}
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


def _problems(line: Line, profile: Profile, recipe: Recipe) -> Iterator[str]:
    if unreadable := list(line.unreadable()):
        yield from unreadable
        return
    yield from _verdict_problems(line, profile.select, recipe)
    restore = "restore it from the exported workbook, or clear the verdict"
    if not line.text(ROW_ID):
        yield f"{line.at(ROW_ID)}: the row id is missing; {restore}"
    elif line.text(ROW_ID) != _id_of(line, profile.tenant.id, recipe):
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


def _id_of(line: Line, tenant: str, recipe: Recipe) -> str:
    inputs = {each.name: line.text(input_field(each.name)) for each in recipe.INPUTS if each.identifies}
    return row_id(tenant, line.text(QUERY), line.text(PROFILE), line.text(HISTORY), inputs)


def _verdict_problems(line: Line, select: Select, recipe: Recipe) -> Iterator[str]:
    word, text = line.text(VERDICT), _one_line(line.text(CORRECTED))
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
        yield from _length_problems(line, text, select)
    else:
        try:
            recipe.parse_answer(line.text(CORRECTED))
        except TeacherError as error:
            yield f"{line.at(CORRECTED)}: is not what the recipe can read as an answer: {error}"


def _length_problems(line: Line, text: str, select: Select) -> Iterator[str]:
    if len(text) > (most := select.max_rewrite_chars):
        yield f"{line.at(CORRECTED)}: has {len(text)} characters, select.max_rewrite_chars is {most}"
    elif len(normalise(text)) < (least := select.min_rewrite_chars):
        yield f"{line.at(CORRECTED)}: {_quoted(text)} is shorter than select.min_rewrite_chars, {least}"


def _corrected(line: Line, recipe: Recipe) -> str:
    text = line.text(CORRECTED)
    return recipe.clean(text) if recipe.retrieves else recipe.parse_answer(text)


def _review(line: Line, recipe: Recipe, tenant: str, provenance: Mapping[str, str]) -> Review:
    verdict = _WORDS[line.text(VERDICT).casefold()]
    return Review(
        tenant=tenant,
        row=line.text(ROW_ID),
        verdict=verdict,
        fingerprint=line.text(FINGERPRINT),
        answer=line.text(ANSWER),
        corrected=_corrected(line, recipe) if verdict == "correct" else None,
        comment=line.text(COMMENT),
        reviewer=line.text(REVIEWER),
        **provenance,
    )


def _control(lines: Sequence[Line], reviewed: Sequence[Line]) -> Control:
    def is_control(line: Line) -> bool:
        return CONTROL.title in line.text(SAMPLED_FOR).split(BETWEEN_STRATA)

    verdicts = [_WORDS[line.text(VERDICT).casefold()] for line in reviewed if is_control(line)]
    rows = {line.text(ROW_ID) for line in lines if is_control(line)}
    return Control(len(rows), len(verdicts), sum(verdict != "accept" for verdict in verdicts))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _quoted(text: str, chars: int = 40) -> str:
    """What a stranger typed, fit for a terminal."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:chars])
    return f'"{shown}…"' if len(text) > chars else f'"{shown}"'
