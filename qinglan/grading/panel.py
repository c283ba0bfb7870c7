"""The blind panel: a judge reads all texts of a question at once, without knowing whose they are.

It reads them in an order drawn by the row's id, then in the reverse order. A text's score is the
mean of the two passes. Evaluation alone asks it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from qinglan.clients.openai_protocol import JsonSchema, Message
from qinglan.config import Tenant
from qinglan.grading.grade import GradingServices
from qinglan.grading.judge_answers import PANEL_SCHEMA, parse_scores
from qinglan.rows import Row

PASSES = 2
"""Passes of the panel over a question's texts, unless there is only one."""


class PanelScores(NamedTuple):
    """The panel's scores of a question's texts."""

    by_text: dict[str, tuple[float, ...]]
    """A score, 0–5, for each pass, by text."""
    requests: tuple[str, ...]
    """Ledger keys of the passes."""


@dataclass(frozen=True)
class Panel:
    """A recipe's question to the judge about several texts at once."""

    messages: Callable[[Row, Sequence[str], Tenant], list[Message]]
    """The prompt about these texts in this order, on the same scale as the prompt about one text.

    Texts are untrusted: none may pose as another, or as part of the prompt.
    """
    parse: Callable[[str, int], list[float]] = parse_scores
    """Reads so many scores, 0–5, in the order of the texts."""
    schema: JsonSchema | None = None
    """JSON schema of the answer; the one that `parse_scores` reads if None."""

    async def score(
        self,
        row: Row,
        texts: Collection[str],
        services: GradingServices,
        tenant: Tenant,
        seed: int,
    ) -> PanelScores:
        """The scores of the distinct texts; raises CallError where a pass failed."""
        order = shuffle_texts(texts, row.id, seed)
        passes = [order]
        # Read backwards, one text alone is the same request again: its second score would say
        # nothing.
        if len(order) > 1:
            passes.append(order[::-1])
        by_text: dict[str, tuple[float, ...]] = dict.fromkeys(order, ())
        requests: list[str] = []
        for texts_in_order in passes if order else ():
            messages = self.messages(row, texts_in_order, tenant)
            parse = partial(self._parse, count=len(texts_in_order))
            answer = await services.judge.ask(messages, parse, self.schema or PANEL_SCHEMA)
            requests.append(answer.request_hash)
            for text, score in zip(texts_in_order, answer.value, strict=True):
                by_text[text] = (*by_text[text], score)
        return PanelScores(by_text, tuple(requests))

    def _parse(self, answer: str, count: int) -> list[float]:
        return self.parse(answer, count)


def shuffle_texts(texts: Iterable[str], row_id: str, seed: int) -> list[str]:
    """The distinct texts in an order that depends on row, seed and texts alone.

    The order says nothing of whose the texts are.
    """
    order = sorted(set(texts))
    Random(f"{seed} {row_id}").shuffle(order)
    return order
