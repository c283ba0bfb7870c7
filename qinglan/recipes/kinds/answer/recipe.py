"""Recipes whose text is graded by itself: by rules on its row, and by the judge where the recipe asks for one."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from qinglan.config import Reward, Tenant
from qinglan.recipes.kinds.recipe import Message, Recipe
from qinglan.rows import Row

if TYPE_CHECKING:
    from qinglan.clients.roles import Role


class AnswerRecipe(Recipe):
    """A question, with whatever else the row brings, becomes an answer."""

    KIND = "answer"
    WEIGHTS: ClassVar[dict[str, float]]
    """Every part of the reward and its weight, 0 for one that is only logged; `judge` is the judge's score / 5.
    `reward.part_weights` may change them."""
    RL_REASONS: ClassVar[frozenset[str | None]] = frozenset({None})
    """RL may ask the questions of rows with one of these: None are those that may teach; add a flaw of the teacher's
    answer where the reward does not depend on that answer."""

    @property
    def graders(self) -> "tuple[Role, ...]":
        """The judge, where `judge_messages` is defined."""
        return () if type(self).judge_messages is AnswerRecipe.judge_messages else ("judge",)

    @abstractmethod
    def parts(self, row: Row, text: str) -> dict[str, float]:
        """The text graded by rule, each part from 0 to 1. Pure; a part without a value for this row is absent."""

    def judge_messages(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:  # noqa: ARG002
        """What the judge is asked about a text; None where it is not asked."""
        return None

    def reward(self, config: Reward, parts: Mapping[str, float]) -> float:
        """The weighted mean of the parts that are known, from [0, 1] to [−1, 1].

        Weights of parts that are not known for a sample (absent or NaN) are shared among the rest. Where none is
        known there is no reward: NaN.
        """
        weights = self.WEIGHTS | config.part_weights
        known = {name: value for name, value in parts.items() if not math.isnan(value) and weights.get(name, 0) > 0}
        if not known:
            return math.nan
        mean = sum(weights[name] * value for name, value in known.items()) / sum(weights[name] for name in known)
        return max(-1.0, min(1.0, 2 * mean - 1))

    def flaw(self, row: Row) -> str | None:
        """Why the teacher's answer must not teach; None where it may."""
        return "bad_format" if (row.parts or {}).get("format", 1.0) < 1 else None

    def metric_values(self, row: Row, text: str, parts: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG002
        """Metrics of one text by name; one without a value is absent. `quality` comes from the judge, not from here."""
        return dict(parts)
