"""Grades the arms of an evaluation: every distinct text of a question once.

A question on which the judge's call failed is unjudged for all arms, so that the comparison stays
paired.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from qinglan.clients.roles import Clients
from qinglan.config import Profile
from qinglan.errors import CallError
from qinglan.evaluation.arms import ORIGINAL, Arms, by_question, is_empty
from qinglan.grading.failures import EMPTY_ANSWER, LOWEST_JUDGE_SCORE, require_few_failures
from qinglan.grading.grade import QUESTION_ITSELF, Grade
from qinglan.grading.grader import Grader
from qinglan.grading.panel import Panel, PanelScores
from qinglan.rows import ArmName, ArmRow, Row

# Questions that are begun together: enough to keep the services busy, and no more in memory than
# that.
_QUESTIONS_AT_ONCE = 1_000
Result = TypeVar("Result")


class Measured(NamedTuple):
    """The arms with what their texts are worth."""

    arms: dict[ArmName, list[ArmRow]]
    unjudged: dict[str, int]
    """Questions without a judge's score in any arm, by the reason why the call failed."""


class _GradedQuestion(NamedTuple):
    entries: dict[ArmName, ArmRow]
    judge_failure: str | None
    """Why no text of the question has a judge's score; None where the judge did not fail."""


async def measure(
    arms: Arms, rows: Sequence[Row], grader: Grader, clients: Clients, profile: Profile
) -> Measured:
    """Grade the arms' texts.

    Raises:
        StageError: too many calls failed for a fair comparison.
    """
    graded = await grade_arms(arms, rows, grader, clients, profile)
    if grader.panel is None:
        return graded
    return await judge_by_panel(graded.arms, rows, grader.panel, clients, profile)


async def grade_arms(
    arms: Arms, rows: Sequence[Row], grader: Grader, clients: Clients, profile: Profile
) -> Measured:
    """The arms with their grades; the judge's are left out where a panel gives them.

    Each text of a question is graded once, so that arms that agree get the same grade.
    """
    entries_by_row = by_question(arms)

    async def grade_question(row: Row) -> _GradedQuestion:
        entries = entries_by_row[row.id]
        grades = await _grades_of(row, entries, grader, clients, profile)
        judge_failure = _first_judge_failure(grades.values())
        graded_entries = {
            name: _with_grade(entry, grades.get(_text_of(name, entry)), judge_failure)
            for name, entry in entries.items()
        }
        return _GradedQuestion(graded_entries, judge_failure)

    questions = [row for row in rows if row.id in entries_by_row]
    graded_questions = await for_each_question(questions, grade_question)
    unjudged = _count_unjudged(
        (question.judge_failure for question in graded_questions.values()),
        len(questions),
        profile,
    )
    graded_arms: dict[ArmName, list[ArmRow]] = {}
    for name, arm in arms.items():
        graded_arm = [graded_questions[entry.row_id].entries[name] for entry in arm]
        lost_reasons = [
            entry.reason for entry in graded_arm if entry.text is not None and not entry.measured
        ]
        require_few_failures(lost_reasons, len(arm), profile.evaluate.max_failed_share)
        graded_arms[name] = graded_arm
    return Measured(graded_arms, unjudged)


async def judge_by_panel(
    arms: Arms, rows: Sequence[Row], panel: Panel, clients: Clients, profile: Profile
) -> Measured:
    """The arms with the panel's scores in the place of earlier ones."""
    entries_by_row = by_question(arms)

    async def judge(row: Row) -> PanelScores | str:
        entries = entries_by_row[row.id].values()
        texts = [entry.text for entry in entries if entry.text is not None]
        try:
            return await panel.score(row, texts, clients, profile.tenant, profile.evaluate.seed)
        except CallError as error:
            return error.reason

    questions = [row for row in rows if row.id in entries_by_row]
    scores_by_row = await for_each_question(questions, judge)
    failures = [scores for scores in scores_by_row.values() if isinstance(scores, str)]
    unjudged = _count_unjudged(failures, len(questions), profile)
    judged_arms: dict[ArmName, list[ArmRow]] = {}
    for name, arm in arms.items():
        judged_arms[name] = [
            _with_panel_scores(entry, scores_by_row.get(entry.row_id)) for entry in arm
        ]
    return Measured(judged_arms, unjudged)


async def for_each_question(
    rows: Iterable[Row], work: Callable[[Row], Awaitable[Result]]
) -> dict[str, Result]:
    """The result of `work` for each row, by row id, in the rows' order."""
    results: dict[str, Result] = {}
    remaining = iter(rows)
    while True:
        batch = list(islice(remaining, _QUESTIONS_AT_ONCE))
        if not batch:
            return results
        batch_results = await asyncio.gather(*(work(row) for row in batch))
        for row, result in zip(batch, batch_results, strict=True):
            results[row.id] = result


def _text_of(arm: ArmName, entry: ArmRow) -> str | None:
    """The text to grade: the question itself has no rewrite, and an empty answer is a text."""
    return QUESTION_ITSELF if arm == ORIGINAL else entry.text or ""


def _has_text(entry: ArmRow) -> bool:
    """Tell whether there is something to grade: nothing is known of an answer whose call failed."""
    return entry.text is not None or is_empty(entry)


async def _grades_of(
    row: Row,
    entries: Mapping[ArmName, ArmRow],
    grader: Grader,
    clients: Clients,
    profile: Profile,
) -> dict[str | None, Grade]:
    """The grades of the question's texts; a text whose passages are known is not graded again."""
    grades: dict[str | None, Grade] = {}
    texts: list[str | None] = []
    for name, entry in entries.items():
        if entry.retrieved is not None:
            text = _text_of(name, entry)
            grades[text] = Grade(text, retrieved=entry.retrieved)
    for name, entry in entries.items():
        text = _text_of(name, entry)
        if _has_text(entry) and text not in grades and text not in texts:
            texts.append(text)
    # A panel reads all arms' texts of the question together, once they are graded.
    is_judged_now = grader.panel is None
    grades.update(await grader.grade(row, texts, clients, profile.tenant, judge=is_judged_now))
    return grades


def _first_judge_failure(grades: Iterable[Grade]) -> str | None:
    for grade in grades:
        failure = grade.failures.get("judge")
        if failure is not None:
            return failure.reason
    return None


def _with_grade(entry: ArmRow, grade: Grade | None, judge_failure: str | None) -> ArmRow:
    """The entry with its grade, or with the reason why a part of the grade is missing."""
    if grade is None or not _has_text(entry):
        return entry
    rag_failure = grade.failures.get("rag")
    if rag_failure is not None:
        return entry.with_reason(rag_failure.reason)
    graded = entry.with_reason(EMPTY_ANSWER if entry.text is None else judge_failure)
    if grade.retrieved is not None:
        return graded.with_retrieved(entry.retrieved or grade.retrieved)
    graded = graded.with_parts(grade.parts)
    if judge_failure is not None:
        return graded.with_judge_score(None)
    return graded.with_judge_score(grade.judge_score).with_requests(grade.judge_requests)


def _with_panel_scores(entry: ArmRow, scores: PanelScores | str | None) -> ArmRow:
    """The entry with the panel's scores; where the panel failed, what it retrieved still counts."""
    is_judged = isinstance(scores, PanelScores)
    if is_judged and is_empty(entry):
        return entry.with_judge_score(LOWEST_JUDGE_SCORE)
    if entry.text is None or not isinstance(scores, PanelScores):
        if isinstance(scores, str) and entry.reason is None:
            entry = entry.with_reason(scores)
        return entry.with_judge_score(None)
    judged = entry.with_panel_scores(scores.by_text[entry.text])
    return judged.with_requests(scores.requests)


def _count_unjudged(
    reasons: Iterable[str | None], questions: int, profile: Profile
) -> dict[str, int]:
    """Questions by the reason why they are unjudged; StageError where they are too many."""
    failures = [reason for reason in reasons if reason is not None]
    require_few_failures(failures, questions, profile.evaluate.max_failed_share)
    return dict(Counter(failures).most_common())
