"""Reviewers' verdicts on answers, one file per tenant and recipe, which later refreshes apply.

The newest verdict on a row counts. `accept` and `reject` hold for the answer that was reviewed, so
that another answer of the teacher needs another review; a correction holds for every answer. Each
import replaces the whole file and changes no earlier line: a process killed at any moment leaves
all of an import or nothing of it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from filelock import FileLock
from pydantic import BaseModel

from qinglan.config import Profile
from qinglan.rows import Row
from qinglan.runs.artifacts import hash_of, written_whole
from qinglan.runs.schema_version import read_lines, record_line

ReviewVerdict = Literal["accept", "reject", "correct"]


class Review(BaseModel, frozen=True, extra="forbid"):
    """A reviewer's verdict on a row: a line of the store."""

    tenant: str
    row: str
    verdict: ReviewVerdict
    fingerprint: str
    answer: str
    """The reviewed answer, which the fingerprint is of; empty where the teacher gave none."""
    corrected: str | None = None
    """The reviewer's answer, with the verdict `correct` only."""
    comment: str = ""
    reviewer: str = ""
    imported_at: str
    """ISO 8601, UTC."""
    file: str
    """Name of the workbook that it came in."""
    file_sha256: str

    @property
    def effect(self) -> tuple[str, ...]:
        """Its effect on the row; two reviews of the same effect give the same dataset."""
        if self.verdict == "correct":
            return (self.row, self.verdict, self.corrected or "")
        return (self.row, self.verdict, self.fingerprint)


def fingerprint(answer: str | None) -> str:
    """16 hex digits of an answer's words in their order; the white space between them does not
    matter."""
    return hashlib.sha256(" ".join((answer or "").split()).encode()).hexdigest()[:16]


class Reviews:
    """The newest review of each row."""

    def __init__(self, lines: Iterable[Review] = ()) -> None:
        self.by_row = {review.row: review for review in lines}

    @property
    def digest(self) -> str:
        """Changes with the effects of the reviews, not with comments, reviewers or times."""
        return hash_of(sorted(review.effect for review in self.by_row.values()))

    def current(self, row: Row) -> Review | None:
        """The review that applies to the row and its answer."""
        review = self.by_row.get(row.id)
        if review is None or review.verdict == "correct":
            return review
        return review if review.fingerprint == fingerprint(row.answer) else None

    def apply(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The same rows in the same order, `review` and `corrected` set by the current reviews
        alone."""
        for row in rows:
            review = self.current(row)
            verdict, corrected = (review.verdict, review.corrected) if review else (None, None)
            yield row.model_copy(update={"review": verdict, "corrected": corrected})


def load_reviews(profile: Profile) -> Reviews:
    """The reviews of the profile's tenant and recipe; none where nobody has reviewed."""
    return Reviews(read_store(store_path(profile)))


def store_path(profile: Profile) -> Path:
    return (
        profile.paths.state / "reviews" / f"{profile.tenant.file_name}.{profile.recipe_name}.jsonl"
    )


def read_store(path: Path) -> list[Review]:
    """Every line of a store, the oldest first; ArtifactError where one is damaged, as no verdict is
    ever skipped."""
    hint = "restore the file from a backup, or delete that line and import its workbook again"
    return read_lines(Review, path, "review", hint)


class ReviewImport(NamedTuple):
    new: Sequence[Review]
    """Appended; the store had all others."""
    unchanged: int
    replaced: int
    """How many of the new ones have another effect than the row's verdict before."""


def add_reviews(profile: Profile, reviews: Sequence[Review]) -> ReviewImport:
    """Append the reviews that the store lacks, all or none, one process at a time.

    Reviews of a file that was imported before are not new, so that importing an old file again does
    not undo later verdicts.
    """
    path = store_path(profile)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        lines = read_store(path)
        newest = Reviews(lines).by_row
        imported = {(line.file_sha256, line.row) for line in lines}
        said = {(review.effect, review.comment, review.reviewer) for review in newest.values()}
        new = [
            review
            for review in reviews
            if (review.file_sha256, review.row) not in imported
            and (review.effect, review.comment, review.reviewer) not in said
        ]
        if new:
            with (
                written_whole(path) as partial,
                partial.open("w", encoding="utf-8", newline="\n") as stream,
            ):
                stream.writelines(record_line(line) for line in [*lines, *new])
    replaced = sum(r.row in newest and newest[r.row].effect != r.effect for r in new)
    return ReviewImport(new, len(reviews) - len(new), replaced)
