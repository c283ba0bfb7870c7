"""Judging passages: does a passage that was found answer the user's question?

A small model learns it to serve RL. It learns the verdicts that the judge of query rewriting gave
before (`qinglan dataset judge-pairs`), so no model is asked. It sees question and passage alone, as
that judge did: the passage that the teacher's rewrite finds may be wrong. Before its verdict it
writes the terms of a good rewrite, and whether the passage is about each of them.
"""

from qinglan.config import Tenant
from qinglan.errors import ConfigError, TeacherError
from qinglan.recipes import Input, Message, Metric, Recipe, RuleGrader, get_recipe, one_line, prompt
from qinglan.rows import Row

RIGHT = "正确"
WRONG = "错误"
MAIN = (RIGHT, WRONG)
"""The main verdicts."""
HAS = "有"
LACKS = "无"
BEST = 5.0
"""The score of a right passage; the teacher's passage counts as one."""
STUDENT_SYSTEM = (
    "你是{domain}检索质量评审，判断资料讲的是不是用户问的对象和那件事。"
    f"先写规范的检索词，各标资料里{HAS}或{LACKS}，"
    f"再下结论。只输出：词{HAS} 词{LACKS}，{RIGHT} 或 {WRONG}。"
)


def grade_by_rules(row: Row, text: str) -> dict[str, float]:
    """1 where the text's verdict is that of the row's answer, else 0."""
    if not row.target:
        return {}
    return {"main": float(text_after_terms(text) == text_after_terms(row.target))}


class PassageJudge(Recipe):
    """Question and passage in, terms and verdict out."""

    NAME = "passage_judge"
    VERSION = "2"
    INPUTS = (
        Input("candidate", "待评答案", required=True),
        Input("verdict", "人工结论", required=True, identifies=False),
        Input("rewrite", "改写", identifies=False),
    )
    DISTILL_ROLES = ()
    grader = RuleGrader(
        recipe=NAME,
        parts=grade_by_rules,
        weights={"main": 1.0},
        metrics=(Metric("main", "verdict correctness", "结论正确率"),),
    )

    def question_text(self, row: Row) -> str:
        return f"{one_line(row.query)}\n资料：{one_line(row.inputs.get('candidate', ''))}"

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return prompt(STUDENT_SYSTEM.format(domain=tenant.domain), self.question_text(row))

    def own_answer(self, row: Row) -> str | None:
        """The terms of the row's rewrite, each marked, and its verdict.

        A passage that was held right is about all terms, whatever its own words for them are.
        """
        verdict = row.inputs.get("verdict", "")
        passage = row.inputs.get("candidate", "")
        marked_terms = []
        for term in one_line(row.inputs.get("rewrite", "")).split():
            is_covered = verdict == RIGHT or term in passage
            marked_terms.append(term + (HAS if is_covered else LACKS))
        parts = [" ".join(marked_terms), verdict]
        return "，".join(part for part in parts if part)

    def parse_answer(self, text: str) -> str:
        if text_after_terms(text) not in MAIN:
            message = f"the verdict is none of {', '.join(MAIN)}"
            raise TeacherError(message, "verdict_unreadable", said=text[-80:])
        return text.strip()

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
        verdict = text_after_terms(self.parse_answer(text))
        return BEST if verdict == RIGHT else 0.0


def text_after_terms(text: str) -> str:
    """The verdict, which stands after the terms."""
    return text.rpartition("，")[2].strip()


def verdict_recipe(name: str) -> PassageJudge:
    """The recipe of that name; raises ConfigError where its student judges no passages."""
    recipe = get_recipe(name)
    if isinstance(recipe, PassageJudge):
        return recipe
    raise ConfigError(
        f"recipe `{name}`: its student judges no passages; that of passage_judge does"
    )


RECIPE = PassageJudge()
