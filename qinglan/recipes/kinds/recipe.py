"""What every recipe offers, and what recipes are made of: inputs, metrics, findings, messages."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel

from qinglan.config import Tenant
from qinglan.errors import TeacherError
from qinglan.rows import Row
from qinglan.text import Both

if TYPE_CHECKING:
    from qinglan.clients.chat import Answer
    from qinglan.clients.roles import ChatRole, Clients, Role
    from qinglan.rows import ArmRow

Message = dict[str, str]

SCORE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"score": {"type": "number"}, "reason": {"type": "string"}},
    "required": ["score", "reason"],
    "additionalProperties": False,
}
"""JSON schema of a judge's answer that `parse_score` reads, for models that can be held to one."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_JSON_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


@dataclass(frozen=True)
class Input:
    """A further column of the workbook."""

    name: str
    """Key in `Row.inputs` and in `data.columns.inputs`."""
    column: str
    """The column's head, where the profile names no other."""
    required: bool = False
    """Without the column the workbook is refused; a row whose cell is empty fails (`empty_input`)."""
    identifies: bool = True
    """It is part of what is asked, so of the row's id; False for labels and answers that the row brings."""
    distilled: bool = False
    """A row may lack it, as `distill` gets it; the student can't be asked without it."""

    @property
    def is_asked(self) -> bool:
        """The student can't be asked without it."""
        return self.identifies and (self.required or self.distilled)


@dataclass(frozen=True)
class Metric:
    """A figure of one row's text. `quality` is the judge's score, 0–5, in every recipe; the gate has a rule for it.

    `en` and `zh` are nouns, which sentences use: `RL student 0.91 vs SFT student 0.84 keyword coverage`.
    """

    name: str
    en: str
    zh: str
    maximum: float = 1.0
    """Of its scale, which begins at 0: 5 for a judge's score."""
    proportion: bool = True
    """Of one row it is 0 or 1: McNemar's test applies, and the report's short table shows it."""
    digits: int = 3
    interval: bool = True
    """An arm's mean is shown with one. Only such metrics are shown by slice, and decide which teacher to buy."""
    compared: bool = True
    """Between arms."""
    headline: bool = True
    """False: the report's headline is about it only where no later metric has values."""


class FindingRow(BaseModel):
    """A line of a finding."""

    label: Both
    values: tuple[float | None, ...]
    """As many as the finding has columns; None where there is no value."""


class Finding(BaseModel):
    """A table that a recipe adds to the report."""

    title: Both
    columns: tuple[Both, ...]
    """Heads of the numbers; the labels' column has none."""
    rows: tuple[FindingRow, ...]
    digits: int = 3


class Recipe(ABC):
    """What both kinds of recipe offer."""

    NAME: ClassVar[str]
    """As the file is called."""
    VERSION: ClassVar[str]
    """Part of the stages' keys; raise it with any change of a prompt, of the parsing or of the reward."""
    KIND: ClassVar[Literal["retrieval", "answer"]]
    INPUTS: ClassVar[tuple[Input, ...]] = ()
    METRICS: ClassVar[tuple[Metric, ...]]
    """In the order in which they are shown, the most important first: the gate wants a gain on the first that has
    values, and the report's headline is about it."""
    DISTILL_ROLES: ClassVar[tuple["ChatRole", ...]] = ("teacher",)
    """Whom `distill` asks. Only the teacher alone can be asked through a batch API or on Ray."""
    JUDGE_SCHEMA: ClassVar[dict[str, Any]] = SCORE_SCHEMA
    """JSON schema of the judge's answer, for models that can be held to one."""

    @property
    @abstractmethod
    def graders(self) -> "tuple[Role, ...]":
        """The services that say how good a text is: `judge`, `rag`, both or none."""

    def question_text(self, row: Row) -> str:
        """The question as the judge and the reports show it."""
        return row.query

    @abstractmethod
    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """The student's prompt: the same in SFT, RL, evaluation and serving."""

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """What the teacher is asked: the student's prompt, where a recipe says nothing else."""
        return self.student_messages(row, tenant)

    def distill_messages(self, row: Row, tenant: Tenant) -> Mapping["ChatRole", list[Message]]:
        """What `distill` asks about a row, by role: for the estimate and for asking in bulk.

        Override it together with `distill`. Where the teacher alone is asked it is exactly what he is asked; else it
        is as near as can be told before anyone answered.
        """
        return {} if self.own_answer(row) else {"teacher": self.teacher_messages(row, tenant)}

    def own_answer(self, row: Row) -> str | None:  # noqa: ARG002 (for those that override it)
        """The answer that the row brings; nobody is asked for one then."""
        return None

    @property
    def brings_answers(self) -> bool:
        """Do its rows come with answers of their own?"""
        return type(self).own_answer is not Recipe.own_answer

    def pool_of(self, row: Row) -> str | None:  # noqa: ARG002 (for those that override it)
        """Which set of questions a row belongs to that the workbook puts into none, such as `red_team`."""
        return None

    async def distill(self, row: Row, clients: "Clients", tenant: Tenant) -> Row:
        """The row with what the student is to learn from it.

        Raises:
            TeacherError: there is no usable answer; `reason` says why.
        """
        if own := self.own_answer(row):
            return row.model_copy(update={"answer": self.parse_answer(own)})
        answer = await clients.teacher.ask(self.teacher_messages(row, tenant), self.parse_answer)
        return answered(row, answer.value, answer)

    def parse_answer(self, text: str) -> str:
        """The text that counts, from a teacher's or student's answer: all of it, where a recipe says nothing else.

        Raises:
            TeacherError: there is none in it.
        """
        if not text.strip():
            raise TeacherError("the answer is empty", "empty_answer")
        return text.strip()

    def parse_judge(self, text: str) -> float:
        """The score, 0–5, from the judge's answer.

        Raises:
            TeacherError: there is none in it (`judge_unreadable`).
        """
        return parse_score(text)

    def fallback(self, row: Row) -> str | None:  # noqa: ARG002 (for those that override it)
        """What the router answers in place of a model that fails; None: nothing, the request ends with HTTP 503."""
        return None

    def probes(self, rows: Sequence[Row]) -> list[Row]:  # noqa: ARG002 (for those that override it)
        """Further questions for the students, such as test rows in another form, each with an id of its own.

        Only `findings` sees what they answer.
        """
        return []

    def findings(self, arms: Mapping[str, Sequence["ArmRow"]], rows: Sequence[Row]) -> list[Finding]:  # noqa: ARG002
        """Further tables for the report and `evaluation.json`, from what the arms answered to rows and probes."""
        return []


def prompt(system: str, user: str) -> list[Message]:
    """A system and a user message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def identifying(values: Mapping[str, str], inputs: Sequence[Input]) -> dict[str, str]:
    """Those of a row's further inputs that are part of what is asked."""
    return {each.name: values[each.name] for each in inputs if each.identifies and each.name in values}


def placeholders(inputs: Sequence[Input], text: str) -> dict[str, str]:
    """The inputs that a prompt needs, all saying the same: for a prompt that nobody's question is behind."""
    return {each.name: text for each in inputs if each.is_asked}


def answered(row: Row, text: str, answer: "Answer[Any]") -> Row:
    """The row with the text that is to be learned, what the teacher's call cost and which ledger entry holds it."""
    return row.model_copy(
        update={
            "answer": text,
            "answer_request": answer.request_hash,
            "answer_latency_ms": answer.latency_ms,
            "answer_cost_usd": answer.cost_usd,
        }
    )


def one_line(text: str) -> str:
    """The text without line breaks and control characters, so that it can't pose as a further part of a prompt."""
    return _CONTROL.sub(" ", text)


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object in an answer, whatever stands around it; None where there is none."""
    match = _JSON_OBJECT.search(text)
    try:
        found = json.loads(match.group()) if match else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def parse_score(text: str) -> float:
    """The score, 0–5, from a judge's answer such as `{"score": 4, "reason": "…"}`.

    Raises:
        TeacherError: no JSON object with a score in range (`judge_unreadable`).
    """
    try:
        score = float((json_object(text) or {})["score"])
    except (ValueError, KeyError, TypeError) as error:
        raise TeacherError(f"the judge's answer has no score: {text[:80]!r}", "judge_unreadable") from error
    if not 0 <= score <= 5:
        raise TeacherError(f"the judge's answer has no score from 0 to 5: {text[:80]!r}", "judge_unreadable")
    return score
