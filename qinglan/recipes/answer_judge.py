"""Judging answers: a small model says whether an answer is right and what is wrong with it, with
its reasons.

A weak model (`answerer`) answers the question, a strong reasoning model (the teacher) compares its
answer with the reference. The student learns thoughts and verdict from the strong one and then, by
rules alone, to get verdicts right: a reviewer's where the workbook has one, otherwise the strong
model's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from qinglan.config import Tenant
from qinglan.errors import TeacherError
from qinglan.recipes import (
    AnswerRecipe,
    Finding,
    FindingRow,
    Input,
    Message,
    Metric,
    answered,
    prompt,
)
from qinglan.recipes.kinds.untrusted import (
    CONTRADICTORY,
    DATA_RULE,
    delimited,
    one_line,
    undelimited,
)
from qinglan.recipes.passage_judge import MAIN, RIGHT, WRONG
from qinglan.rows import ArmRow, Row, groups_of
from qinglan.statistics import RESAMPLES, agreement, mean_ci
from qinglan.text import ARMS, Both

if TYPE_CHECKING:
    from qinglan.clients.roles import ChatRole, Clients

FLAWS = ("完整", "不完整", "编造", "矛盾", "含糊", "跑题")
"""The secondary verdict: what is wrong with the answer, if anything is."""
PROBED_ROWS = 200
"""Test rows whose answers are also judged in other forms: three more texts each."""
MAX_ANSWER_CHARS = 2500
"""Longer thoughts don't fit into a training example."""

STUDENT_SYSTEM = (
    "逐条核对待评答案。格式：<think>核对</think><output>主结论，次结论</output>。"
    f"主结论：{RIGHT}、{WRONG}；次结论：{'、'.join(FLAWS)}。"
)
TEACHER_SYSTEM = (
    "你是{domain}领域的答案评审。给出问题、标准答案和待评答案，请对照标准答案逐条核对待评答案："
    "每个要点是提到了、漏了还是说反了，有没有标准答案里没有的内容。措辞和先后次序不同不算错，只有空话不算回答。\n"
    "然后给出主结论和次结论。次结论取最先符合的一项：\n"
    "跑题：没有说到任何要点，说的是别的；含糊：没有说到任何要点，只有空话；矛盾：有要点说反了；"
    "编造：有标准答案里没有的内容；不完整：漏了要点；完整：要点齐全。\n"
    "主结论：完整为正确；不完整，但说到了问题所问的那个要点，也为正确；其余为错误。\n"
    "只输出：<think>核对过程</think><output>主结论，次结论</output>。" + DATA_RULE
)
ANSWERER_SYSTEM = "你是{domain}领域的客服，用一两句话回答用户的问题。"

_OUTPUT = re.compile(rf"<output>\s*({RIGHT}|{WRONG})\s*[，,、]\s*({'|'.join(FLAWS)})\s*</output>")
_THOUGHTS = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_WHOLE = re.compile(
    rf"<think>((?:(?!</?(?:think|output)>).)+)</think>\s*{_OUTPUT.pattern}", re.DOTALL
)
_TAGS = re.compile(r"</?(?:think|output)>")
_CLAUSES = re.compile(r"[^，。；！？\n]+")
COURTESIES = (
    "您好，感谢您的提问，关于这个情况，",
    "以上就是我的回答，希望对您有所帮助，祝您生活愉快。",
)
_UNREADABLE = "?"

PROBES = {
    "order": Both("clauses in reverse", "语序颠倒"),
    "longer": Both("courtesies around it", "加客套话"),
    "paraphrase": Both("reworded", "改述"),
}
"""Forms of an answer that mean the same, by the ending of their ids."""
_INTERVAL = Both("95% from", "95% 下限"), Both("to", "上限")
_AGREE, _DIFFER = Both("all forms agree", "各写法一致"), Both("some differ", "有分歧")


class Verdict(NamedTuple):
    """Empty where not known."""

    main: str
    flaw: str


class AnswerJudge(AnswerRecipe):
    """Reference and answer in, thoughts and verdict out."""

    NAME = "answer_judge"
    VERSION = "2"
    INPUTS = (
        Input("reference", "标准答案", required=True),
        Input("candidate", "待评答案", distilled=True),
        Input("verdict", "人工结论", identifies=False),
        Input("flaw", "人工类别", identifies=False),
        Input("reworded", "待评答案改述", identifies=False),
    )
    METRICS = (
        Metric("main", "main correctness", "主结论正确率"),
        Metric("secondary", "secondary correctness", "次结论正确率"),
        Metric("format", "format correctness", "格式正确率"),
    )
    DISTILL_ROLES = ("answerer", "teacher")
    WEIGHTS: ClassVar[dict[str, float]] = {"main": 0.5, "secondary": 0.3, "format": 0.2}
    RL_REASONS = frozenset({None, "wrong_verdict", "thoughts_too_long"})

    def question_text(self, row: Row) -> str:
        """Question, reference and answer, a line each, so that none can pose as another."""
        return "\n".join(f"{label}：{one_line(text)}" for label, text in _fields(row))

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:  # noqa: ARG002 (the same for all tenants)
        return prompt(STUDENT_SYSTEM, self.question_text(row))

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return prompt(
            TEACHER_SYSTEM.format(domain=tenant.domain),
            delimited("", *_fields(row)),
            tenant.teacher_rules,
        )

    def distill_messages(self, row: Row, tenant: Tenant) -> "Mapping[ChatRole, list[Message]]":
        teacher = self.teacher_messages(row, tenant)
        if "candidate" in row.inputs:
            return {"teacher": teacher}
        answerer = prompt(ANSWERER_SYSTEM.format(domain=tenant.domain), one_line(row.query))
        return {"answerer": answerer, "teacher": teacher}

    async def distill(self, row: Row, clients: "Clients", tenant: Tenant) -> Row:
        """The weak model's answer, where there is none yet, then the strong one's thoughts and
        verdict on it."""
        if "candidate" not in row.inputs:
            if row.inputs.keys() & {"verdict", "flaw"}:
                raise TeacherError(
                    "there is a verdict, but no answer that it is about", "verdict_without_answer"
                )
            said = await clients.answerer.ask(
                self.distill_messages(row, tenant)["answerer"], _non_empty
            )
            row = row.model_copy(update={"inputs": row.inputs | {"candidate": said.value}})
        for name, known in (("verdict", MAIN), ("flaw", FLAWS)):
            if (given := row.inputs.get(name, known[0])) not in known:
                message = f"{name} is none of {', '.join(known)}"
                raise TeacherError(message, "unknown_verdict", said=given[:20])
        answer = await clients.teacher.ask(self.teacher_messages(row, tenant), self.parse_answer)
        return answered(row, with_thoughts(answer.value, answer.reasoning), answer)

    def correction(self, text: str) -> str:
        if not is_well_formed(text):
            raise TeacherError(
                "thoughts and verdict are not written as in the answer", "bad_format"
            )
        return text.strip()

    def parse_answer(self, text: str) -> str:
        if len(verdicts := _verdicts(text)) > 1:
            raise TeacherError(
                "the answer has more than one verdict", CONTRADICTORY, said=text[-80:]
            )
        if not verdicts:
            raise TeacherError("the answer has no verdict", "verdict_unreadable", said=text[-80:])
        return text.strip()

    def parts(self, row: Row, text: str) -> dict[str, float]:
        """An unreadable verdict is a wrong one; the form counts by itself, so a readable one may
        lack it."""
        found, wanted = verdict_in(text), wanted_verdict(row)
        parts = {"format": float(is_well_formed(text))}
        if wanted.main:
            parts["main"] = float(found is not None and found.main == wanted.main)
        if wanted.flaw:
            parts["secondary"] = float(found is not None and found.flaw == wanted.flaw)
        return parts

    def flaw(self, row: Row) -> str | None:
        parts = row.parts or {}
        if parts.get("format", 1.0) < 1:
            return "bad_format"
        if min(parts.get("main", 1.0), parts.get("secondary", 1.0)) < 1:
            return "wrong_verdict"
        return "thoughts_too_long" if len(row.answer or "") > MAX_ANSWER_CHARS else None

    def probes(self, rows: Sequence[Row]) -> list[Row]:
        """The same answers in other forms."""
        probed = sorted(
            (row for row in rows if row.inputs.get("candidate")), key=lambda row: row.id
        )[:PROBED_ROWS]
        return [
            row.model_copy(
                update={"id": f"{row.id}-{kind}", "inputs": row.inputs | {"candidate": text}}
            )
            for row in probed
            for kind, text in forms_of(row.inputs["candidate"], row.inputs.get("reworded")).items()
        ]

    def findings(self, arms: Mapping[str, Sequence[ArmRow]], rows: Sequence[Row]) -> list[Finding]:
        said = {
            name: {
                entry.row_id: _read(entry.text)
                for entry in arm
                if entry.text or entry.reason == "empty_answer"
            }
            for name, arm in arms.items()
        }
        probed = {
            name: main for name, main in said.items() if main.keys() - {row.id for row in rows}
        }
        groups = groups_of(rows)
        found = [
            _agreement(said, rows, groups),
            _robustness(probed, rows, groups),
            _certainty(probed, rows, groups),
        ]
        return [one for one in found if one.rows]


def verdict_in(text: str) -> Verdict | None:
    """The verdict in a text, whatever surrounds it; None where there is none, or where several
    differ."""
    found = _verdicts(text)
    return found.pop() if len(found) == 1 else None


def _verdicts(text: str) -> set[Verdict]:
    """Those outside of the thoughts, which may quote what they are about."""
    return {Verdict(*found) for found in _OUTPUT.findall(_THOUGHTS.sub("", text, count=1))}


def _fields(row: Row) -> tuple[tuple[str, str], ...]:
    reference, candidate = row.inputs.get("reference", ""), row.inputs.get("candidate", "")
    return ("问题", row.query), ("标准答案", reference), ("待评答案", candidate)


def is_well_formed(text: str) -> bool:
    """Thoughts, then a verdict, each once, and nothing else."""
    whole = _WHOLE.fullmatch(text.strip())
    return whole is not None and bool(whole[1].strip())


def wanted_verdict(row: Row) -> Verdict:
    """A reviewer's or the workbook's, else the strong judge's. An unknown word is no verdict."""
    if row.corrected:
        return verdict_in(row.corrected) or Verdict("", "")
    if "verdict" in row.inputs:
        main, flaw = row.inputs["verdict"], row.inputs.get("flaw", "")
        return Verdict(main if main in MAIN else "", flaw if flaw in FLAWS else "")
    return verdict_in(row.answer or "") or Verdict("", "")


def with_thoughts(text: str, reasoning: str | None) -> str:
    """Thoughts and verdict in the student's form; a reasoning model's thoughts come apart from its
    answer."""
    verdict, inside = verdict_in(text), _THOUGHTS.search(text)
    assert verdict is not None
    thoughts = _TAGS.sub("", undelimited(reasoning or (inside[1] if inside else ""))).strip()
    return f"<think>{thoughts}</think><output>{verdict.main}，{verdict.flaw}</output>"


def forms_of(candidate: str, reworded: str | None) -> dict[str, str]:
    clauses, (before, after) = _CLAUSES.findall(candidate), COURTESIES
    found = {"longer": f"{before}{candidate}{after}"}
    if len(clauses) > 1:
        found["order"] = "，".join(reversed(clauses)) + "。"
    return found | ({"paraphrase": reworded} if reworded else {})


def _non_empty(text: str) -> str:
    if not (said := one_line(text).strip()):
        raise TeacherError("the answer that is to be judged is empty", "empty_candidate")
    return said


# ---- what the report shows beside the metrics ----

Verdicts = Mapping[str, Mapping[str, str]]
"""By arm, and by id of a row or of one of its probes: the main verdict."""


def _read(text: str | None) -> str:
    verdict = verdict_in(text or "")
    return verdict.main if verdict else _UNREADABLE


def _agreement(said: Verdicts, rows: Sequence[Row], groups: Mapping[str, str]) -> Finding:
    strong = {row.id: _read(row.answer) for row in rows if row.answer}
    lines = [
        FindingRow(label=_named(name), values=(one.share, one.kappa, *(one.ci95 or (None, None))))
        for name, main in said.items()
        if name != "teacher" and (one := agreement(main, strong, groups))
    ]
    return Finding(
        title=Both("Agreement with the strong judge on the main verdict", "主结论与强评审的一致性"),
        columns=(Both("agree", "一致率"), Both("Cohen's κ", "Cohen's κ"), *_INTERVAL),
        rows=tuple(lines),
    )


def _robustness(said: Verdicts, rows: Sequence[Row], groups: Mapping[str, str]) -> Finding:
    lines = []
    for name, main in said.items():
        for kind, words in PROBES.items():
            forms = {
                row.id: main[key]
                for row in rows
                if row.id in main and (key := f"{row.id}-{kind}") in main
            }
            changed = {row_id: float(form != main[row_id]) for row_id, form in forms.items()}
            before = _right({row_id: main[row_id] for row_id in forms}, rows)
            means = [
                mean_ci(right, groups, RESAMPLES).mean for right in (before, _right(forms, rows))
            ]
            lines.append(
                FindingRow(label=_named(name, words), values=(*_mean(changed, groups), *means))
            )
    return Finding(
        title=Both("Robustness: the same answer in another form", "稳健性：同一答案换个写法"),
        columns=(
            Both("main verdict changes", "主结论改变"),
            *_INTERVAL,
            Both("right before", "原写法正确率"),
            Both("right after", "换写法后正确率"),
        ),
        rows=tuple(lines),
    )


def _certainty(said: Verdicts, rows: Sequence[Row], groups: Mapping[str, str]) -> Finding:
    """Does the judge give all forms of an answer the same verdict? A greedy verdict comes without a
    probability."""
    lines = []
    for name, main in said.items():
        sure: dict[bool, dict[str, float]] = {True: {}, False: {}}
        for row_id, right in _right(main, rows).items():
            if forms := [main[key] for kind in PROBES if (key := f"{row_id}-{kind}") in main]:
                sure[all(form == main[row_id] for form in forms)][row_id] = right
        asked = len(sure[True]) + len(sure[False])
        for level, words in ((True, _AGREE), (False, _DIFFER)):
            share = len(sure[level]) / asked if asked else None
            lines.append(
                FindingRow(label=_named(name, words), values=(share, *_mean(sure[level], groups)))
            )
    return Finding(
        title=Both(
            "Certainty: main verdicts on which all forms of an answer agree",
            "可信度：各写法结论是否一致",
        ),
        columns=(
            Both("share of answers", "占比"),
            Both("main verdict right", "主结论正确率"),
            *_INTERVAL,
        ),
        rows=tuple(lines),
    )


def _right(main: Mapping[str, str], rows: Sequence[Row]) -> dict[str, float]:
    return {
        row.id: float(main[row.id] == wanted)
        for row in rows
        if row.id in main and (wanted := wanted_verdict(row).main)
    }


def _mean(
    values: Mapping[str, float], groups: Mapping[str, str]
) -> tuple[float | None, float | None, float | None]:
    found = mean_ci(values, groups, RESAMPLES)
    low, high = found.ci95 or (None, None)
    return found.mean, low, high


def _named(arm: str, kind: Both | None = None) -> Both:
    name = ARMS.get(arm, Both(arm, arm))
    return Both(f"{name.en}: {kind.en}", f"{name.zh}：{kind.zh}") if kind else name


RECIPE = AnswerJudge()
