"""Judging passages: does a passage that was found answer the user's question? A small model learns
it to serve RL.

It learns the verdicts that the judge of query rewriting gave before (`qinglan dataset
judge-pairs`), so no model is asked. It sees question and passage alone, as that judge did: the
passage that the teacher's rewrite finds may be wrong. Before its verdict it writes the terms of a
good rewrite, and whether the passage is about each of them.
"""

from typing import ClassVar

from qinglan.config import Tenant
from qinglan.errors import ConfigError, TeacherError
from qinglan.recipes import AnswerRecipe, Input, Message, Metric, get_recipe, one_line, prompt
from qinglan.rows import Row

MAIN = RIGHT, WRONG = "正确", "错误"
HAS, LACKS = "有", "无"
BEST = 5.0  # what a right passage is worth; the teacher's counts as one
STUDENT_SYSTEM = (
    f"你是{{domain}}检索质量评审，判断资料讲的是不是用户问的对象和那件事。先写规范的检索词，各标资料里{HAS}或{LACKS}，"
    f"再下结论。只输出：词{HAS} 词{LACKS}，{RIGHT} 或 {WRONG}。"
)


class PassageJudge(AnswerRecipe):
    NAME = "passage_judge"
    VERSION = "2"
    INPUTS = (
        Input("candidate", "待评答案", required=True),
        Input("verdict", "人工结论", required=True, identifies=False),
        Input("rewrite", "改写", identifies=False),
    )
    METRICS = (Metric("main", "verdict correctness", "结论正确率"),)
    DISTILL_ROLES = ()
    WEIGHTS: ClassVar[dict[str, float]] = {"main": 1.0}

    def question_text(self, row: Row) -> str:
        return f"{one_line(row.query)}\n资料：{one_line(row.inputs.get('candidate', ''))}"

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return prompt(STUDENT_SYSTEM.format(domain=tenant.domain), self.question_text(row))

    def own_answer(self, row: Row) -> str | None:
        """A passage that was held right is about all terms, whatever its own words for them are."""
        verdict, passage = row.inputs.get("verdict", ""), row.inputs.get("candidate", "")
        terms = one_line(row.inputs.get("rewrite", "")).split()
        marked = (term + (HAS if verdict == RIGHT or term in passage else LACKS) for term in terms)
        return "，".join(part for part in (" ".join(marked), verdict) if part)

    def parse_answer(self, text: str) -> str:
        if text_after_terms(text) not in MAIN:
            raise TeacherError(
                f"the verdict is none of {', '.join(MAIN)}", "verdict_unreadable", said=text[-80:]
            )
        return text.strip()

    def parts(self, row: Row, text: str) -> dict[str, float]:
        return (
            {"main": float(text_after_terms(text) == text_after_terms(row.target))}
            if row.target
            else {}
        )

    def verdict_messages(self, question: str, passage: str, tenant: Tenant) -> list[Message]:
        """The student's prompt about a passage that comes from no workbook."""
        row = Row(
            id="",
            tenant=tenant.id,
            query=question,
            inputs={"candidate": passage},
            source="pipeline",
        )
        return self.student_messages(row, tenant)

    def verdict_score(self, text: str) -> float:
        """`BEST` or 0; raises TeacherError where the text holds no verdict."""
        return BEST if text_after_terms(self.parse_answer(text)) == RIGHT else 0.0


def text_after_terms(text: str) -> str:
    """What stands after the terms."""
    return text.rpartition("，")[2].strip()


def verdict_recipe(name: str) -> PassageJudge:
    if isinstance(recipe := get_recipe(name), PassageJudge):
        return recipe
    raise ConfigError(
        f"recipe `{name}`: its student judges no passages; that of passage_judge does"
    )


RECIPE = PassageJudge()
