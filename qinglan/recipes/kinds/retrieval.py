"""Recipes whose text is sent to the retrieval service: what it finds, and a judge, say how good the
text is."""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from qinglan.config import EMBEDDED, Profile, Reward, Select, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes.kinds.elements import Message, Metric, PrimaryMetric, object_schema
from qinglan.recipes.kinds.recipe import JudgeUse, Recipe, ask_judge
from qinglan.recipes.kinds.selection import is_leftover, is_refusal
from qinglan.recipes.kinds.untrusted import parse_scores
from qinglan.recipes.kinds.validation import RetrievalStatistics
from qinglan.recipes.scoring.service import NOT_JUDGED, Baseline, GradedRewrite, Scored
from qinglan.rows import ArmRow, Row, normalise
from qinglan.runs.artifacts import hash_of

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients, Role
    from qinglan.recipes.kinds.measuring import Arms, Measured
    from qinglan.recipes.scoring.scorer import RetrievalScorer
    from qinglan.recipes.scoring.service import RewardService


class RetrievalRecipe(Recipe):
    """A user's question becomes another text for the same retrieval service."""

    METRICS = (
        Metric("top1", "top-1", "top-1"),
        Metric("recall3", "recall@3", "recall@3", interval=False, compared=False),
        Metric("recall10", "recall@10", "recall@10", interval=False, compared=False),
        Metric("mrr10", "MRR@10", "MRR@10", proportion=False, interval=False),
        Metric("ndcg10", "nDCG@10", "nDCG@10", proportion=False, interval=False, compared=False),
        Metric("mean_top1_score", "mean top-1 score", "平均首位得分", proportion=False),
        Metric(
            "quality",
            "judge score (0–5)",
            "裁判评分（0–5）",
            maximum=5.0,
            proportion=False,
            digits=2,
        ),
    )
    PANEL_SCHEMA: ClassVar[dict[str, Any]] = object_schema(
        scores={"type": "array", "items": {"type": "number"}}
    )
    """JSON schema of the judge's answer about several rewrites."""
    RL_REASONS: ClassVar[frozenset[str | None]] = frozenset(
        {None, "below_threshold", "worse_than_original", "rewrite_too_long", "rewrite_too_short"}
    )
    """A row with one of these has a valid teacher baseline: teacher and RAG both answered.
    Refusals, boilerplate and rewrites that a reviewer rejected or corrected have none: the reward's
    guard takes its anchors from the baseline."""
    TOO_FEW_ROWS_HINT = (
        "add questions, or see why these rows failed (docs/reference/events-and-metrics.md)"
    )
    RL_INFO: ClassVar[dict[str, type]] = {**Baseline.__annotations__, "unit": str}
    score_parts = tuple(name for name in Scored.__dataclass_fields__ if name != "score")
    primary_metric = PrimaryMetric("gold_top1", "gold top-1")
    graders: "tuple[Role, ...]" = ("judge", "rag")

    @abstractmethod
    def judge_messages(self, question: str, rewrite: str, tenant: Tenant) -> list[Message]:
        """What the judge is asked; `question` is what `question_text` gives."""

    @abstractmethod
    def panel_messages(
        self, question: str, rewrites: Sequence[str], tenant: Tenant
    ) -> list[Message]:
        """What the judge is asked about several rewrites of one question at once, in this order, on
        the same scale.

        Rewrites are untrusted: none may pose as another, or as part of the prompt.
        """

    @abstractmethod
    def relevance_messages(self, question: str, passage: str, tenant: Tenant) -> list[Message]:
        """What the judge is asked about a passage that was found: does it answer the question?"""

    def messages_about(self, row: Row, text: str, tenant: Tenant) -> list[Message]:
        return self.judge_messages(self.question_text(row), text, tenant)

    def prompts(self, row: Row, profile: Profile) -> dict[str, list[Message]]:
        question, tenant = self.question_text(row), profile.tenant
        relevance = self.relevance_messages(question, row.query, tenant)
        panel = self.panel_messages(question, [row.query], tenant)
        return {**super().prompts(row, profile), "relevance": relevance, "panel": panel}

    def parse_panel(self, text: str, count: int) -> list[float]:
        """The scores, 0–5, one per rewrite in the order of the question; TeacherError where the
        answer has others."""
        return parse_scores(text, count)

    @abstractmethod
    def reward(self, config: Reward, baseline: Baseline, rewrite: GradedRewrite) -> Scored:
        """The reward of one sample from its parts, in [−1, 1]. Pure; the rewrite is never empty."""

    def fallback(self, row: Row) -> str | None:
        """The question as it is: a rewriter that fails must not cost the user an answer."""
        return row.query

    def clean(self, text: str) -> str:
        return " ".join(text.split())

    def measured_values(self, entry: ArmRow, row: Row) -> dict[str, float]:
        """Metrics of the best gold document's rank, where the row names any; each answers alone:
        the ideal DCG is 1."""
        if entry.retrieved is None:
            return {}
        found = {"mean_top1_score": entry.retrieved.top1_score}
        if not row.gold_id:
            return found
        rank = entry.retrieved.rank(row.gold_id)
        in_ten = 0 < rank <= 10
        return found | {
            "top1": float(rank == 1),
            "recall3": float(0 < rank <= 3),
            "recall10": float(in_ten),
            "mrr10": 1 / rank if in_ten else 0.0,
            "ndcg10": 1 / math.log2(1 + rank) if in_ten else 0.0,
        }

    def check_profile(self, profile: Profile) -> None:
        if profile.reward.part_weights:
            raise ConfigError(
                f"reward.part_weights: recipe `{self.NAME}` is not graded by parts; set reward.judge_weight, "
                "retrieval_weight and win_weight"
            )

    def estimate_messages(
        self, use: JudgeUse, row: Row, profile: Profile, texts: int, passage: str
    ) -> list[Message]:
        question = self.question_text(row)  # about as long as a rewrite
        if use == "texts":
            return self.panel_messages(question, [row.query] * texts, profile.tenant)
        if use == "passage":
            return self.relevance_messages(question, passage, profile.tenant)
        return self.judge_messages(question, row.query, profile.tenant)

    async def validate(self, row: Row, clients: "Clients", tenant: Tenant, *, judge: bool) -> Row:
        assert row.answer is not None
        original, rewritten = await asyncio.gather(
            clients.rag.retrieve(row.query), clients.rag.retrieve(row.query, row.answer)
        )
        score = await ask_judge(self, row, clients, tenant) if judge else None
        return row.model_copy(
            update={
                "original_retrieved": original,
                "answer_retrieved": rewritten,
                "judge_score": score,
            }
        )

    def validation_statistics(self) -> RetrievalStatistics:
        return RetrievalStatistics()

    def drop_reason(self, row: Row, config: Select) -> str | None:
        assert row.answer is not None
        rewrite, found, original = row.answer.strip(), row.answer_retrieved, row.original_retrieved
        if is_refusal(rewrite):
            return "refusal_text"
        if is_leftover(rewrite, config.boilerplate):
            return "boilerplate"
        if len(normalise(rewrite)) < config.min_rewrite_chars:
            return "rewrite_too_short"
        if found is None or (original is None and config.not_worse_than_original):
            return "not_validated"
        if (
            not found.scores
        ):  # before the length: RL may use a row that is too long, not one without a baseline
            return "nothing_recalled"
        if len(row.answer) > config.max_rewrite_chars:
            return "rewrite_too_long"
        if found.top1_score < config.min_top1_score:
            return "below_threshold"
        if (
            config.not_worse_than_original
            and original is not None
            and found.quality < original.quality
        ):
            return "worse_than_original"
        return None

    def may_ask_in_rl(self, row: Row) -> bool:
        found = row.answer_retrieved
        retrieved = bool(row.answer) and found is not None and bool(found.scores)
        return retrieved and row.reason in self.RL_REASONS and row.review != "correct"

    def rl_info(self, row: Row) -> dict[str, Any]:
        found = row.answer_retrieved
        assert found is not None, "only rows with a baseline get here"
        return {
            "row_id": row.id,
            "question": self.question_text(row),
            "gold_id": row.gold_id or "",
            "unit": row.unit,
            "teacher_rewrite": row.answer,
            "teacher_quality": found.quality,
            "teacher_judge": NOT_JUDGED if row.judge_score is None else row.judge_score,
        }

    def dev_metric(self, config: Reward, infos: Iterable[Mapping[str, Any]]) -> str:
        """By labels where there are any and they may be used, else by the judge, else by the
        reward."""
        if config.use_labels and any(info["gold_id"] for info in infos):
            return "gold_top1"
        return "relevant" if config.relevance_gate else "score"

    def can_have(self, part: str, info: Mapping[str, Any]) -> bool:
        return part != "gold_top1" or bool(info["gold_id"])

    def scorer(self, service: "RewardService") -> "RetrievalScorer":
        from qinglan.recipes.scoring.scorer import RetrievalScorer

        return RetrievalScorer(service, self)

    def baseline_arms(
        self, rows: Sequence[Row], profile: Profile, *, retrieve_again: bool = False
    ) -> dict[str, list[ArmRow]]:
        from qinglan.recipes.kinds.measuring import original_rows, teacher_rows

        arms = {"original": original_rows(rows), "teacher": teacher_rows(rows)}
        if not retrieve_again or profile.rag.url == EMBEDDED:
            return arms
        return {
            name: [entry.model_copy(update={"retrieved": None}) for entry in arm]
            for name, arm in arms.items()
        }

    async def measure(
        self, arms: "Arms", rows: Sequence[Row], clients: "Clients", profile: Profile
    ) -> "Measured":
        from qinglan.recipes.kinds.measuring import judge_by_panel, retrieve_all

        config = profile.evaluate
        retrieved = await retrieve_all(arms, rows, clients, config.max_failed_share)
        return await judge_by_panel(self, retrieved, rows, clients, profile.tenant, config)

    def measuring_digest(self, tenant: Tenant) -> str:
        return hash_of(self.PANEL_SCHEMA, self.panel_messages("问", ["甲", "乙"], tenant))
