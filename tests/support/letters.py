"""A recipe for tests: an answer that is made of the letter that the row names."""

from collections.abc import Mapping
from typing import ClassVar

from qinglan.config import Tenant
from qinglan.recipes import AnswerRecipe, Input, Message, Metric
from qinglan.rows import Row


class Letters(AnswerRecipe):
    """A row without a letter has nothing to be measured by but the form."""

    NAME = "letters"
    VERSION = "1"
    INPUTS = (Input("letter", "letter", identifies=False),)
    METRICS = (
        Metric("share", "share of the letter", "字母占比", proportion=False),
        Metric("pure", "pure", "纯度"),
    )
    WEIGHTS: ClassVar[dict[str, float]] = {"share": 0.75, "format": 0.25}

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return [{"role": "user", "content": row.query}]

    def parts(self, row: Row, text: str) -> dict[str, float]:
        letter = row.inputs.get("letter")
        share = {"share": text.count(letter) / max(len(text), 1)} if letter else {}
        return {"format": float("\n" not in text)} | share

    def metric_values(self, row: Row, text: str, parts: Mapping[str, float]) -> dict[str, float]:
        return (
            {"share": parts["share"], "pure": float(parts["share"] == 1)}
            if "share" in parts
            else {}
        )


class JudgedLetters(Letters):
    """The same with a judge, who is asked about no answer that begins with a question mark."""

    WEIGHTS: ClassVar[dict[str, float]] = {"share": 0.5, "format": 0.0, "judge": 0.5}

    def judge_messages(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:
        return (
            None if text.startswith("?") else [{"role": "user", "content": f"{row.query} {text}"}]
        )


RECIPE = Letters()
