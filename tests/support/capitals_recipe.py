"""A recipe outside the package, for tests: which city is a country's capital, asked with a hint."""

from qinglan.config import Tenant
from qinglan.errors import TeacherError
from qinglan.recipes import Input, Message, Metric, Recipe, RuleGrader
from qinglan.rows import Row


def grade_by_rules(row: Row, text: str) -> dict[str, float]:
    """`right` where the row is labelled."""
    parts = {"short": float(len(text) < 5), "logged": 1.0}
    label = row.inputs.get("capital")
    if label:
        parts["right"] = float(text == label)
    return parts


class Capitals(Recipe):
    """Graded by the label that the row brings."""

    NAME = "capitals_recipe"
    VERSION = "1"
    INPUTS = (
        Input("hint", "提示", required=True),
        Input("capital", "首都", identifies=False),
        Input("given", "现成回答", identifies=False),
    )
    grader = RuleGrader(
        recipe=NAME,
        parts=grade_by_rules,
        weights={"right": 0.75, "short": 0.25, "logged": 0.0},
        metrics=(Metric("right", "right capital", "首都正确"),),
    )

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return [{"role": "user", "content": f"{row.query}（{row.inputs['hint']}）"}]

    def own_answer(self, row: Row) -> str | None:
        """The answer that the workbook has."""
        return row.inputs.get("given")

    def parse_answer(self, text: str) -> str:
        words = text.split()
        if not words:
            raise TeacherError("the answer is empty", "empty_answer")
        return words[0]


RECIPE = Capitals()
