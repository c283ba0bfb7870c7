"""Arms: ways to get a text, what each made of every question, and what the RAG finds with it."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from qinglan.clients.chat import cost_usd
from qinglan.clients.roles import Clients
from qinglan.config import Price
from qinglan.errors import CallError, StageError
from qinglan.ledger import Call
from qinglan.rows import ArmName, ArmRow, Retrieved, Row

if TYPE_CHECKING:
    from qinglan.recipes.kinds.recipe import Recipe

UNREADABLE = "judge_unreadable"
_ORIGINAL = "original"
_AT_ONCE = 1_000
"""Questions that are begun together: enough to keep the services busy, and no more in memory than that."""

Arms = Mapping[ArmName, Sequence[ArmRow]]
T = TypeVar("T")


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


def with_tokens(arm: Sequence[ArmRow], calls: Mapping[str, Call]) -> list[ArmRow]:
    """A teacher's arm with the tokens of those `calls`, by ledger key, that are known."""
    counted = []
    for entry in arm:
        call = next((calls[key] for key in entry.requests if key in calls), None)
        tokens = {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens} if call else {}
        counted.append(entry.model_copy(update=tokens))
    return counted


def by_question(arms: Arms) -> dict[str, dict[ArmName, ArmRow]]:
    """Row id → arm → entry."""
    turned: dict[str, dict[ArmName, ArmRow]] = {}
    for name, arm in arms.items():
        for entry in arm:
            turned.setdefault(entry.row_id, {})[name] = entry
    return turned


async def ask_about(rows: Iterable[Row], work: Callable[[Row], Awaitable[T]]) -> dict[str, T]:
    """What `work` gives for each row, by row id."""
    found: dict[str, T] = {}
    waiting = iter(rows)
    while some := list(islice(waiting, _AT_ONCE)):
        done = await asyncio.gather(*map(work, some))
        found |= {row.id: each for row, each in zip(some, done, strict=True)}
    return found


def check_failures(reasons: Sequence[str | None], questions: int, max_failed_share: float) -> None:
    """Raise StageError, with the reasons, where too many calls failed for a fair comparison."""
    if len(reasons) > max_failed_share * questions:
        counted = ", ".join(f"{reason} {count}" for reason, count in Counter(reasons).most_common())
        kept = "; what the judge answered is kept, so that for other answers judge.model or evaluate.seed must change"
        raise StageError(
            f"evaluate: calls failed for {len(reasons)} of {questions} questions ({counted}), more than "
            f"evaluate.max_failed_share = {max_failed_share:.0%} allows; repair the service and run again"
            + (kept if UNREADABLE in reasons else "")
        )


async def retrieve_all(
    arms: Arms, rows: Sequence[Row], clients: Clients, max_failed_share: float
) -> dict[ArmName, list[ArmRow]]:
    """Fill in the retrievals that are missing: once per text and question, so that arms that agree get the same."""
    by_row = by_question(arms)

    async def retrieve(row: Row, text: str | None) -> Retrieved | str:
        try:
            # Without a text it is the question itself, and the service does with it what it always does.
            return await (clients.rag.retrieve(row.query) if text is None else clients.rag.retrieve(row.query, text))
        except CallError as error:
            return error.reason

    async def fill_in(row: Row) -> dict[ArmName, ArmRow]:
        entries = by_row[row.id]
        texts = {name: None if name == _ORIGINAL else entry.text for name, entry in entries.items()}
        found: dict[str | None, Retrieved | str] = {
            texts[name]: entry.retrieved for name, entry in entries.items() if entry.retrieved
        }
        unknown = [name for name, entry in entries.items() if entry.text is not None and entry.retrieved is None]
        missing = list(dict.fromkeys(texts[name] for name in unknown if texts[name] not in found))
        found |= zip(missing, await asyncio.gather(*(retrieve(row, text) for text in missing)), strict=True)
        return {name: _filled(e, found[texts[name]]) if e.text is not None else e for name, e in entries.items()}

    by_row |= await ask_about((row for row in rows if row.id in by_row), fill_in)
    filled = {name: [by_row[entry.row_id][name] for entry in arm] for name, arm in arms.items()}
    for arm in filled.values():
        lost = [entry.reason for entry in arm if entry.text is not None and entry.retrieved is None]
        check_failures(lost, len(arm), max_failed_share)
    return filled


def _filled(entry: ArmRow, found: Retrieved | str) -> ArmRow:
    if isinstance(found, str):
        return entry.model_copy(update={"reason": found})
    return entry.model_copy(update={"retrieved": entry.retrieved or found, "reason": None})
