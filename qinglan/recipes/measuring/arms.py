"""Arms: ways to get a text, and what each made of every question."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qinglan.clients.chat import cost_usd
from qinglan.config import Price
from qinglan.ledger import Call
from qinglan.rows import ArmRow, Row

if TYPE_CHECKING:
    from qinglan.recipes.kinds.recipe import Recipe


class Measured(NamedTuple):
    """Arms with what their texts are worth."""

    arms: dict[str, list[ArmRow]]
    unjudged: dict[str, int]
    """Questions without a judge's score in any arm, by the reason why the call failed."""


def teacher_rows(rows: Iterable[Row]) -> list[ArmRow]:
    """A teacher's arm, from what distillation and validation found."""
    return [
        ArmRow(
            row_id=row.id,
            text=row.answer,
            reason=None if row.answer_retrieved or row.parts is not None else row.reason,
            retrieved=row.answer_retrieved,
            parts=row.parts,
            judge_score=row.judge_score,
            requests=(row.answer_request,) if row.answer_request else (),
            latency_ms=row.answer_latency_ms,
            cost_usd=row.answer_cost_usd,
        )
        for row in rows
    ]


def original_rows(rows: Iterable[Row]) -> list[ArmRow]:
    """The question as it was typed; it costs nothing and takes no time."""
    return [
        ArmRow(
            row_id=row.id,
            text=row.query,
            reason=None if row.original_retrieved else row.reason,
            retrieved=row.original_retrieved,
            latency_ms=0.0,
            cost_usd=0.0,
            prompt_tokens=0,
            completion_tokens=0,
        )
        for row in rows
    ]


def student_rows(answers: Iterable[str], price: Price | None, recipe: "Recipe") -> list[ArmRow]:
    """A student's arm, from the JSON lines that its generation wrote."""
    arm = []
    for answer in map(json.loads, answers):
        text, prompt, completion = recipe.clean(answer["text"]), answer["prompt_tokens"], answer["completion_tokens"]
        arm.append(
            ArmRow(
                row_id=answer["id"],
                text=text or None,
                reason=None if text else "empty_answer",
                latency_ms=answer.get("latency_ms"),
                cost_usd=cost_usd(price, prompt, completion) if price else None,
                prompt_tokens=prompt,
                completion_tokens=completion,
            )
        )
    return arm


def not_retrieved(arm: Iterable[ArmRow]) -> list[ArmRow]:
    """The same texts, to be retrieved again: what an earlier run found does not compare with a service of today."""
    return [entry.model_copy(update={"retrieved": None}) for entry in arm]


def with_tokens(arm: Sequence[ArmRow], calls: Mapping[str, Call]) -> list[ArmRow]:
    """A teacher's arm with the tokens that the ledger counted.

    Args:
        calls: by ledger key; a row whose call is not among them stays without.
    """

    def counted(entry: ArmRow) -> ArmRow:
        call = next((calls[key] for key in entry.requests if key in calls), None)
        tokens = {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens} if call else {}
        return entry.model_copy(update=tokens)

    return [counted(entry) for entry in arm]
