"""Texts that are retrieved with: what they find and what the judge says of them, beside the teacher's rewrite."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from qinglan.clients.row_batches import Work
from qinglan.config import EMBEDDED, Profile, Reward, Select, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes.kinds.common import Measured, PrimaryMetric
from qinglan.recipes.kinds.retrieval import records, selection
from qinglan.recipes.kinds.retrieval.recipe import RetrievalRecipe, Scored
from qinglan.recipes.kinds.retrieval.validation import Findings, validator
from qinglan.rows import Row
from qinglan.runs.artifacts import hash_of

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients, Role
    from qinglan.recipes.kinds.retrieval.scorer import RetrievalScorer
    from qinglan.recipes.scoring.service import RewardService
    from qinglan.rows import ArmRow


class RetrievalGrading:
    """Of one recipe."""

    rl_schema: pa.Schema = records.SCHEMA
    reported_parts = ("gold_top1", "judge", "rq_gain", "guard_ok")
    hint = "lower select.min_top1_score or add questions"
    score_parts = tuple(name for name in Scored.__dataclass_fields__ if name != "score")

    def __init__(self, recipe: RetrievalRecipe) -> None:
        self._recipe = recipe

    def check(self, profile: Profile) -> None:
        """Its reward has weights of its own."""
        if profile.reward.part_weights:
            raise ConfigError(
                f"reward.part_weights: recipe `{self._recipe.NAME}` is not graded by parts; set reward.judge_weight, "
                "retrieval_weight and win_weight"
            )

    def validation_roles(self, profile: Profile) -> "tuple[Role, ...]":
        """The RAG, and the judge if RL is to have its baseline."""
        return ("judge", "rag") if profile.validation.judge_baseline else ("rag",)

    def validator(self, clients: "Clients", tenant: Tenant, *, judge: bool) -> Work:
        """Two retrievals, and the judge's score if asked for."""
        return validator(self._recipe, clients, tenant, judge=judge)

    def findings(self) -> Findings:
        """Of question and rewrite, both retrieved with."""
        return Findings()

    def select(self, rows: Iterable[Row], config: Select) -> Iterator[Row]:
        """By what the rewrite is and what it finds."""
        return selection.select(rows, config)

    def has_baseline(self, row: Row) -> bool:
        """Is there a rewrite of the teacher's to beat?"""
        return records.has_baseline(row)

    def rl_record(self, row: Row, tenant: Tenant) -> dict[str, Any]:
        """The row's prompt, and the teacher's side of it."""
        return records.record(row, self._recipe, tenant)

    def dev_metric(self, config: Reward, infos: Iterable[Mapping[str, Any]]) -> str:
        """By labels where there are any and they may be used, else by the judge, else by the reward."""
        if config.use_labels and any(info["gold_id"] for info in infos):
            return "gold_top1"
        return "relevant" if config.relevance_gate else "score"

    def primary_metric(self) -> PrimaryMetric:
        """Labels tell, also where the reward does not use them."""
        return PrimaryMetric("gold_top1", "gold top-1")

    def scorer(self, service: "RewardService") -> "RetrievalScorer":
        """Retrieves, asks the judge, and lets the recipe reward it."""
        from qinglan.recipes.kinds.retrieval.scorer import RetrievalScorer

        return RetrievalScorer(service, self._recipe)

    def baseline_arms(
        self, rows: Sequence[Row], profile: Profile, *, afresh: bool = False
    ) -> "dict[str, list[ArmRow]]":
        """The question as it was typed, and the teacher's rewrite."""
        from qinglan.recipes.kinds.arms import not_retrieved, original_rows, teacher_rows

        arms = {"original": original_rows(rows), "teacher": teacher_rows(rows)}
        stale = afresh and profile.rag.url != EMBEDDED
        return {name: not_retrieved(arm) for name, arm in arms.items()} if stale else arms

    async def measure(
        self,
        arms: "Mapping[str, Sequence[ArmRow]]",
        rows: Sequence[Row],
        clients: "Clients",
        profile: Profile,
    ) -> Measured:
        """Retrieve with every text, then let the blind panel read them."""
        from qinglan.recipes.kinds.retrieval.panel import Panel
        from qinglan.recipes.kinds.retrieval.retrieving import retrieve_all

        config = profile.evaluate
        retrieved = await retrieve_all(arms, rows, clients, config.max_failed_share)
        panel = Panel(self._recipe, clients, profile.tenant, config.seed, config.max_failed_share)
        return Measured(*await panel.judge(retrieved, rows))

    def measuring_identity(self, tenant: Tenant) -> str:
        """Of the panel's question."""
        return hash_of(self._recipe.PANEL_SCHEMA, self._recipe.panel_messages("问", ["甲", "乙"], tenant))
