"""Validation: the teacher's answers are graded, and the rows keep the grades."""

from typing import TYPE_CHECKING

from qinglan.clients.row_batches import OVER_BUDGET
from qinglan.config import Tenant
from qinglan.grading.grade import QUESTION_ITSELF
from qinglan.grading.grader import Grader
from qinglan.rows import Row

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients


async def validate(
    row: Row, grader: Grader, clients: "Clients", tenant: Tenant, *, judge: bool
) -> Row:
    """The row with the grades of its teacher's answer and, where texts are retrieved with, of its
    question.

    Where the budget ends before the judge is asked, the row stays without a score, and
    `clients.unjudged` counts it.

    Raises:
        CallError: a call failed.
    """
    assert row.answer is not None, "only rows with an answer are validated"
    texts = (QUESTION_ITSELF, row.answer)
    grades = await grader.grade(row, texts, clients, tenant, judge=judge)
    question_grade = grades[QUESTION_ITSELF]
    answer_grade = grades[row.answer]
    question_grade.raise_failure()
    judge_failure = answer_grade.failures.get("judge")
    if judge_failure is not None and judge_failure.reason == OVER_BUDGET:
        clients.unjudged += 1
    else:
        answer_grade.raise_failure()
    graded = row.with_judge_score(answer_grade.judge_score)
    if answer_grade.retrieved is not None:
        graded = graded.with_retrieved(question_grade.retrieved, answer_grade.retrieved)
    if answer_grade.parts is not None:
        graded = graded.with_parts(answer_grade.parts)
    return graded
