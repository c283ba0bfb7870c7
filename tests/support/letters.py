"""A recipe for tests: an answer that is made of the letter that the row names."""

from collections.abc import Mapping
from dataclasses import replace

from qinglan.config import Tenant
from qinglan.recipes import Input, Message, Metric, Recipe, RuleGrader
from qinglan.rows import Row


def grade_by_rules(row: Row, text: str) -> dict[str, float]:
    """A row without a letter has nothing to be graded by but the form."""
    parts = {"format": float("\n" not in text)}
    letter = row.inputs.get("letter")
    if letter:
        parts["share"] = text.count(letter) / max(len(text), 1)
    return parts


def text_metrics(row: Row, text: str, parts: Mapping[str, float]) -> dict[str, float]:
    if "share" not in parts:
        return {}
    return {"share": parts["share"], "pure": float(parts["share"] == 1)}


def judge_messages(row: Row, text: str, tenant: Tenant) -> list[Message] | None:
    if text.startswith("?"):
        return None
    return [{"role": "user", "content": f"{row.query} {text}"}]


GRADER = RuleGrader(
    recipe="letters",
    parts=grade_by_rules,
    weights={"share": 0.75, "format": 0.25},
    metrics=(
        Metric("share", "share of the letter", "字母占比", proportion=False),
        Metric("pure", "pure", "纯度"),
    ),
    text_metrics=text_metrics,
)
JUDGED_GRADER = replace(
    GRADER,
    weights={"share": 0.5, "format": 0.0, "judge": 0.5},
    judge_messages=judge_messages,
)
"""The same with a judge, who is asked about no answer that begins with a question mark."""


class Letters(Recipe):
    NAME = "letters"
    VERSION = "1"
    INPUTS = (Input("letter", "letter", identifies=False),)
    grader = GRADER

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return [{"role": "user", "content": row.query}]


class JudgedLetters(Letters):
    grader = JUDGED_GRADER


RECIPE = Letters()
