"""Recipes whose student judges passages: what RL asks of the recipe where such a student serves as its judge."""

from abc import abstractmethod

from qinglan.config import Tenant
from qinglan.errors import ConfigError
from qinglan.recipes import AnswerRecipe, Message, get_recipe
from qinglan.rows import Row

BEST = 5.0
"""What a passage is worth that is right; the teacher's counts as one."""


class VerdictRecipe(AnswerRecipe):
    def verdict_messages(self, question: str, passage: str, tenant: Tenant) -> list[Message]:
        """The student's prompt about a passage that comes from no workbook."""
        row = Row(id="", tenant=tenant.id, query=question, inputs={"candidate": passage}, source="pipeline")
        return self.student_messages(row, tenant)

    @abstractmethod
    def verdict_score(self, text: str) -> float:
        """`BEST` or 0; raises TeacherError where the text holds no verdict."""


def verdict_recipe(name: str) -> VerdictRecipe:
    if isinstance(recipe := get_recipe(name), VerdictRecipe):
        return recipe
    raise ConfigError(f"recipe `{name}`: its student judges no passages; that of passage_judge does")
