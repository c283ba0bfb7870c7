"""A recipe outside the package, for tests: which city is a country's capital, asked with a hint."""

from typing import ClassVar

from qinglan.config import Tenant
from qinglan.errors import TeacherError
from qinglan.recipes import AnswerRecipe, Input, Message, Metric
from qinglan.rows import Row


class Capitals(AnswerRecipe):
    """Graded by the label that the row brings."""

    NAME = "capitals_recipe"
    VERSION = "1"
    INPUTS = (
        Input("hint", "提示", required=True),
        Input("capital", "首都", identifies=False),
        Input("given", "现成回答", identifies=False),
    )
    METRICS = (Metric("right", "right capital", "首都正确"),)
    WEIGHTS: ClassVar[dict[str, float]] = {"right": 0.75, "short": 0.25, "logged": 0.0}

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return [{"role": "user", "content": f"{row.query}（{row.inputs['hint']}）"}]

    def own_answer(self, row: Row) -> str | None:
        """As the workbook has it."""
        return row.inputs.get("given")

    def parse_answer(self, text: str) -> str:
        if not text.split():
            raise TeacherError("the answer is empty", "empty_answer")
        return text.split()[0]

    def parts(self, row: Row, text: str) -> dict[str, float]:
        """`right` where the row is labelled."""
        label = row.inputs.get("capital")
        return {"short": float(len(text) < 5), "logged": 1.0} | (
            {"right": float(text == label)} if label else {}
        )


RECIPE = Capitals()
