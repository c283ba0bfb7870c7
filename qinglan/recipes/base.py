"""The base class of all recipes: what a recipe asks, reads and says, and the grader that it has."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from qinglan.clients.openai_protocol import Message
from qinglan.config import Extract, Tenant
from qinglan.errors import TeacherError
from qinglan.grading.grader import Grader
from qinglan.recipes.findings import Finding
from qinglan.recipes.inputs import Input
from qinglan.recipes.prompting import undelimited
from qinglan.rows import ArmRow, Row

if TYPE_CHECKING:
    from qinglan.clients.roles import ChatRole, Clients


class Recipe(ABC):
    """A thing to train: its prompts, how answers are read, and how texts are graded."""

    NAME: ClassVar[str]
    """The file's name without its ending."""
    VERSION: ClassVar[str]
    """Part of the stages' keys; raise it with any change of a prompt, of the parsing or of the
    reward."""
    INPUTS: ClassVar[tuple[Input, ...]] = ()
    DISTILL_ROLES: ClassVar[tuple["ChatRole", ...]] = ("teacher",)
    """The models that `distill` asks. Only the teacher alone can be asked through a batch API."""
    grader: ClassVar[Grader]
    """Says what a text is worth: a `RetrievalGrader` or a `RuleGrader`."""

    def question_text(self, row: Row) -> str:
        """The question as the judge and the reports show it."""
        return row.query

    @abstractmethod
    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """The student's prompt: the same in SFT, RL, evaluation and serving."""

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """The teacher's prompt; the student's unless a recipe overrides it."""
        return self.student_messages(row, tenant)

    def extract_messages(self, row: Row, tenant: Tenant, limits: Extract) -> list[Message] | None:  # noqa: ARG002
        """The teacher's prompt about a row's dialogue (`row.inputs[DIALOGUE]`); None where the row
        has none."""
        return None

    def own_answer(self, row: Row) -> str | None:  # noqa: ARG002
        """The answer that the row brings; no model is asked then."""
        return None

    def distill_messages(self, row: Row, tenant: Tenant) -> Mapping["ChatRole", list[Message]]:
        """The prompts of `distill` about a row, by role, as far as they are known beforehand.

        The estimate and the batch API need it. Override it together with `distill`.
        """
        if self.own_answer(row):
            return {}
        return {"teacher": self.teacher_messages(row, tenant)}

    async def distill(self, row: Row, clients: "Clients", tenant: Tenant) -> Row:
        """The row with what the student is to learn.

        Raises:
            TeacherError: there is no usable answer.
        """
        own_answer = self.own_answer(row)
        if own_answer:
            return row.with_answer(self.parse_answer(own_answer))
        answer = await clients.teacher.ask(self.teacher_messages(row, tenant), self.parse_answer)
        return row.with_answer(
            answer.value,
            request=answer.request_hash,
            latency_ms=answer.latency_ms,
            cost_usd=answer.cost_usd,
        )

    def parse_answer(self, text: str) -> str:
        """The text that counts, from a teacher's answer.

        Raises:
            TeacherError: there is none in it.
        """
        answer = undelimited(text).strip()
        if not answer:
            raise TeacherError("the answer is empty", "empty_answer")
        return answer

    def correction(self, text: str) -> str:
        """A reviewer's text in place of the teacher's answer.

        Raises:
            TeacherError: SFT could not learn it.
        """
        return self.grader.read_correction(text, self.parse_answer)

    def pool_of(self, row: Row) -> str | None:  # noqa: ARG002
        """The set of questions, such as `red_team`, of a row for which the workbook names none."""
        return None

    def fallback(self, row: Row) -> str | None:  # noqa: ARG002
        """The router's answer where the model fails; None: the request ends with HTTP 503."""
        return None

    def probes(self, rows: Sequence[Row]) -> list[Row]:  # noqa: ARG002
        """Further questions for the students, each with an id of its own.

        Only `findings` gets the answers.
        """
        return []

    def findings(self, arms: Mapping[str, Sequence[ArmRow]], rows: Sequence[Row]) -> list[Finding]:  # noqa: ARG002
        """Further tables for the report and `evaluation.json`.

        They are made of what the arms answered to rows and probes.
        """
        return []
