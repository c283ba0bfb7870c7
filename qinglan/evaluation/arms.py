"""The arms of an evaluation: ways to get a text for each question, an entry per question."""

import json
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from qinglan.clients.completions import cost_usd
from qinglan.config import EMBEDDED, Price, Profile
from qinglan.grading.failures import EMPTY_ANSWER
from qinglan.grading.grader import Grader
from qinglan.ledger import Call
from qinglan.rows import ArmName, ArmRow, Row

ORIGINAL = "original"
"""The arm of the question as it was typed."""
TEACHER = "teacher"
"""The arm of the profile's own teacher."""

Arms = Mapping[ArmName, Sequence[ArmRow]]


def baseline_arms(
    rows: Sequence[Row], grader: Grader, profile: Profile, *, retrieve_again: bool = False
) -> dict[ArmName, list[ArmRow]]:
    """The arms that need no model of ours, as validation found them; the grader says which.

    Args:
        retrieve_again: leave out what a live service returned at validation, so that it is asked
            for all arms at one time.
    """
    arms: dict[ArmName, list[ArmRow]] = {}
    if grader.question_is_arm:
        arms[ORIGINAL] = original_rows(rows)
    if grader.teacher_is_arm(rows):
        arms[TEACHER] = teacher_rows(rows)
    if retrieve_again and profile.rag.url != EMBEDDED:
        for name, arm in arms.items():
            arms[name] = [entry.with_retrieved(None) for entry in arm]
    return arms


def teacher_rows(rows: Iterable[Row]) -> list[ArmRow]:
    """A teacher's arm, from what distillation and validation found."""
    return [_teacher_row(row) for row in rows]


def _teacher_row(row: Row) -> ArmRow:
    is_graded = row.answer_retrieved is not None or row.parts is not None
    return ArmRow(
        row_id=row.id,
        text=row.answer,
        reason=None if is_graded else row.reason,
        retrieved=row.answer_retrieved,
        parts=row.parts,
        judge_score=row.judge_score,
        requests=(row.answer_request,) if row.answer_request else (),
        latency_ms=row.answer_latency_ms,
        cost_usd=row.answer_cost_usd,
    )


def original_rows(rows: Iterable[Row]) -> list[ArmRow]:
    """The arm of the question as it was typed; it costs nothing and takes no time."""
    return [_original_row(row) for row in rows]


def _original_row(row: Row) -> ArmRow:
    return ArmRow(
        row_id=row.id,
        text=row.query,
        reason=None if row.original_retrieved else row.reason,
        retrieved=row.original_retrieved,
        latency_ms=0.0,
        cost_usd=0.0,
        prompt_tokens=0,
        completion_tokens=0,
    )


def student_rows(
    answers: Iterable[str | bytes],
    price: Price | None,
    grader: Grader,
    usd_per_s: float | None = None,
) -> list[ArmRow]:
    """A student's arm, from the JSON lines that its generation wrote.

    Args:
        price: of the student's tokens, if they have one.
        usd_per_s: the machine's price, for an answer's cost where its tokens have none.
    """
    arm = []
    for line in answers:
        answer = json.loads(line)
        text = grader.clean(answer["text"])
        prompt_tokens = answer["prompt_tokens"]
        completion_tokens = answer["completion_tokens"]
        answer_cost_usd = None
        if price:
            answer_cost_usd = cost_usd(price, prompt_tokens, completion_tokens)
        elif usd_per_s is not None:
            answer_cost_usd = usd_per_s * answer["share_s"]
        entry = ArmRow(
            row_id=answer["id"],
            text=text or None,
            reason=None if text else EMPTY_ANSWER,
            latency_ms=answer.get("latency_ms"),
            cost_usd=answer_cost_usd,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        arm.append(entry)
    return arm


def is_empty(entry: ArmRow) -> bool:
    """Tell whether the arm's model answered with nothing."""
    return entry.text is None and entry.reason == EMPTY_ANSWER


def with_tokens(arm: Sequence[ArmRow], calls: Mapping[str, Call]) -> list[ArmRow]:
    """A teacher's arm with the tokens of those `calls`, by ledger key, that are known."""
    entries = []
    for entry in arm:
        known_calls = [calls[request] for request in entry.requests if request in calls]
        if not known_calls:
            entries.append(entry)
            continue
        call = known_calls[0]
        entries.append(entry.with_tokens(call.prompt_tokens, call.completion_tokens))
    return entries


def by_question(arms: Arms) -> dict[str, dict[ArmName, ArmRow]]:
    """The entries by row id, then by arm."""
    entries_by_row: dict[str, dict[ArmName, ArmRow]] = {}
    for name, arm in arms.items():
        for entry in arm:
            entries_by_row.setdefault(entry.row_id, {})[name] = entry
    return entries_by_row


def panel_consistency(arm: Iterable[ArmRow]) -> float | None:
    """Mean difference between the panel's two passes, 0–5; None where no text was read twice."""
    differences = [
        abs(entry.judge_scores[0] - entry.judge_scores[1])
        for entry in arm
        if len(entry.judge_scores) == 2
    ]
    return fmean(differences) if differences else None
