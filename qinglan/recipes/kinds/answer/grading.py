"""Texts that are graded by themselves: by the recipe's rules on their row, and by the judge where it asks for one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from qinglan.clients.row_batches import Work
from qinglan.config import Profile, Reward, Select, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes.kinds.answer.parts import JUDGE, QUALITY, metric_names, part_names, weights
from qinglan.recipes.kinds.answer.recipe import AnswerRecipe
from qinglan.recipes.kinds.answer.validation import Findings, validator
from qinglan.recipes.kinds.common import Measured, PrimaryMetric, rl_record, rl_schema
from qinglan.recipes.kinds.selection import decide
from qinglan.rows import Row
from qinglan.runs.artifacts import hash_of

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients, Role
    from qinglan.recipes.kinds.answer.scorer import AnswerScorer
    from qinglan.recipes.scoring.service import RewardService
    from qinglan.rows import ArmRow

_TEXT = pa.string()
_SCHEMA = rl_schema({"row_id": _TEXT, "tenant": _TEXT, "gold_id": _TEXT, "row": _TEXT})


class AnswerGrading:
    """Of one recipe."""

    rl_schema: pa.Schema = _SCHEMA
    hint = "mend the teacher's prompt or the recipe's rules, or add questions"

    def __init__(self, recipe: AnswerRecipe) -> None:
        """Look whether its parts can be told from other figures.

        Raises:
            ConfigError: a part or metric is called as one of them.
        """
        self._recipe = recipe
        self.score_parts = tuple(dict.fromkeys((JUDGE, *part_names(recipe), *metric_names(recipe))))
        self.reported_parts = self.score_parts

    def check(self, profile: Profile) -> None:
        """Weights are of its parts, and one is known for every sample."""
        given, config = weights(self._recipe, profile.reward), profile.reward
        if unknown := [name for name in config.part_weights if name not in self._recipe.WEIGHTS]:
            known = ", ".join(self._recipe.WEIGHTS)
            raise ConfigError(
                f"reward.part_weights: recipe `{self._recipe.NAME}` has no part `{unknown[0]}`; its parts: {known}"
            )
        if given.get(JUDGE, 0) and "judge" not in self._recipe.graders:
            raise ConfigError(f"reward.part_weights: recipe `{self._recipe.NAME}` asks no judge; leave out {JUDGE}")
        ruled = any(weight for name, weight in given.items() if name != JUDGE)
        if not ruled and not (given.get(JUDGE, 0) and config.judge_share == 1):
            raise ConfigError(
                "reward.part_weights: a part that a rule gives must weigh more than 0, or the judge must be asked for "
                "every sample"
            )

    def validation_roles(self, profile: Profile) -> "tuple[Role, ...]":
        """The judge, where the recipe has one and the profile wants it."""
        return self._recipe.graders if profile.validation.judge_baseline else ()

    def validator(self, clients: "Clients", tenant: Tenant, *, judge: bool) -> Work:
        """The rules, and the judge's score if asked for."""
        return validator(self._recipe, clients, tenant, judge=judge)

    def findings(self) -> Findings:
        """Of the teacher's answers."""
        return Findings(self._recipe)

    def select(self, rows: Iterable[Row], config: Select) -> Iterator[Row]:  # noqa: ARG002 (rewrites' limits)
        """By the recipe's rules."""
        return decide(rows, lambda row: "not_validated" if row.parts is None else self._recipe.flaw(row))

    def has_baseline(self, row: Row) -> bool:
        """Any row whose answer may teach, or that the recipe can reward all the same."""
        return row.reason in self._recipe.RL_REASONS and bool(row.target)

    def rl_record(self, row: Row, tenant: Tenant) -> dict[str, Any]:
        """The row's prompt, and the row itself for the rules."""
        info = {
            "row_id": row.id,
            "tenant": row.tenant,
            "gold_id": row.unit,
            "row": row.model_dump_json(exclude_none=True),
        }
        return rl_record(self._recipe, self._recipe.student_messages(row, tenant), "", info)

    def dev_metric(self, config: Reward, infos: Iterable[Mapping[str, Any]]) -> str:  # noqa: ARG002
        """The recipe's first metric."""
        return self.primary_metric().part

    def primary_metric(self) -> PrimaryMetric:
        """The recipe's first metric."""
        first = self._recipe.METRICS[0]
        return PrimaryMetric(JUDGE if first.name == QUALITY else first.name, first.en)

    def scorer(self, service: "RewardService") -> "AnswerScorer":
        """Grades, asks the judge where its score counts, and lets the recipe reward it."""
        from qinglan.recipes.kinds.answer.scorer import AnswerScorer

        return AnswerScorer(service, self._recipe)

    def baseline_arms(
        self,
        rows: Sequence[Row],
        profile: Profile,  # noqa: ARG002
        *,
        afresh: bool = False,  # noqa: ARG002 (rules say the same today)
    ) -> "dict[str, list[ArmRow]]":
        """The teacher's answers, where all of them are the teacher's; answers that rows bring are nobody's arm."""
        from qinglan.recipes.kinds.arms import teacher_rows

        answered = [row for row in rows if row.answer]
        asked_for_all = bool(answered) and all(row.answer_request for row in answered)
        return {"teacher": teacher_rows(rows)} if asked_for_all else {}

    async def measure(
        self,
        arms: "Mapping[str, Sequence[ArmRow]]",
        rows: Sequence[Row],
        clients: "Clients",
        profile: Profile,
    ) -> Measured:
        """Every text by the rules and by the judge."""
        from qinglan.recipes.kinds.answer.measuring import measure

        limit = profile.evaluate.max_failed_share
        return await measure(self._recipe, arms, rows, clients, profile.tenant, limit)

    def measuring_identity(self, tenant: Tenant) -> str:  # noqa: ARG002
        """Of the recipe's version, which `recipes.identity` holds, and of the schema that the judge is held to."""
        return hash_of(self._recipe.JUDGE_SCHEMA if self._recipe.graders else {})
