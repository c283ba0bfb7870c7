"""Select: which answers may become SFT targets."""

from collections.abc import Iterable, Iterator

from qinglan.config import Select
from qinglan.grading.grader import Grader
from qinglan.rows import Row


def select(rows: Iterable[Row], grader: Grader, config: Select) -> Iterator[Row]:
    """Fail the rows whose answer must not become an SFT target.

    All rows come out in the same order, with what was paid for; RL may still use a failed row's
    prompt. A reviewer's verdict outranks the rules. A row without an answer keeps its reason
    whatever the verdict, as its teacher is measured by it.
    """
    for row in rows:
        yield select_row(row, grader, config)


def select_row(row: Row, grader: Grader, config: Select) -> Row:
    """The row, failed where its answer must not become an SFT target."""
    is_reviewed = row.review is not None and row.was_question
    if is_reviewed and row.review == "reject" and row.answer:
        return row.failed("rejected_by_reviewer")
    reviewed_answer = row.corrected if row.review == "correct" else row.answer
    if is_reviewed and reviewed_answer and reviewed_answer.strip():
        return row.kept(None if row.answer else row.reason)
    if row.status == "failed":
        return row
    if not row.answer or not row.answer.strip():
        return row.failed("empty_answer")
    reason = grader.drop_reason(row, config)
    return row.failed(reason) if reason else row
