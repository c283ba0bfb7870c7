"""Evaluation of answers: every text by the rules, and by the judge, which reads one at a time."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qinglan.clients.roles import Clients
from qinglan.config import Tenant
from qinglan.errors import CallError
from qinglan.recipes.measuring.arms import Arms, Measured, ask_about, by_question, check_failures
from qinglan.rows import ArmRow, Row

if TYPE_CHECKING:
    from qinglan.recipes.kinds.answer import AnswerRecipe

EMPTY = "empty_answer"


class _Verdict(NamedTuple):
    score: float
    request: str


_Verdicts = Mapping[str, _Verdict]
"""By text."""


async def measure(
    recipe: "AnswerRecipe",
    arms: Arms,
    rows: Sequence[Row],
    clients: Clients,
    tenant: Tenant,
    max_failed_share: float,
) -> Measured:
    """All arms with their parts and the judge's scores.

    A question on which a call failed is unjudged for all arms, so that the comparison stays paired. An empty answer
    is graded, by rule: that it is empty is the arm's own doing.
    """
    entries, found = by_question(arms), dict[str, _Verdicts | str]()

    async def verdicts(row: Row) -> _Verdicts | str:
        """The judge's on each text that the recipe has a question about; or why there is none on any."""
        texts = dict.fromkeys(entry.text for entry in entries[row.id].values() if entry.text)
        asked = {text: messages for text in texts if (messages := recipe.judge_messages(row, text, tenant))}
        calls = (clients.judge.ask(messages, recipe.parse_judge, recipe.JUDGE_SCHEMA) for messages in asked.values())
        # All of them end before an error is raised: an answer in flight is paid for and must reach the ledger.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        given: dict[str, _Verdict] = {}
        for text, answer in zip(asked, answers, strict=True):
            if isinstance(answer, CallError):
                return answer.reason
            if isinstance(answer, BaseException):
                raise answer
            given[text] = _Verdict(answer.value, answer.request_hash)
        return given

    if "judge" in recipe.graders:
        found = await ask_about((row for row in rows if row.id in entries), verdicts)
    unjudged = [reason for reason in found.values() if isinstance(reason, str)]
    check_failures(unjudged, len(entries), max_failed_share)
    by_id = {row.id: row for row in rows}
    measured = {
        name: [_measured(recipe, by_id[entry.row_id], entry, found.get(entry.row_id, {})) for entry in arm]
        for name, arm in arms.items()
    }
    return Measured(measured, dict(Counter(unjudged).most_common()))


def _measured(recipe: "AnswerRecipe", row: Row, entry: ArmRow, found: _Verdicts | str) -> ArmRow:
    if entry.text is None and entry.reason != EMPTY:  # there is no answer to grade
        return entry.model_copy(update={"parts": None, "judge_score": None})
    verdict = None if isinstance(found, str) else found.get(entry.text or "")
    return entry.model_copy(
        update={
            "parts": recipe.checked_parts(row, entry.text or ""),
            "reason": EMPTY if entry.text is None else found if isinstance(found, str) else None,
            "judge_score": verdict.score if verdict else None,
            "requests": (*entry.requests, verdict.request) if verdict else entry.requests,
        }
    )
