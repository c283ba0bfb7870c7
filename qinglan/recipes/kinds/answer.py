"""Recipes whose text is graded by itself: by rules on its row, and by the judge where the recipe
asks for one."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from qinglan.config import Profile, Reward, Select, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes.kinds.elements import JUDGE, QUALITY, Message, PrimaryMetric
from qinglan.recipes.kinds.recipe import JudgeUse, Recipe, ask_judge
from qinglan.recipes.kinds.validation import AnswerStatistics
from qinglan.rows import ArmRow, Row
from qinglan.runs.artifacts import hash_of

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients, Role
    from qinglan.recipes.kinds.measuring import Arms, Measured
    from qinglan.recipes.scoring.scorer import AnswerScorer
    from qinglan.recipes.scoring.service import RewardService

_TAKEN = {
    "score", "row_id", "target", "invalid", "samples", "alone", "steps", "reward", "entropy", "clip_fraction",
    "value_loss", "judge_asked", "judge_cached", "judge_cost_usd", "rag_calls", "rag_cached", "latency_ms",
}  # fmt: skip
"""Figures of a sample or a step that have these names already."""


class AnswerRecipe(Recipe):
    """A question, with whatever else the row brings, becomes an answer."""

    WEIGHTS: ClassVar[dict[str, float]]
    """Every part of the reward and its weight, 0 for one that is only logged; `judge` is the
    judge's score / 5. `reward.part_weights` may change them."""
    RL_REASONS: ClassVar[frozenset[str | None]] = frozenset({None})
    """RL may ask the questions of rows with one of these: None are those that may teach; add a flaw
    of the teacher's answer where the reward does not depend on that answer."""
    TOO_FEW_ROWS_HINT = "correct the teacher's prompt or the recipe's rules, or add questions"
    RL_INFO: ClassVar[dict[str, type]] = {"row_id": str, "unit": str, "row": str}

    @abstractmethod
    def parts(self, row: Row, text: str) -> dict[str, float]:
        """The text graded by rule, each part from 0 to 1. Pure; a part without a value for this row
        is absent."""

    def judge_messages(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:  # noqa: ARG002
        """What the judge is asked about a text; None where it is not asked. An empty text gets 0
        unasked."""
        return None

    def messages_about(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:
        return self.judge_messages(row, text, tenant)

    def reward(self, config: Reward, parts: Mapping[str, float]) -> float:
        """The weighted mean of the parts that are known (neither absent nor NaN), from [0, 1] to
        [−1, 1]; NaN where none is known."""
        weights = self.WEIGHTS | config.part_weights
        known = {
            name: value
            for name, value in parts.items()
            if not math.isnan(value) and weights.get(name, 0) > 0
        }
        if not known:
            return math.nan
        mean = sum(weights[name] * value for name, value in known.items()) / sum(
            weights[name] for name in known
        )
        return max(-1.0, min(1.0, 2 * mean - 1))

    def flaw(self, row: Row) -> str | None:
        """Why the teacher's answer must not teach; None where it may."""
        return "bad_format" if (row.parts or {}).get("format", 1.0) < 1 else None

    def metric_values(self, row: Row, text: str, parts: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Metrics of one text by name; one without a value is absent. `quality` comes from the
        judge, not from here."""
        return dict(parts)

    @property
    def graders(self) -> "tuple[Role, ...]":
        """The judge, where `judge_messages` is defined."""
        return () if type(self).judge_messages is AnswerRecipe.judge_messages else ("judge",)

    @property
    def rule_parts(self) -> tuple[str, ...]:
        return tuple(name for name in self.WEIGHTS if name != JUDGE)

    @property
    def score_parts(self) -> tuple[str, ...]:
        metrics = (metric.name for metric in self.METRICS if metric.name != QUALITY)
        names = tuple(dict.fromkeys((JUDGE, *self.rule_parts, *metrics)))
        if taken := sorted(_TAKEN & set(names)):
            raise ConfigError(
                f"recipe `{self.NAME}`: training has figures called {', '.join(taken)}; rename the part"
            )
        return names

    @property
    def primary_metric(self) -> PrimaryMetric:
        first = self.METRICS[0]
        return PrimaryMetric(JUDGE if first.name == QUALITY else first.name, first.en)

    def dev_metric(self, config: Reward, infos: Iterable[Mapping[str, Any]]) -> str:
        """The first metric, where RL measures it and a dev row can have it, else the reward."""
        part, weights = self.primary_metric.part, self.WEIGHTS | config.part_weights
        is_measured = part != JUDGE or (config.judge_share > 0 and weights.get(JUDGE, 0) > 0)
        return part if is_measured and any(self.can_have(part, info) for info in infos) else "score"

    def checked_parts(self, row: Row, text: str) -> dict[str, float]:
        """What `parts` gives; raises ConfigError where it is not what the recipe declares."""
        parts = self.parts(row, text)
        for name, value in parts.items():
            if name not in self.rule_parts:
                raise ConfigError(
                    f"recipe `{self.NAME}`: parts() gave `{name}`, which WEIGHTS does not name"
                )
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"recipe `{self.NAME}`: parts() gave {name} = {value}, which is not from 0 to 1"
                )
        return parts

    def measured_values(self, entry: ArmRow, row: Row) -> dict[str, float]:
        return self.metric_values(row, entry.text or "", entry.parts or {})

    def check_profile(self, profile: Profile) -> None:
        config = profile.reward
        weights = self.WEIGHTS | config.part_weights
        if unknown := [name for name in config.part_weights if name not in self.WEIGHTS]:
            known = ", ".join(self.WEIGHTS)
            raise ConfigError(
                f"reward.part_weights: recipe `{self.NAME}` has no part `{unknown[0]}`; its parts: {known}"
            )
        judged = weights.get(JUDGE, 0) > 0
        if judged and "judge" not in self.graders:
            raise ConfigError(
                f"reward.part_weights: recipe `{self.NAME}` asks no judge; leave out {JUDGE}"
            )
        ruled = any(weight for name, weight in weights.items() if name != JUDGE)
        if not ruled and not (judged and config.judge_share == 1):
            raise ConfigError(
                "reward.part_weights: a part that a rule gives must weigh more than 0, or the judge must be asked for "
                "every sample"
            )
        _ = self.score_parts

    def estimate_messages(
        self,
        use: JudgeUse,  # noqa: ARG002
        row: Row,
        profile: Profile,
        texts: int,  # noqa: ARG002
        passage: str,  # noqa: ARG002
    ) -> list[Message]:
        """It is asked about one text at a time."""
        return self.judge_messages(row, "字" * profile.student.max_new_tokens, profile.tenant) or []

    async def validate(self, row: Row, clients: "Clients", tenant: Tenant, *, judge: bool) -> Row:
        assert row.answer is not None
        parts = self.checked_parts(row, row.answer)
        score = await ask_judge(self, row, clients, tenant) if judge else None
        return row.model_copy(update={"parts": parts, "judge_score": score})

    def validation_statistics(self) -> AnswerStatistics:
        return AnswerStatistics(self)

    def drop_reason(self, row: Row, config: Select) -> str | None:  # noqa: ARG002 (its limits are for rewrites)
        return "not_validated" if row.parts is None else self.flaw(row)

    def may_ask_in_rl(self, row: Row) -> bool:
        """Any row whose answer may teach, or that the recipe can reward all the same."""
        return (None if row.status == "ok" else row.reason) in self.RL_REASONS and bool(row.target)

    def rl_info(self, row: Row) -> dict[str, Any]:
        known = row.model_dump_json(exclude_none=True)
        return {"row_id": row.id, "unit": row.unit, "row": known}

    def scorer(self, service: "RewardService") -> "AnswerScorer":
        from qinglan.recipes.scoring.scorer import AnswerScorer

        return AnswerScorer(service, self)

    def baseline_arms(
        self,
        rows: Sequence[Row],
        profile: Profile,  # noqa: ARG002
        *,
        retrieve_again: bool = False,  # noqa: ARG002 (nothing is retrieved)
    ) -> dict[str, list[ArmRow]]:
        """The teacher's answers, where all of them are the teacher's; answers that rows bring are
        no arm."""
        from qinglan.recipes.kinds.measuring import teacher_rows

        answered = [row for row in rows if row.answer]
        asked_for_all = bool(answered) and all(row.answer_request for row in answered)
        return {"teacher": teacher_rows(rows)} if asked_for_all else {}

    async def measure(
        self, arms: "Arms", rows: Sequence[Row], clients: "Clients", profile: Profile
    ) -> "Measured":
        from qinglan.recipes.kinds.measuring import grade_answers

        return await grade_answers(self, arms, rows, clients, profile)

    def measuring_digest(self, tenant: Tenant) -> str:  # noqa: ARG002
        """Of the schema of the judge's answer; the recipe's version is part of every stage's
        key."""
        return hash_of(self.JUDGE_SCHEMA if self.graders else {})
