"""Judging answers: a small model says whether an answer is right and what is wrong with it.

A weak model (`answerer`) answers the question, a strong reasoning model (the teacher) compares its
answer with the reference. The student learns thoughts and verdict from the strong one and then, by
rules alone, to get verdicts right: a reviewer's where the workbook has one, otherwise the strong
model's.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from qinglan.config import Tenant
from qinglan.errors import TeacherError
from qinglan.grading.failures import EMPTY_ANSWER
from qinglan.grading.judge_answers import CONTRADICTORY
from qinglan.recipes import (
    Finding,
    FindingRow,
    Input,
    Message,
    Metric,
    Recipe,
    RuleGrader,
    bad_format,
    prompt,
)
from qinglan.recipes.passage_judge import MAIN, RIGHT, WRONG
from qinglan.recipes.prompting import DATA_RULE, delimited, one_line, undelimited
from qinglan.rows import ArmRow, Row, groups_of
from qinglan.statistics import RESAMPLES, agreement, mean_ci
from qinglan.text import ARMS, Both

if TYPE_CHECKING:
    from qinglan.clients.roles import ChatRole, Clients

FLAWS = ("完整", "不完整", "编造", "矛盾", "含糊", "跑题")
"""The secondary verdicts: what is wrong with the answer, if anything is."""
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
_INTERVAL = (Both("95% from", "95% 下限"), Both("to", "上限"))
_FORMS_AGREE = Both("all forms agree", "各写法一致")
_FORMS_DIFFER = Both("some differ", "有分歧")


class Verdict(NamedTuple):
    """A verdict on an answer; a part is empty where it is not known."""

    main: str
    flaw: str


NO_VERDICT = Verdict("", "")


# ---- prompts ----


def question_of(row: Row) -> str:
    """Question, reference and answer, a line each, so that none can pose as another."""
    lines = [f"{label}：{one_line(text)}" for label, text in _labelled_texts(row)]
    return "\n".join(lines)


def _labelled_texts(row: Row) -> tuple[tuple[str, str], ...]:
    return (
        ("问题", row.query),
        ("标准答案", row.inputs.get("reference", "")),
        ("待评答案", row.inputs.get("candidate", "")),
    )


# ---- reading verdicts ----


def verdict_in(text: str) -> Verdict | None:
    """The verdict in a text, whatever surrounds it; None where there is none, or several differ."""
    verdicts = _verdicts_outside_thoughts(text)
    return verdicts.pop() if len(verdicts) == 1 else None


def _verdicts_outside_thoughts(text: str) -> set[Verdict]:
    """The distinct verdicts in a text; its thoughts may quote the answer that they are about."""
    conclusion = _THOUGHTS.sub("", text, count=1)
    return {Verdict(main, flaw) for main, flaw in _OUTPUT.findall(conclusion)}


def is_well_formed(text: str) -> bool:
    """Thoughts, then a verdict, each once, and nothing else."""
    whole = _WHOLE.fullmatch(text.strip())
    return whole is not None and bool(whole[1].strip())


def wanted_verdict(row: Row) -> Verdict:
    """The right verdict: a reviewer's or the workbook's, else the strong judge's.

    An unknown word is no verdict.
    """
    if row.corrected:
        return verdict_in(row.corrected) or NO_VERDICT
    if "verdict" in row.inputs:
        main = row.inputs["verdict"]
        flaw = row.inputs.get("flaw", "")
        return Verdict(main if main in MAIN else "", flaw if flaw in FLAWS else "")
    return verdict_in(row.answer or "") or NO_VERDICT


def with_thoughts(text: str, reasoning: str | None) -> str:
    """Thoughts and verdict in the student's form.

    A reasoning model's thoughts come apart from its answer.
    """
    verdict = verdict_in(text)
    assert verdict is not None, "parse_answer refuses an answer without a verdict"
    thoughts_in_answer = _THOUGHTS.search(text)
    thoughts = reasoning or ""
    if not thoughts and thoughts_in_answer:
        thoughts = thoughts_in_answer[1]
    plain_thoughts = _TAGS.sub("", undelimited(thoughts)).strip()
    return f"<think>{plain_thoughts}</think><output>{verdict.main}，{verdict.flaw}</output>"


def _candidate_of(text: str) -> str:
    """The weak model's answer on one line; raises TeacherError where it is empty."""
    answer = one_line(text).strip()
    if not answer:
        raise TeacherError("the answer that is to be judged is empty", "empty_candidate")
    return answer


def _require_known_verdict(row: Row) -> None:
    """Raise TeacherError where the workbook's verdict or flaw is none of the known words."""
    for name, words in (("verdict", MAIN), ("flaw", FLAWS)):
        word = row.inputs.get(name)
        if word is not None and word not in words:
            message = f"{name} is none of {', '.join(words)}"
            raise TeacherError(message, "unknown_verdict", said=word[:20])


# ---- grading ----


def grade_by_rules(row: Row, text: str) -> dict[str, float]:
    """Format and verdict of a text.

    An unreadable verdict is a wrong one; the form counts by itself, so a readable one may lack it.
    """
    verdict = verdict_in(text)
    right_verdict = wanted_verdict(row)
    parts = {"format": float(is_well_formed(text))}
    if right_verdict.main:
        parts["main"] = float(verdict is not None and verdict.main == right_verdict.main)
    if right_verdict.flaw:
        parts["secondary"] = float(verdict is not None and verdict.flaw == right_verdict.flaw)
    return parts


def flaw_of(row: Row) -> str | None:
    """Why the teacher's thoughts and verdict must not teach; None where they may."""
    flaw = bad_format(row)
    if flaw:
        return flaw
    parts = row.parts or {}
    if min(parts.get("main", 1.0), parts.get("secondary", 1.0)) < 1:
        return "wrong_verdict"
    if len(row.answer or "") > MAX_ANSWER_CHARS:
        return "thoughts_too_long"
    return None


class AnswerJudge(Recipe):
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
    DISTILL_ROLES = ("answerer", "teacher")
    grader = RuleGrader(
        recipe=NAME,
        parts=grade_by_rules,
        weights={"main": 0.5, "secondary": 0.3, "format": 0.2},
        metrics=(
            Metric("main", "main correctness", "主结论正确率"),
            Metric("secondary", "secondary correctness", "次结论正确率"),
            Metric("format", "format correctness", "格式正确率"),
        ),
        flaw=flaw_of,
        rl_reasons=frozenset({None, "wrong_verdict", "thoughts_too_long"}),
    )

    def question_text(self, row: Row) -> str:
        return question_of(row)

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:  # noqa: ARG002
        return prompt(STUDENT_SYSTEM, question_of(row))

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        system = TEACHER_SYSTEM.format(domain=tenant.domain)
        return prompt(system, delimited("", *_labelled_texts(row)), tenant.teacher_rules)

    def distill_messages(self, row: Row, tenant: Tenant) -> "Mapping[ChatRole, list[Message]]":
        teacher_messages = self.teacher_messages(row, tenant)
        if "candidate" in row.inputs:
            return {"teacher": teacher_messages}
        return {
            "answerer": self._answerer_messages(row, tenant),
            "teacher": teacher_messages,
        }

    async def distill(self, row: Row, clients: "Clients", tenant: Tenant) -> Row:
        """The weak model's answer, where there is none yet, then the strong one's thoughts and
        verdict on it."""
        if "candidate" not in row.inputs:
            if row.inputs.keys() & {"verdict", "flaw"}:
                message = "there is a verdict, but no answer that it is about"
                raise TeacherError(message, "verdict_without_answer")
            messages = self._answerer_messages(row, tenant)
            candidate = await clients.answerer.ask(messages, _candidate_of)
            row = row.with_inputs({**row.inputs, "candidate": candidate.value})
        _require_known_verdict(row)
        answer = await clients.teacher.ask(self.teacher_messages(row, tenant), self.parse_answer)
        return row.with_answer(
            with_thoughts(answer.value, answer.reasoning),
            request=answer.request_hash,
            latency_ms=answer.latency_ms,
            cost_usd=answer.cost_usd,
        )

    def correction(self, text: str) -> str:
        if not is_well_formed(text):
            message = "thoughts and verdict are not written as in the answer"
            raise TeacherError(message, "bad_format")
        return text.strip()

    def parse_answer(self, text: str) -> str:
        verdicts = _verdicts_outside_thoughts(text)
        if len(verdicts) > 1:
            message = "the answer has more than one verdict"
            raise TeacherError(message, CONTRADICTORY, said=text[-80:])
        if not verdicts:
            raise TeacherError("the answer has no verdict", "verdict_unreadable", said=text[-80:])
        return text.strip()

    def probes(self, rows: Sequence[Row]) -> list[Row]:
        """The same answers in other forms."""
        rows_with_answer = [row for row in rows if row.inputs.get("candidate")]
        rows_with_answer.sort(key=lambda row: row.id)
        probes: list[Row] = []
        for row in rows_with_answer[:PROBED_ROWS]:
            forms = forms_of(row.inputs["candidate"], row.inputs.get("reworded"))
            for kind, text in forms.items():
                probe = row.with_id(f"{row.id}-{kind}")
                probes.append(probe.with_inputs({**row.inputs, "candidate": text}))
        return probes

    def findings(self, arms: Mapping[str, Sequence[ArmRow]], rows: Sequence[Row]) -> list[Finding]:
        verdicts = {name: _main_verdicts(arm) for name, arm in arms.items()}
        row_ids = {row.id for row in rows}
        # Only the students are asked the probes; other arms say nothing about robustness.
        probed_verdicts = {
            name: verdicts_of_arm
            for name, verdicts_of_arm in verdicts.items()
            if verdicts_of_arm.keys() - row_ids
        }
        groups = groups_of(rows)
        findings = [
            _agreement(verdicts, rows, groups),
            _robustness(probed_verdicts, rows, groups),
            _certainty(probed_verdicts, rows, groups),
        ]
        return [finding for finding in findings if finding.rows]

    def _answerer_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        return prompt(ANSWERER_SYSTEM.format(domain=tenant.domain), one_line(row.query))


def forms_of(candidate: str, reworded: str | None) -> dict[str, str]:
    """Texts that mean the same as an answer, by their kind in `PROBES`."""
    before, after = COURTESIES
    forms = {"longer": f"{before}{candidate}{after}"}
    clauses = _CLAUSES.findall(candidate)
    if len(clauses) > 1:
        forms["order"] = "，".join(reversed(clauses)) + "。"
    if reworded:
        forms["paraphrase"] = reworded
    return forms


# ---- what the report shows beside the metrics ----

Verdicts = Mapping[str, Mapping[str, str]]
"""The main verdict by arm, and by id of a row or of one of its probes."""


def _main_verdicts(arm: Sequence[ArmRow]) -> dict[str, str]:
    """The arm's main verdicts; an empty text has an unreadable one, a failed call none."""
    return {
        entry.row_id: _main_verdict(entry.text)
        for entry in arm
        if entry.text or entry.reason == EMPTY_ANSWER
    }


def _main_verdict(text: str | None) -> str:
    verdict = verdict_in(text or "")
    return verdict.main if verdict else _UNREADABLE


def _agreement(verdicts: Verdicts, rows: Sequence[Row], groups: Mapping[str, str]) -> Finding:
    strong_verdicts = {row.id: _main_verdict(row.answer) for row in rows if row.answer}
    lines = []
    for arm_name, arm_verdicts in verdicts.items():
        if arm_name == "teacher":
            continue
        agreed = agreement(arm_verdicts, strong_verdicts, groups)
        if agreed:
            low, high = agreed.ci95 or (None, None)
            values = (agreed.share, agreed.kappa, low, high)
            lines.append(FindingRow(label=_label(arm_name), values=values))
    return Finding(
        title=Both("Agreement with the strong judge on the main verdict", "主结论与强评审的一致性"),
        columns=(Both("agree", "一致率"), Both("Cohen's κ", "Cohen's κ"), *_INTERVAL),
        rows=tuple(lines),
    )


def _robustness(verdicts: Verdicts, rows: Sequence[Row], groups: Mapping[str, str]) -> Finding:
    lines = []
    for arm_name, arm_verdicts in verdicts.items():
        for kind, words in PROBES.items():
            changed: dict[str, float] = {}
            verdicts_before: dict[str, str] = {}
            verdicts_after: dict[str, str] = {}
            for row in rows:
                probe_id = f"{row.id}-{kind}"
                if row.id in arm_verdicts and probe_id in arm_verdicts:
                    verdicts_before[row.id] = arm_verdicts[row.id]
                    verdicts_after[row.id] = arm_verdicts[probe_id]
                    is_changed = arm_verdicts[probe_id] != arm_verdicts[row.id]
                    changed[row.id] = float(is_changed)
            right_before = mean_ci(_right(verdicts_before, rows), groups, RESAMPLES).mean
            right_after = mean_ci(_right(verdicts_after, rows), groups, RESAMPLES).mean
            values = (*_mean_and_interval(changed, groups), right_before, right_after)
            lines.append(FindingRow(label=_label(arm_name, words), values=values))
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


def _certainty(verdicts: Verdicts, rows: Sequence[Row], groups: Mapping[str, str]) -> Finding:
    """The share of answers of whose forms the judge gives one verdict, and how often it is right.

    A greedy verdict comes without a probability, so that agreement stands in for certainty.
    """
    lines = []
    for arm_name, arm_verdicts in verdicts.items():
        right_where_forms_agree: dict[str, float] = {}
        right_where_forms_differ: dict[str, float] = {}
        for row_id, right in _right(arm_verdicts, rows).items():
            probe_ids = [f"{row_id}-{kind}" for kind in PROBES]
            forms = [arm_verdicts[probe_id] for probe_id in probe_ids if probe_id in arm_verdicts]
            if not forms:
                continue
            if all(form == arm_verdicts[row_id] for form in forms):
                right_where_forms_agree[row_id] = right
            else:
                right_where_forms_differ[row_id] = right
        probed = len(right_where_forms_agree) + len(right_where_forms_differ)
        for words, right_by_row in (
            (_FORMS_AGREE, right_where_forms_agree),
            (_FORMS_DIFFER, right_where_forms_differ),
        ):
            share = len(right_by_row) / probed if probed else None
            values = (share, *_mean_and_interval(right_by_row, groups))
            lines.append(FindingRow(label=_label(arm_name, words), values=values))
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


def _right(main_verdicts: Mapping[str, str], rows: Sequence[Row]) -> dict[str, float]:
    """1 for each row whose verdict is the wanted one, else 0; rows without either are absent."""
    right: dict[str, float] = {}
    for row in rows:
        right_verdict = wanted_verdict(row).main
        if row.id in main_verdicts and right_verdict:
            right[row.id] = float(main_verdicts[row.id] == right_verdict)
    return right


def _mean_and_interval(
    values: Mapping[str, float], groups: Mapping[str, str]
) -> tuple[float | None, float | None, float | None]:
    estimate = mean_ci(values, groups, RESAMPLES)
    low, high = estimate.ci95 or (None, None)
    return estimate.mean, low, high


def _label(arm: str, kind: Both | None = None) -> Both:
    name = ARMS.get(arm, Both(arm, arm))
    if kind is None:
        return name
    return Both(f"{name.en}: {kind.en}", f"{name.zh}：{kind.zh}")


RECIPE = AnswerJudge()
