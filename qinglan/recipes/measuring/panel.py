"""The blind panel: the judge reads all distinct texts of a question at once, without knowing whose they are.

It reads them in an order drawn by the row's id, then in the reverse order; a text's score is the mean of the two
passes. A question on which a call failed is unjudged for all arms, so that the comparison stays paired.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from qinglan.clients.roles import Clients
from qinglan.config import Tenant
from qinglan.errors import CallError
from qinglan.recipes.measuring.arms import Arms, Measured, ask_about, by_question, check_failures
from qinglan.rows import ArmRow, Row

if TYPE_CHECKING:
    from qinglan.recipes.kinds.retrieval import RetrievalRecipe


@dataclass(frozen=True)
class Panel:
    """Who judges, and how the orders are drawn."""

    recipe: "RetrievalRecipe"
    clients: Clients
    tenant: Tenant
    seed: int = 0
    max_failed_share: float = 0.05

    async def judge(self, arms: Arms, rows: Sequence[Row]) -> Measured:
        """All arms with the panel's scores in the place of earlier ones."""
        entries = by_question(arms)
        questions = [row for row in rows if row.id in entries]
        judged = await ask_about(questions, lambda row: self._question(row, entries[row.id].values()))
        unjudged = [found for found in judged.values() if isinstance(found, str)]
        check_failures(unjudged, len(questions), self.max_failed_share)
        scored = {name: [_scored(entry, judged.get(entry.row_id)) for entry in arm] for name, arm in arms.items()}
        return Measured(scored, dict(Counter(unjudged).most_common()))

    async def _question(self, row: Row, entries: Iterable[ArmRow]) -> "_Judged | str":
        order = ballot((entry.text for entry in entries if entry.text is not None), row.id, self.seed)
        # Read backwards, one text alone is the same request again: its second score would say nothing.
        passes = [order, order[::-1]][: len(order)]
        question = self.recipe.question_text(row)
        scores: dict[str, tuple[float, ...]] = dict.fromkeys(order, ())
        requests: list[str] = []
        try:
            for texts in passes:
                answer = await self.clients.judge.ask(
                    self.recipe.panel_messages(question, texts, self.tenant),
                    partial(self.recipe.parse_panel, count=len(texts)),
                    self.recipe.PANEL_SCHEMA,
                )
                requests.append(answer.request_hash)
                scores |= {text: (*scores[text], score) for text, score in zip(texts, answer.value, strict=True)}
        except CallError as error:
            return error.reason
        return _Judged(scores, tuple(requests))


@dataclass(frozen=True)
class _Judged:
    scores: Mapping[str, tuple[float, ...]]
    """By text, a score per pass."""
    requests: tuple[str, ...]
    """The ledger's keys of the passes."""


def ballot(texts: Iterable[str], row_id: str, seed: int) -> list[str]:
    """The distinct texts in an order that depends on row, seed and texts alone, not on whose they are."""
    order = sorted(set(texts))
    Random(f"{seed} {row_id}").shuffle(order)
    return order


def consistency(arm: Iterable[ArmRow]) -> float | None:
    """Mean difference between the two passes, 0–5; None where no text was read twice."""
    differences = [abs(entry.judge_scores[0] - entry.judge_scores[1]) for entry in arm if len(entry.judge_scores) == 2]
    return fmean(differences) if differences else None


def _scored(entry: ArmRow, found: "_Judged | str | None") -> ArmRow:
    """The arm did its part where the judge failed: what it retrieved counts."""
    if entry.text is None or found is None or isinstance(found, str):
        reason = found if isinstance(found, str) and entry.reason is None else entry.reason
        return entry.model_copy(update={"judge_score": None, "reason": reason})
    scores = found.scores[entry.text]
    requests = (*entry.requests, *found.requests)
    return entry.model_copy(update={"judge_score": fmean(scores), "judge_scores": scores, "requests": requests})
