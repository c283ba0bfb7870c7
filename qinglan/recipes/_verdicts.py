"""Recipes whose student judges: what RL asks of the recipe where such a student serves as its judge.

A passage that a text found is compared with a reference: the passage that the teacher's rewrite found. It is the only
reference that every question has without a label; where a label says that it is the wrong one, there is none.
"""

from abc import abstractmethod

from qinglan.config import Tenant
from qinglan.errors import ConfigError
from qinglan.recipes import AnswerRecipe, Message, get_recipe
from qinglan.rows import Retrieved, Row

BEST = 5.0
"""What a text is worth that is the reference itself; the judge is not asked."""
RIGHT_FROM = 3.0
"""A right main verdict is worth this at least."""


class VerdictRecipe(AnswerRecipe):
    sees_reference = True  # the teacher's passage, beside the one to judge

    def verdict_messages(self, question: str, reference: str, candidate: str, tenant: Tenant) -> list[Message]:
        """The student's prompt about texts that come from no workbook, such as passages."""
        inputs = {"reference": reference, "candidate": candidate}
        row = Row(id="", tenant=tenant.id, query=question, inputs=inputs, source="pipeline")
        return self.student_messages(row, tenant)

    @abstractmethod
    def verdict_score(self, text: str) -> float:
        """0–5, from `RIGHT_FROM` where the main verdict is right; raises TeacherError where the text holds none."""


def verdict_recipe(name: str) -> VerdictRecipe:
    if isinstance(recipe := get_recipe(name), VerdictRecipe):
        return recipe
    raise ConfigError(f"recipe `{name}`: its student gives no verdicts; those of answer_judge and passage_judge do")


def reference_of(judge: VerdictRecipe, found: Retrieved, gold_id: str | None, *, use_labels: bool) -> str | None:
    """The teacher's best passage; None where there is none or a label refuses it; empty for a judge that sees none."""
    refused = use_labels and bool(gold_id) and found.rank(gold_id) != 1
    return (None if refused else found.first_passage or None) if judge.sees_reference else ""
