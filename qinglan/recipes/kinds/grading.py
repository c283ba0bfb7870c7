"""Grading: how a text meets the world. What the stages ask of a recipe's kind, in one place for each kind.

A text of a `RetrievalRecipe` is retrieved with (`grading.retrieval`), one of an `AnswerRecipe` is graded by rules on
its row and by the judge (`grading.answers`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from qinglan.clients.row_batches import Work
from qinglan.config import Profile, Reward, Select, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.answer.grading import AnswerGrading
from qinglan.recipes.kinds.answer.recipe import AnswerRecipe
from qinglan.recipes.kinds.common import Measured, PrimaryMetric
from qinglan.recipes.kinds.recipe import Recipe
from qinglan.recipes.kinds.retrieval.grading import RetrievalGrading
from qinglan.recipes.kinds.retrieval.recipe import RetrievalRecipe
from qinglan.rows import Row

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients, Role
    from qinglan.recipes.scoring.scorer import Scorer
    from qinglan.recipes.scoring.service import RewardService
    from qinglan.rows import ArmRow

__all__ = ["AnswerGrading", "Findings", "Grading", "Measured", "RetrievalGrading", "grading_of"]


class Findings(Protocol):
    """What validation found, row by row, in memory that does not grow with the rows."""

    def add(self, row: Row) -> None:
        """Count a row, in any order."""

    def metrics(self) -> dict[str, float]:
        """Figures by name; nothing where no row was graded."""

    def shown(self) -> dict[str, float]:
        """Those that are worth a line in the log."""

    def check(self) -> None:
        """Notice what is wrong with the service or the rules.

        Raises:
            StageError: nothing that follows could be trusted.
        """

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        """What the report draws, as JSON: by plot, its outlines with `label`, `low`, `high`, `counts`."""


class Grading(Protocol):
    """What the stages know of a kind of recipe."""

    @property
    def rl_schema(self) -> pa.Schema:
        """Of the RL files."""

    @property
    def score_parts(self) -> tuple[str, ...]:
        """Names of what an RL sample's score is made of, beside `score` itself; the same for every sample."""

    @property
    def reported_parts(self) -> tuple[str, ...]:
        """Those whose curves are summed up with the training's."""

    @property
    def hint(self) -> str:
        """What to do where too few rows may teach."""

    def check(self, profile: Profile) -> None:
        """Do the profile's settings fit the recipe?

        Raises:
            ConfigError: one names something that the recipe has not.
        """

    def validation_roles(self, profile: Profile) -> "tuple[Role, ...]":
        """The services that validation asks."""

    def validator(self, clients: "Clients", tenant: Tenant, *, judge: bool) -> Work:
        """Validation's work on one row; `judge`: the judge's score too, where the recipe has one."""

    def findings(self) -> Findings:
        """An empty one."""

    def select(self, rows: Iterable[Row], config: Select) -> Iterator[Row]:
        """Fail the rows whose answer must not become an SFT target; a person's verdict outranks the rules."""

    def has_baseline(self, row: Row) -> bool:
        """May RL ask this row's question?"""

    def rl_record(self, row: Row, tenant: Tenant) -> dict[str, Any]:
        """A row that has a baseline, in `rl_schema`."""

    def dev_metric(self, config: Reward, infos: Iterable[Mapping[str, Any]]) -> str:
        """Which part of the score, averaged over the dev split, chooses the model.

        Args:
            infos: the dev rows' `extra_info`.
        """

    def primary_metric(self) -> PrimaryMetric:
        """The part that tells how good the policy is whatever it is rewarded for."""

    def scorer(self, service: "RewardService") -> "Scorer[Any]":
        """What scores RL samples, in the reward service's process.

        Raises:
            ConfigError: a key is not set here.
            LedgerError: the ledger can't be opened.
        """

    def baseline_arms(
        self, rows: Sequence[Row], profile: Profile, *, afresh: bool = False
    ) -> "dict[str, list[ArmRow]]":
        """The arms that need no model of ours, as validation found them.

        Args:
            afresh: without what a live service said then, maybe days ago: all arms are to ask the service of today.
        """

    async def measure(
        self,
        arms: "Mapping[str, Sequence[ArmRow]]",
        rows: Sequence[Row],
        clients: "Clients",
        profile: Profile,
    ) -> Measured:
        """Fill in what the arms' texts are worth.

        Raises:
            StageError: too many calls failed for a fair comparison.
        """

    def measuring_identity(self, tenant: Tenant) -> str:
        """Changes with what `measure` asks."""


def grading_of(recipe: Recipe) -> Grading:
    """How this recipe's texts are graded.

    Raises:
        ConfigError: it is of no known kind, or its parts can't be told from other figures.
    """
    if isinstance(recipe, AnswerRecipe):
        return AnswerGrading(recipe)
    if isinstance(recipe, RetrievalRecipe):
        return RetrievalGrading(recipe)
    raise ConfigError(f"recipe `{recipe.NAME}`: derive its class from RetrievalRecipe or AnswerRecipe")


def open_scorer(service: "RewardService") -> "Scorer[Any]":
    """The scorer for the service's recipe.

    Raises:
        ConfigError: the recipe can't be used, or a key is not set here.
        LedgerError: the ledger can't be opened.
    """
    return grading_of(get_recipe(service.recipe)).scorer(service)
