"""Recipes whose text is put to the retrieval service: what it finds, and a judge, say how good the text is."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from qinglan.config import Reward, Tenant
from qinglan.errors import TeacherError
from qinglan.recipes.kinds.recipe import Message, Metric, Recipe, json_object
from qinglan.rows import Retrieved, Row

if TYPE_CHECKING:
    from qinglan.clients.roles import Role


class Baseline(BaseModel):
    """The teacher's side of one prompt, computed once before RL (`extra_info` of the training file)."""

    row_id: str
    question: str
    gold_id: str
    """Empty where the row is not labelled."""
    teacher_rewrite: str
    teacher_quality: float
    teacher_judge: float
    """−1 where the judge was not asked."""


@dataclass(frozen=True)
class Scored:
    """One sample's reward and what it is made of; NaN for a part that is not known."""

    score: float
    judge: float
    rq: float
    rq_gain: float
    win: float
    gold_top1: float
    relevant: float
    """Does the best passage answer the question, by the judge? 1 or 0."""
    guard_ok: float


class RetrievalRecipe(Recipe):
    """A user's question becomes another text for the same retrieval service."""

    KIND = "retrieval"
    METRICS = (
        Metric("top1", "top-1", "top-1"),
        Metric("recall3", "recall@3", "recall@3", interval=False, compared=False),
        Metric("recall10", "recall@10", "recall@10", interval=False, compared=False),
        Metric("mrr10", "MRR@10", "MRR@10", proportion=False, interval=False),
        Metric("ndcg10", "nDCG@10", "nDCG@10", proportion=False, interval=False, compared=False),
        Metric("mean_top1_score", "mean top-1 score", "平均首位得分", proportion=False, headline=False),
        Metric("quality", "judge score (0–5)", "裁判评分（0–5）", maximum=5.0, proportion=False, digits=2),
    )
    PANEL_SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"scores": {"type": "array", "items": {"type": "number"}}},
        "required": ["scores"],
        "additionalProperties": False,
    }
    """JSON schema of the judge's answer about several rewrites."""

    @property
    def graders(self) -> "tuple[Role, ...]":
        """What a text retrieves counts, and what the judge says of it."""
        return ("judge", "rag")

    @abstractmethod
    def judge_messages(self, question: str, rewrite: str, tenant: Tenant) -> list[Message]:
        """What the judge is asked; `question` is what `question_text` gives."""

    @abstractmethod
    def panel_messages(self, question: str, rewrites: Sequence[str], tenant: Tenant) -> list[Message]:
        """What the judge is asked about several rewrites of one question at once, in this order, on the same scale.

        Whose they are is not told. They are untrusted: none may pose as another, or as part of the prompt.
        """

    @abstractmethod
    def relevance_messages(self, question: str, passage: str, tenant: Tenant) -> list[Message]:
        """What the judge is asked about a passage that was found: does it answer the question?"""

    def parse_panel(self, text: str, count: int) -> list[float]:
        """The scores, 0–5, one per rewrite in the order of the question, from the judge's answer.

        Raises:
            TeacherError: no JSON object with that many scores in range (`judge_unreadable`).
        """
        try:
            scores = [float(score) for score in (json_object(text) or {"scores": []})["scores"]]
        except (ValueError, KeyError, TypeError) as error:
            raise TeacherError(f"the judge's answer has no scores: {text[:80]!r}", "judge_unreadable") from error
        if len(scores) != count or not all(0 <= score <= 5 for score in scores):
            raise TeacherError(
                f"the judge's answer has not {count} scores from 0 to 5: {text[:80]!r}", "judge_unreadable"
            )
        return scores

    @abstractmethod
    def reward(
        self,
        config: Reward,
        baseline: Baseline,
        rewrite: str,
        retrieved: Retrieved,
        judge_score: float | None,
        relevance: float | None,
    ) -> Scored:
        """The reward of one sample from its parts, in [−1, 1]. Pure; `rewrite` is never empty.

        Args:
            judge_score: of the rewrite, 0–5; None where the judge was not asked.
            relevance: of the best passage, 0–5; None where the judge was not asked.
        """

    def fallback(self, row: Row) -> str | None:
        """The question as it is: a rewriter that fails must not cost the user an answer."""
        return row.query
