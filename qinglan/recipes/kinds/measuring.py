"""Evaluation of arms, ways to get a text: what the RAG finds with each one's, and what rules and
judge say of it.

A question on which the judge's call failed is unjudged for all arms, so that the comparison stays
paired. An empty text is wrong: it finds nothing and has the judge's lowest score. Of a text that is
missing because a call failed nothing is known.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from qinglan.clients.chat import cost_usd
from qinglan.clients.roles import Clients
from qinglan.clients.row_batches import tolerable_losses
from qinglan.config import Evaluate, Price, Profile, Tenant
from qinglan.errors import CallError, StageError
from qinglan.ledger import Call
from qinglan.recipes.kinds.untrusted import CONTRADICTORY
from qinglan.rows import ArmName, ArmRow, Retrieved, Row

if TYPE_CHECKING:
    from qinglan.recipes.kinds.answer import AnswerRecipe
    from qinglan.recipes.kinds.recipe import Recipe
    from qinglan.recipes.kinds.retrieval import RetrievalRecipe

EMPTY = "empty_answer"
_UNREADABLE = frozenset({"judge_unreadable", CONTRADICTORY})
_ORIGINAL = "original"
_LOWEST_SCORE = 0.0
"""The judge's, for an empty text."""
_AT_ONCE = 1_000
"""Questions that are begun together: enough to keep the services busy, and no more in memory than
that."""

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


def student_rows(
    answers: Iterable[str | bytes],
    price: Price | None,
    recipe: "Recipe",
    usd_per_s: float | None = None,
) -> list[ArmRow]:
    """A student's arm, from the JSON lines that its generation wrote.

    `usd_per_s`: what the machine costs, for an answer's cost where its tokens have no price.
    """
    arm = []
    for answer in map(json.loads, answers):
        text, prompt, completion = (
            recipe.clean(answer["text"]),
            answer["prompt_tokens"],
            answer["completion_tokens"],
        )
        of_machine = None if usd_per_s is None else usd_per_s * answer["share_s"]
        arm.append(
            ArmRow(
                row_id=answer["id"],
                text=text or None,
                reason=None if text else EMPTY,
                latency_ms=answer.get("latency_ms"),
                cost_usd=cost_usd(price, prompt, completion) if price else of_machine,
                prompt_tokens=prompt,
                completion_tokens=completion,
            )
        )
    return arm


def is_empty(entry: ArmRow) -> bool:
    """Did the arm answer, and with nothing?"""
    return entry.text is None and entry.reason == EMPTY


def with_tokens(arm: Sequence[ArmRow], calls: Mapping[str, Call]) -> list[ArmRow]:
    """A teacher's arm with the tokens of those `calls`, by ledger key, that are known."""
    counted = []
    for entry in arm:
        call = next((calls[key] for key in entry.requests if key in calls), None)
        tokens = (
            {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens}
            if call
            else {}
        )
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


def check_failures(
    reasons: Sequence[str | None],
    given: int,
    max_failed_share: float,
    of: tuple[str, str] = ("evaluate", "questions"),
) -> None:
    """Raise StageError, with the reasons, where too many calls failed for a fair comparison."""
    if len(reasons) > tolerable_losses(given, max_failed_share):
        counted = ", ".join(f"{reason} {count}" for reason, count in Counter(reasons).most_common())
        kept = "; what the judge answered is kept, so that for other answers judge.model or evaluate.seed must change"
        raise StageError(
            f"{of[0]}: calls failed for {len(reasons)} of {given} {of[1]} ({counted}), more than "
            f"evaluate.max_failed_share = {max_failed_share:.0%} allows; repair the service and run again"
            + (kept if _UNREADABLE.intersection(reasons) else "")
        )


def _unjudged(
    found: Mapping[str, object], questions: int, max_failed_share: float
) -> dict[str, int]:
    """How often there is a reason in the place of what was found; StageError where that is too
    often."""
    reasons = [reason for reason in found.values() if isinstance(reason, str)]
    check_failures(reasons, questions, max_failed_share)
    return dict(Counter(reasons).most_common())


async def retrieve_all(
    arms: Arms, rows: Sequence[Row], clients: Clients, max_failed_share: float
) -> dict[ArmName, list[ArmRow]]:
    """Fill in the retrievals that are missing: once per text and question, so that arms that agree
    get the same."""
    by_row = by_question(arms)

    async def retrieve(row: Row, text: str | None) -> Retrieved | str:
        try:
            # Without a text it is the question itself, and the service does with it what it always
            # does.
            return await (
                clients.rag.retrieve(row.query)
                if text is None
                else clients.rag.retrieve(row.query, text)
            )
        except CallError as error:
            return error.reason

    async def fill_in(row: Row) -> dict[ArmName, ArmRow]:
        entries = by_row[row.id]
        texts = {name: None if name == _ORIGINAL else entry.text for name, entry in entries.items()}
        found: dict[str | None, Retrieved | str] = {
            texts[name]: entry.retrieved for name, entry in entries.items() if entry.retrieved
        }
        unknown = [
            name
            for name, entry in entries.items()
            if entry.text is not None and entry.retrieved is None
        ]
        missing = list(dict.fromkeys(texts[name] for name in unknown if texts[name] not in found))
        found |= zip(
            missing, await asyncio.gather(*(retrieve(row, text) for text in missing)), strict=True
        )
        return {name: _filled(entry, found.get(texts[name], "")) for name, entry in entries.items()}

    by_row |= await ask_about((row for row in rows if row.id in by_row), fill_in)
    filled = {name: [by_row[entry.row_id][name] for entry in arm] for name, arm in arms.items()}
    for arm in filled.values():
        lost = [entry.reason for entry in arm if entry.text is not None and entry.retrieved is None]
        check_failures(lost, len(arm), max_failed_share)
    return filled


def _filled(entry: ArmRow, found: Retrieved | str) -> ArmRow:
    """With what was found, or why nothing was; an empty text finds nothing."""
    if entry.text is None:
        return entry.model_copy(update={"retrieved": Retrieved()}) if is_empty(entry) else entry
    if isinstance(found, str):
        return entry.model_copy(update={"reason": found})
    return entry.model_copy(update={"retrieved": entry.retrieved or found, "reason": None})


# ---- answers: by the rules, and by the judge, which reads one at a time ----


_Verdicts = Mapping[str, tuple[float, tuple[str, ...]]]
"""By text, empty or not: the score and the ledger's keys of its call."""


async def grade_answers(
    recipe: "AnswerRecipe", arms: Arms, rows: Sequence[Row], clients: Clients, profile: Profile
) -> Measured:
    """All arms with their parts and the judge's scores; the judge is not asked about an empty
    answer."""
    entries, found = by_question(arms), dict[str, _Verdicts | str]()

    async def verdicts(row: Row) -> _Verdicts | str:
        """The judge's on each text that the recipe has a question about; or why there is none on
        any."""
        texts = dict.fromkeys(
            entry.text or "" for entry in entries[row.id].values() if entry.text or is_empty(entry)
        )
        asked = {
            text: messages
            for text in texts
            if (messages := recipe.judge_messages(row, text, profile.tenant))
        }
        given: dict[str, tuple[float, tuple[str, ...]]] = (
            {"": (_LOWEST_SCORE, ())} if asked.pop("", None) else {}
        )
        calls = (
            clients.judge.ask(messages, recipe.parse_judge, recipe.JUDGE_SCHEMA)
            for messages in asked.values()
        )
        # All of them end before an error is raised: an answer in flight is paid for and must reach
        # the ledger.
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for text, answer in zip(asked, answers, strict=True):
            if isinstance(answer, CallError):
                return answer.reason
            if isinstance(answer, BaseException):
                raise answer
            given[text] = (answer.value, (answer.request_hash,))
        return given

    if "judge" in recipe.graders:
        found = await ask_about((row for row in rows if row.id in entries), verdicts)
    unjudged = _unjudged(found, len(entries), profile.evaluate.max_failed_share)
    by_id = {row.id: row for row in rows}
    measured = {
        name: [
            _measured(recipe, by_id[entry.row_id], entry, found.get(entry.row_id, {}))
            for entry in arm
        ]
        for name, arm in arms.items()
    }
    return Measured(measured, unjudged)


def _measured(recipe: "AnswerRecipe", row: Row, entry: ArmRow, found: _Verdicts | str) -> ArmRow:
    if entry.text is None and not is_empty(entry):  # there is no answer to grade
        return entry.model_copy(update={"parts": None, "judge_score": None})
    score, requests = (
        (None, ()) if isinstance(found, str) else found.get(entry.text or "", (None, ()))
    )
    return entry.model_copy(
        update={
            "parts": recipe.checked_parts(row, entry.text or ""),
            "reason": EMPTY if entry.text is None else found if isinstance(found, str) else None,
            "judge_score": score,
            "requests": (*entry.requests, *requests),
        }
    )


# ---- rewrites: by the blind panel ----


class _Judged(NamedTuple):
    scores: Mapping[str, tuple[float, ...]]
    """By text, a score per pass."""
    requests: tuple[str, ...]
    """The ledger's keys of the passes."""


async def judge_by_panel(
    recipe: "RetrievalRecipe",
    arms: Arms,
    rows: Sequence[Row],
    clients: Clients,
    tenant: Tenant,
    config: Evaluate,
) -> Measured:
    """All arms with the panel's scores in the place of earlier ones.

    The judge reads all distinct texts of a question at once, without knowing whose they are: in an
    order drawn by the row's id, then in the reverse order. A text's score is the mean of the two
    passes.
    """
    entries = by_question(arms)
    questions = [row for row in rows if row.id in entries]

    async def judge(row: Row) -> _Judged | str:
        texts = (entry.text for entry in entries[row.id].values() if entry.text is not None)
        order, question = shuffle_texts(texts, row.id, config.seed), recipe.question_text(row)
        scores: dict[str, tuple[float, ...]] = dict.fromkeys(order, ())
        requests: list[str] = []
        try:
            # Read backwards, one text alone is the same request again: its second score would say
            # nothing.
            for once in [order, order[::-1]][: len(order)]:
                messages = recipe.panel_messages(question, once, tenant)
                parse = partial(recipe.parse_panel, count=len(once))
                answer = await clients.judge.ask(messages, parse, recipe.PANEL_SCHEMA)
                requests.append(answer.request_hash)
                scores |= {
                    text: (*scores[text], score)
                    for text, score in zip(once, answer.value, strict=True)
                }
        except CallError as error:
            return error.reason
        return _Judged(scores, tuple(requests))

    judged = await ask_about(questions, judge)
    unjudged = _unjudged(judged, len(questions), config.max_failed_share)
    scored = {
        name: [_scored(entry, judged.get(entry.row_id)) for entry in arm]
        for name, arm in arms.items()
    }
    return Measured(scored, unjudged)


def shuffle_texts(texts: Iterable[str], row_id: str, seed: int) -> list[str]:
    """The distinct texts in an order that depends on row, seed and texts alone, not on whose they
    are."""
    order = sorted(set(texts))
    Random(f"{seed} {row_id}").shuffle(order)
    return order


def consistency(arm: Iterable[ArmRow]) -> float | None:
    """Mean difference between the two passes, 0–5; None where no text was read twice."""
    differences = [
        abs(entry.judge_scores[0] - entry.judge_scores[1])
        for entry in arm
        if len(entry.judge_scores) == 2
    ]
    return fmean(differences) if differences else None


def _scored(entry: ArmRow, found: _Judged | str | None) -> ArmRow:
    """The arm did its part where the judge failed: what it retrieved counts."""
    if isinstance(found, _Judged) and is_empty(entry):
        return entry.model_copy(update={"judge_score": _LOWEST_SCORE})
    if entry.text is None or found is None or isinstance(found, str):
        reason = found if isinstance(found, str) and entry.reason is None else entry.reason
        return entry.model_copy(update={"judge_score": None, "reason": reason})
    scores = found.scores[entry.text]
    requests = (*entry.requests, *found.requests)
    return entry.model_copy(
        update={"judge_score": fmean(scores), "judge_scores": scores, "requests": requests}
    )
