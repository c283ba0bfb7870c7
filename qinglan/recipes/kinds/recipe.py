"""The base class of all recipes: what stages, reward service, evaluation and serving ask of a
recipe.

How texts are graded is defined by the derived `RetrievalRecipe` and `AnswerRecipe`; no caller needs
to know which.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from qinglan.clients.row_batches import OVER_BUDGET
from qinglan.config import Extract, Profile, Reward, Select, Tenant
from qinglan.errors import TeacherError
from qinglan.recipes.kinds.elements import (
    SCORE_SCHEMA,
    Finding,
    Input,
    Message,
    Metric,
    PrimaryMetric,
)
from qinglan.recipes.kinds.extraction import EXTRACTION_SCHEMA, extracted
from qinglan.recipes.kinds.untrusted import parse_score, undelimited
from qinglan.rows import INPUT_REASONS, ArmRow, Row

if TYPE_CHECKING:
    import pyarrow as pa

    from qinglan.clients.chat import Answer
    from qinglan.clients.roles import ChatRole, Clients, Role
    from qinglan.recipes.kinds.measuring import Arms, Measured
    from qinglan.recipes.kinds.validation import AnswerStatistics, RetrievalStatistics
    from qinglan.recipes.scoring.scorer import Scorer
    from qinglan.recipes.scoring.service import RewardService

JudgeUse = Literal["text", "texts", "passage"]
"""What the judge is asked about: a text, all arms' texts of a question, or a passage."""


class Recipe(ABC):
    NAME: ClassVar[str]
    """The file's name without its ending."""
    VERSION: ClassVar[str]
    """Part of the stages' keys; raise it with any change of a prompt, of the parsing or of the
    reward."""
    INPUTS: ClassVar[tuple[Input, ...]] = ()
    METRICS: ClassVar[tuple[Metric, ...]]
    """In the order in which they are shown, the most important first: the gate wants a gain on the
    first that has values, and the report begins with it."""
    DISTILL_ROLES: ClassVar[tuple["ChatRole", ...]] = ("teacher",)
    """The models that `distill` asks. Only the teacher alone can be asked through a batch API."""
    JUDGE_SCHEMA: ClassVar[dict[str, Any]] = SCORE_SCHEMA
    """JSON schema of the judge's answer, for models that support structured output."""
    TOO_FEW_ROWS_HINT: ClassVar[str]
    """What to do where too few rows may teach."""
    RL_INFO: ClassVar[dict[str, type]]
    """Names and types of what an RL file's `extra_info` holds."""

    # Questions and answers

    def question_text(self, row: Row) -> str:
        """The question as the judge and the reports show it."""
        return row.query

    @abstractmethod
    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """The student's prompt: the same in SFT, RL, evaluation and serving."""

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """What the teacher is asked; the student's prompt unless a recipe overrides it."""
        return self.student_messages(row, tenant)

    def distill_messages(self, row: Row, tenant: Tenant) -> Mapping["ChatRole", list[Message]]:
        """What `distill` asks about a row, by role, as far as it is known before any model has
        answered.

        The estimate and the batch API need it. Override it together with `distill`.
        """
        return {} if self.own_answer(row) else {"teacher": self.teacher_messages(row, tenant)}

    def extract_messages(self, row: Row, tenant: Tenant, limits: Extract) -> list[Message] | None:  # noqa: ARG002
        """What the teacher is asked about a row's dialogue (`row.inputs[DIALOGUE]`); None where the
        row has none."""
        return None

    async def extract(self, row: Row, clients: "Clients", tenant: Tenant, limits: Extract) -> Row:
        """The row with the profile and history that the workbook lacks; TeacherError where the
        answer can't be used."""
        messages = self.extract_messages(row, tenant, limits)
        if not messages:
            return row
        return (
            await clients.teacher.ask(
                messages, lambda text: extracted(row, text, limits), EXTRACTION_SCHEMA
            )
        ).value

    def own_answer(self, row: Row) -> str | None:  # noqa: ARG002 (for those that override it)
        """The answer that the row brings; no model is asked then."""
        return None

    def pool_of(self, row: Row) -> str | None:  # noqa: ARG002 (for those that override it)
        """The set of questions, such as `red_team`, of a row for which the workbook names none."""
        return None

    async def distill(self, row: Row, clients: "Clients", tenant: Tenant) -> Row:
        """The row with what the student is to learn; raises TeacherError where there is no usable
        answer."""
        if own := self.own_answer(row):
            return row.model_copy(update={"answer": self.parse_answer(own)})
        answer = await clients.teacher.ask(self.teacher_messages(row, tenant), self.parse_answer)
        return answered(row, answer.value, answer)

    def correction(self, text: str) -> str:
        """What a reviewer wrote in place of the teacher's answer; raises TeacherError where SFT
        could not learn it."""
        return self.parse_answer(text)

    def parse_answer(self, text: str) -> str:
        """The text that counts, from a teacher's answer; raises TeacherError where there is none in
        it."""
        if not (answer := undelimited(text).strip()):
            raise TeacherError("the answer is empty", "empty_answer")
        return answer

    def clean(self, text: str) -> str:
        """What a student wrote or a reviewer typed, without needless white space."""
        return text.strip()

    def parse_judge(self, text: str) -> float:
        """The score, 0–5; raises TeacherError where there is none in the judge's answer
        (`judge_unreadable`)."""
        return parse_score(text)

    def fallback(self, row: Row) -> str | None:  # noqa: ARG002 (for those that override it)
        """What the router answers where the model fails; None: the request ends with HTTP 503."""
        return None

    # How a text is graded

    @property
    @abstractmethod
    def graders(self) -> "tuple[Role, ...]":
        """The services that say how good a text is: `judge`, `rag`, both or none."""

    @property
    def retrieves(self) -> bool:
        return "rag" in self.graders

    @property
    def rule_parts(self) -> tuple[str, ...]:
        """Names of the parts that `parts` gives."""
        return ()

    def parts(self, row: Row, text: str) -> dict[str, float]:  # noqa: ARG002 (for those that override it)
        """The text graded by rule, each part from 0 to 1; nothing where the recipe has no rules."""
        return {}

    @abstractmethod
    def messages_about(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:
        """What the judge is asked about one text of a row; None where it is not asked."""

    @abstractmethod
    def measured_values(self, entry: ArmRow, row: Row) -> dict[str, float]:
        """Metrics of a measured text by name, without `quality`; one without a value is absent."""

    def prompts(self, row: Row, profile: Profile) -> dict[str, list[Message]]:
        """By role, what is asked about a row; of the judge, about the question in the place of an
        answer."""
        tenant = profile.tenant
        asked: dict[str, list[Message] | None] = {
            "extract": self.extract_messages(row, tenant, profile.extract),
            "student": self.student_messages(row, tenant),
            **{
                str(role): messages for role, messages in self.distill_messages(row, tenant).items()
            },
            "judge": self.messages_about(row, row.query, tenant)
            if "judge" in self.graders
            else None,
        }
        return {role: messages for role, messages in asked.items() if messages}

    def probes(self, rows: Sequence[Row]) -> list[Row]:  # noqa: ARG002 (for those that override it)
        """Further questions for the students, each with an id of its own; only `findings` gets the
        answers."""
        return []

    def findings(self, arms: Mapping[str, Sequence[ArmRow]], rows: Sequence[Row]) -> list[Finding]:  # noqa: ARG002
        """Further tables for the report and `evaluation.json`, from what the arms answered to rows
        and probes."""
        return []

    @abstractmethod
    def check_profile(self, profile: Profile) -> None:
        """Raise ConfigError for a setting that does not fit the recipe."""

    @abstractmethod
    def estimate_messages(
        self, use: JudgeUse, row: Row, profile: Profile, texts: int, passage: str
    ) -> list[Message]:
        """A prompt for the judge as long as a real one."""

    # Stages

    def validation_roles(self, profile: Profile) -> "tuple[Role, ...]":
        """The services that validation asks."""
        return tuple(
            role for role in self.graders if role != "judge" or profile.validation.judge_baseline
        )

    @abstractmethod
    async def validate(self, row: Row, clients: "Clients", tenant: Tenant, *, judge: bool) -> Row:
        """The teacher's answer graded; `judge`: by the judge too, where the recipe asks for its
        score."""

    @abstractmethod
    def validation_statistics(self) -> "RetrievalStatistics | AnswerStatistics":
        """Counts what validation finds, row by row."""

    def select(self, rows: Iterable[Row], config: Select) -> Iterator[Row]:
        """Fail the rows whose answer must not become an SFT target; a reviewer's verdict outranks
        the rules.

        All rows come out in the same order, with what was paid for; RL may still use a failed row's
        prompt. One without an answer keeps its reason whatever the verdict, as its teacher is
        measured by it.
        """
        for row in rows:
            kept = row.corrected if row.review == "correct" else row.answer
            reviewed = row.review and row.reason not in INPUT_REASONS
            if reviewed and row.review == "reject" and row.answer:
                yield row.failed("rejected_by_reviewer")
            elif reviewed and kept and kept.strip():
                yield row.model_copy(
                    update={"status": "ok", "reason": None if row.answer else row.reason}
                )
            elif row.status == "failed":
                yield row
            elif not row.answer or not row.answer.strip():
                yield row.failed("empty_answer")
            else:
                reason = self.drop_reason(row, config)
                yield row.failed(reason) if reason else row

    @abstractmethod
    def drop_reason(self, row: Row, config: Select) -> str | None:
        """Why the row's answer, which is not empty, must not teach; None where it may. The first
        that applies."""

    @abstractmethod
    def may_ask_in_rl(self, row: Row) -> bool:
        """May RL ask this row's question?"""

    @property
    def rl_schema(self) -> "pa.Schema":
        """Of the files that verl reads."""
        import pyarrow as pa

        text, types = pa.string(), {str: pa.string(), float: pa.float64(), int: pa.int64()}
        return pa.schema(
            {
                "data_source": text,
                "prompt": pa.list_(pa.struct({"role": text, "content": text})),
                "ability": text,
                "reward_model": pa.struct({"style": text, "ground_truth": text}),
                "extra_info": pa.struct(
                    {name: types[kind] for name, kind in {"index": int, **self.RL_INFO}.items()}
                ),
            }
        )

    def rl_record(self, row: Row, tenant: Tenant, index: int = 0) -> dict[str, Any]:
        """A row that has a baseline, in `rl_schema`; `index` is its place in the file, by which
        samples are seeded."""
        return {
            "data_source": f"qinglan/{self.NAME}",
            "prompt": self.student_messages(row, tenant),
            "ability": self.NAME,
            "reward_model": {"style": "rule", "ground_truth": row.gold_id or ""},
            "extra_info": {"index": index} | self.rl_info(row),
        }

    @abstractmethod
    def rl_info(self, row: Row) -> dict[str, Any]:
        """What the reward needs to know of a row that has a baseline, as `RL_INFO` names it."""

    @property
    @abstractmethod
    def score_parts(self) -> tuple[str, ...]:
        """Names of what an RL sample's score is made of, beside `score` itself; the same for every
        sample."""

    @property
    @abstractmethod
    def primary_metric(self) -> PrimaryMetric:
        """The part that says how good the policy is, whatever it is rewarded for."""

    @abstractmethod
    def dev_metric(self, config: Reward, infos: Iterable[Mapping[str, Any]]) -> str:
        """Which part of the score, averaged over the dev split with these `extra_info`, chooses the
        model."""

    def can_have(self, part: str, info: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether the row with this `extra_info` has that part of the score, once it is scored."""
        return True

    @abstractmethod
    def scorer(self, service: "RewardService") -> "Scorer":
        """What scores RL samples, in the reward service's process."""

    @abstractmethod
    def baseline_arms(
        self, rows: Sequence[Row], profile: Profile, *, retrieve_again: bool = False
    ) -> dict[str, list[ArmRow]]:
        """The arms that need no model of ours, as validation found them.

        `retrieve_again` leaves out what a live service returned then, so that it is asked for all
        arms at one time.
        """

    @abstractmethod
    async def measure(
        self, arms: "Arms", rows: Sequence[Row], clients: "Clients", profile: Profile
    ) -> "Measured":
        """What the arms' texts are worth; raises StageError where too many calls failed for a fair
        comparison."""

    @abstractmethod
    def measuring_digest(self, tenant: Tenant) -> str:
        """Changes with what `measure` asks."""


def answered(row: Row, text: str, answer: "Answer[Any]") -> Row:
    """The row with the text that is to be learned, and what the teacher's call took."""
    return row.model_copy(
        update={
            "answer": text,
            "answer_request": answer.request_hash,
            "answer_latency_ms": answer.latency_ms,
            "answer_cost_usd": answer.cost_usd,
        }
    )


async def ask_judge(recipe: Recipe, row: Row, clients: "Clients", tenant: Tenant) -> float | None:
    """The score of the row's answer; None where the recipe does not ask for one, and where the
    budget was spent, which leaves the answer as good as it was."""
    messages = recipe.messages_about(row, row.answer or "", tenant)
    if not messages:
        return None
    try:
        return (await clients.judge.ask(messages, recipe.parse_judge, recipe.JUDGE_SCHEMA)).value
    except TeacherError as error:
        if error.reason != OVER_BUDGET:
            raise
        clients.unjudged += 1
        return None
