"""Scores samples that are graded by themselves: by the recipe's rules, and by the judge where its score counts."""

import math
from typing import TYPE_CHECKING, Any

from qinglan.errors import ConfigError
from qinglan.recipes import JUDGE
from qinglan.recipes.scoring.scorer import Sample, Scorer, judge_asked
from qinglan.recipes.scoring.service import RewardService
from qinglan.rows import Row

if TYPE_CHECKING:
    from qinglan.recipes.kinds.answer import AnswerRecipe


class AnswerScorer(Scorer[Sample]):
    """Of one recipe; `extra_info` holds the row."""

    _recipe: "AnswerRecipe"

    def __init__(self, service: RewardService, recipe: "AnswerRecipe") -> None:
        self._recipe, self._parts = recipe, recipe.score_parts
        counts = (recipe.WEIGHTS | service.reward.part_weights).get(JUDGE, 0) > 0
        self._judged_share = service.reward.judge_share if counts and service.judge else 0.0
        super().__init__(service)

    async def _score(self, extra_info: dict[str, Any], sample: Sample) -> dict[str, float]:
        row = Row.model_validate_json(extra_info["row"])
        parts = self._recipe.checked_parts(row, sample.text)
        judge = await self._judged(row, sample)
        score = -1.0
        if sample.text:
            known = parts if judge is None else parts | {JUDGE: judge / 5}
            score = self._recipe.reward(self._service.reward, known)
            if math.isnan(score):
                named = ", ".join(known) or "none"
                raise ConfigError(
                    f"recipe `{self._recipe.NAME}`: no part with a weight is known for this row (known: {named})"
                )
        metrics = self._recipe.metric_values(row, sample.text, parts)
        shown = {name: value for name, value in metrics.items() if name in self._parts}
        return {"score": score, JUDGE: math.nan if judge is None else judge, **shown, **parts}

    async def _judged(self, row: Row, sample: Sample) -> float | None:
        """The judge's score, 0–5; None where it is not asked."""
        if not sample.text or not judge_asked(self._recipe.question_text(row), sample.text, self._judged_share):
            return None
        messages = self._recipe.judge_messages(row, sample.text, self._service.tenant)
        if messages is None:
            return None
        return await self._ask(messages, sample, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA)
