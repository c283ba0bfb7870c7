"""What the RAG finds with each arm's text: once per text and question, so that arms that agree get the same answer."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

from qinglan.clients.roles import Clients
from qinglan.errors import CallError, StageError
from qinglan.rows import ArmName, ArmRow, Retrieved, Row

ORIGINAL = "original"
UNREADABLE = "judge_unreadable"
AT_ONCE = 1_000
"""Questions that are begun together: enough to keep the services busy, and no more in memory than that."""

Arms = Mapping[ArmName, Sequence[ArmRow]]
_Found = Retrieved | str
"""What was retrieved, or the reason why nothing was."""


async def retrieve_all(
    arms: Arms, rows: Sequence[Row], clients: Clients, max_failed_share: float
) -> dict[ArmName, list[ArmRow]]:
    """Fill in the retrievals that are missing.

    Raises:
        StageError: too many calls failed for a fair comparison.
    """
    by_row = by_question(arms)
    questions = iter([row for row in rows if row.id in by_row])
    while some := list(islice(questions, AT_ONCE)):
        done = await asyncio.gather(*(_question(row, by_row[row.id], clients) for row in some))
        by_row |= {row.id: entries for row, entries in zip(some, done, strict=True)}
    filled = {name: [by_row[entry.row_id][name] for entry in arm] for name, arm in arms.items()}
    for arm in filled.values():
        check_failures(
            [e.reason for e in arm if e.text is not None and e.retrieved is None], len(arm), max_failed_share
        )
    return filled


def by_question(arms: Arms) -> dict[str, dict[ArmName, ArmRow]]:
    """Row id → arm → entry."""
    turned: dict[str, dict[ArmName, ArmRow]] = {}
    for name, arm in arms.items():
        for entry in arm:
            turned.setdefault(entry.row_id, {})[name] = entry
    return turned


def check_failures(reasons: Sequence[str | None], questions: int, max_failed_share: float) -> None:
    """Stop where too many calls failed for a fair comparison.

    Raises:
        StageError: with the reasons; nothing of it is kept.
    """
    if len(reasons) > max_failed_share * questions:
        counted = ", ".join(f"{reason} {count}" for reason, count in Counter(reasons).most_common())
        kept = "; what the judge answered is kept, so that for other answers judge.model or evaluate.seed must change"
        raise StageError(
            f"evaluate: calls failed for {len(reasons)} of {questions} questions ({counted}), more than "
            f"evaluate.max_failed_share = {max_failed_share:.0%} allows; repair the service and run again"
            + (kept if UNREADABLE in reasons else "")
        )


async def _question(row: Row, entries: Mapping[ArmName, ArmRow], clients: Clients) -> dict[ArmName, ArmRow]:
    texts = {name: None if name == ORIGINAL else entry.text for name, entry in entries.items()}
    found: dict[str | None, _Found] = {texts[name]: e.retrieved for name, e in entries.items() if e.retrieved}
    open_ = [name for name, entry in entries.items() if entry.text is not None and entry.retrieved is None]
    missing = list(dict.fromkeys(texts[name] for name in open_ if texts[name] not in found))
    found |= zip(missing, await asyncio.gather(*(_retrieve(row, text, clients) for text in missing)), strict=True)
    return {name: _filled(e, found[texts[name]]) if e.text is not None else e for name, e in entries.items()}


async def _retrieve(row: Row, text: str | None, clients: Clients) -> _Found:
    """Without a text it is the question itself, and the service does with it what it always does."""
    try:
        return await (clients.rag.retrieve(row.query) if text is None else clients.rag.retrieve(row.query, text))
    except CallError as error:
        return error.reason


def _filled(entry: ArmRow, found: _Found) -> ArmRow:
    if isinstance(found, str):
        return entry.model_copy(update={"reason": found})
    return entry.model_copy(update={"retrieved": entry.retrieved or found, "reason": None})
