"""Reviewers' verdicts on answers, one file per tenant and recipe, which later refreshes apply.

The newest verdict on a row counts. `accept` and `reject` hold for the answer that was reviewed, so
that another answer of the teacher needs another review; a correction holds for every answer. Each
import replaces the whole file and changes no earlier line: a process killed at any moment leaves
all of an import or nothing of it.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from pydantic import BaseModel

from qinglan.config import Profile
from qinglan.rows import ReviewVerdict, Row
from qinglan.runs.artifacts import hash_of, write_jsonl
from qinglan.runs.schema_version import dump_record, read_lines


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

    @property
    def statement(self) -> tuple[object, ...]:
        """All that the reviewer said, whatever file it came in."""
        return (self.effect, self.comment, self.reviewer)


def fingerprint(answer: str | None) -> str:
    """16 hex digits of an answer's words in their order.

    The white space between the words does not matter.
    """
    words = (answer or "").split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


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
        # The teacher may have answered anew since.
        is_of_this_answer = review.fingerprint == fingerprint(row.answer)
        return review if is_of_this_answer else None

    def apply(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The same rows in the same order, with the current reviews and no others."""
        for row in rows:
            review = self.current(row)
            if review is None:
                # An earlier run may have set what no longer holds.
                yield row.with_review(None, None)
            else:
                yield row.with_review(review.verdict, review.corrected)


def load_reviews(profile: Profile) -> Reviews:
    """The reviews of the profile's tenant and recipe; none where nobody has reviewed."""
    return Reviews(read_store(store_path(profile)))


def store_path(profile: Profile) -> Path:
    """The file that has the reviews of the profile's tenant and recipe."""
    name = f"{profile.tenant.file_name}.{profile.recipe_name}.jsonl"
    return profile.paths.state / "reviews" / name


def read_store(path: Path) -> list[Review]:
    """Every line of a store, the oldest first.

    ArtifactError where a line is damaged, as no verdict is ever skipped.
    """
    hint = "restore the file from a backup, or delete that line and import its workbook again"
    return read_lines(Review, path, "review", hint)


class ReviewImport(NamedTuple):
    """The outcome of adding a workbook's reviews to the store."""

    new: Sequence[Review]
    """Reviews that were appended; the store had all others."""
    unchanged: int
    replaced: int
    """Number of new reviews that have another effect than the row's verdict before."""


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
        # An old file that is imported again must not undo a later verdict on the same row.
        imported = {(line.file_sha256, line.row) for line in lines}
        statements = {review.statement for review in newest.values()}
        new_reviews: list[Review] = []
        for review in reviews:
            is_imported = (review.file_sha256, review.row) in imported
            if not is_imported and review.statement not in statements:
                new_reviews.append(review)
        if new_reviews:
            write_jsonl(path, map(dump_record, [*lines, *new_reviews]))
    replaced = 0
    for review in new_reviews:
        earlier = newest.get(review.row)
        if earlier and earlier.effect != review.effect:
            replaced += 1
    return ReviewImport(new_reviews, len(reviews) - len(new_reviews), replaced)
