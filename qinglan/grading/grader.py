"""The interface of graders: everything that the stages ask of one, of whichever kind it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Literal, NamedTuple

from qinglan.clients.openai_protocol import JsonSchema, Message
from qinglan.config import Profile, Reward, Select, Tenant
from qinglan.grading.grade import Grade, GradingRole, GradingServices, Scores
from qinglan.grading.metrics import QUALITY, Metric, PrimaryMetric
from qinglan.grading.panel import Panel
from qinglan.grading.validation_statistics import ValidationStatistics
from qinglan.grading.wording import Wording
from qinglan.rows import ArmRow, Row

JudgeUse = Literal["text", "texts", "passage"]
"""The thing that a judge is asked about: one text, all arms' texts of a question, or a passage."""


class JudgeCalls(NamedTuple):
    """The judge's calls about one question."""

    use: JudgeUse
    calls: int


class Grader(ABC):
    """Says what a text is worth, and what follows from its grade in each stage.

    A grade is asked for by `grade`; every other method is pure.
    """

    metrics: tuple[Metric, ...]
    """In the order in which they are shown, the most important first: the gate wants a gain on the
    first that has values, and the report begins with it."""
    retrieves: ClassVar[bool]
    """Its grades say which documents a text finds, so that documents can be asked for and shown."""
    question_is_arm: ClassVar[bool]
    """The user's question can be graded as it stands, so that it is an arm of its own."""
    wording: ClassVar[Wording]
    services: tuple[GradingRole, ...]
    """The services that `grade` asks: `judge`, `rag`, both or none."""
    judge_schema: JsonSchema | None
    """JSON schema of the judge's answer about one text."""
    panel: Panel | None
    """The blind panel that scores all arms' texts of a question; None where the judge reads each
    text by itself."""

    @property
    def asks_rag(self) -> bool:
        return "rag" in self.services

    @property
    def asks_judge(self) -> bool:
        return "judge" in self.services

    @property
    @abstractmethod
    def judge_uses(self) -> tuple[JudgeUse, ...]:
        """The things that the judge is asked about; none where no judge is asked."""

    # Texts

    @abstractmethod
    def clean(self, text: str) -> str:
        """A text that a student wrote or a reviewer typed, without needless white space."""

    @abstractmethod
    def require_servable(self, text: str, max_chars: int | None) -> None:
        """Raise ModelError for a student's text that must not be given out.

        Args:
            max_chars: the profile's limit; a grader may have one of its own where there is none.
        """

    @abstractmethod
    def read_correction(self, text: str, parse_answer: Callable[[str], str]) -> str:
        """A reviewer's text in place of the teacher's answer.

        Args:
            parse_answer: reads an answer of the teacher's.

        Raises:
            TeacherError: SFT could not learn it.
        """

    @abstractmethod
    def limit_broken_by(self, correction: str, config: Select) -> str | None:
        """The limit of `select` that a reviewer's text breaks, in words that follow its place."""

    # Grading

    @abstractmethod
    async def grade(
        self,
        row: Row,
        texts: Collection[str | None],
        services: GradingServices,
        tenant: Tenant,
        *,
        judge: bool = False,
        relevance: bool = False,
    ) -> dict[str | None, Grade]:
        """The grades of these texts for the row's question, by text.

        A failed call raises nothing: its error stands in the grade. An empty text is graded as a
        wrong one; `QUESTION_ITSELF` stands for the user's own words.

        Args:
            judge: ask the judge for each text's score.
            relevance: ask the judge whether the best passage answers the question.
        """

    # Arms and their metrics

    @abstractmethod
    def teacher_is_arm(self, rows: Sequence[Row]) -> bool:
        """True where the answers of these rows can be compared as the teacher's."""

    def values_of(self, entry: ArmRow, row: Row) -> dict[str, float]:
        """Metrics of an arm's text by name, `quality` too; none where it was not graded."""
        if not entry.measured:
            return {}
        values = self.metric_values(entry, row)
        if entry.judge_score is None:
            return values
        return {**values, QUALITY: entry.judge_score}

    @abstractmethod
    def value_to_compare(self, entry: ArmRow, row: Row) -> float | None:
        """The one value by which arms' texts of a question are ranked; None where there is none."""

    @abstractmethod
    def metric_values(self, entry: ArmRow, row: Row) -> dict[str, float]:
        """Metrics of an arm's graded text, `quality` aside; one without a value is absent."""

    @property
    @abstractmethod
    def rule_parts(self) -> tuple[str, ...]:
        """Names of the parts that a text gets by rule."""

    @abstractmethod
    def validation_statistics(self) -> ValidationStatistics:
        """A counter of what validation finds, row by row."""

    # The red team

    @abstractmethod
    def default_checks(self, *, must_pass: bool) -> dict[str, bool | int]:
        """Checks of a red-team case, by name, that are on unless the case sets them itself."""

    @abstractmethod
    def gold_of(self, row: Row) -> str | None:
        """The document that a text of the row has to find; None where there is none to find."""

    # The judge's prompts

    @abstractmethod
    def messages_about(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:
        """The prompt that asks the judge about one text of a row; None where it is not asked."""

    @abstractmethod
    def judge_prompts(self, row: Row, tenant: Tenant) -> dict[str, list[Message]]:
        """Each kind of prompt for the judge by its name, with the question in the text's place."""

    @abstractmethod
    def estimate_messages(
        self, use: JudgeUse, row: Row, profile: Profile, texts: int, passage: str
    ) -> list[Message]:
        """A prompt for the judge that is as long as a real one."""

    @abstractmethod
    def with_passage_judge(
        self, messages: Callable[[Row, str, Tenant], list[Message]], parse: Callable[[str], float]
    ) -> "Grader":
        """This grader with another judge in the place of the one that is asked about passages.

        Args:
            messages: the prompt about a passage that was retrieved for a row.
            parse: reads the score, 0–5, in that judge's answer.

        Raises:
            ConfigError: no passage is ever judged.
        """

    @abstractmethod
    def evaluation_calls(self, arms: int) -> JudgeCalls:
        """The judge's calls about one question of an evaluation with so many arms."""

    # Selection

    @abstractmethod
    def drop_reason(self, row: Row, config: Select) -> str | None:
        """The first reason why the row's answer, which is not empty, must not teach; None where it
        may."""

    # Reinforcement learning

    @abstractmethod
    def check_profile(self, profile: Profile) -> None:
        """Raise ConfigError for a setting that does not fit the grader."""

    @abstractmethod
    def may_ask_in_rl(self, row: Row) -> bool:
        """Tell whether RL may ask the row's question."""

    @abstractmethod
    def judged_share(self, config: Reward) -> float:
        """Share of the samples for whose score the judge is asked."""

    @abstractmethod
    def needs_relevance(self, config: Reward, row: Row) -> bool:
        """Tell whether the judge is asked about the best passage of the row's samples."""

    @property
    @abstractmethod
    def score_parts(self) -> tuple[str, ...]:
        """Names of what a sample's score is made of; the same for every sample."""

    @abstractmethod
    def score(self, config: Reward, row: Row, grade: Grade) -> Scores:
        """A sample's `score`, in [−1, 1], and its parts; absent or NaN for what is not known."""

    @property
    @abstractmethod
    def primary_metric(self) -> PrimaryMetric:
        """The part that says how good the policy is, whatever it is rewarded for."""

    @abstractmethod
    def dev_metric(self, config: Reward, rows: Sequence[Row]) -> str:
        """The part of the score whose mean over the dev split chooses the model."""

    @abstractmethod
    def can_have(self, part: str, row: Row) -> bool:
        """Tell whether the row's samples can have that part of the score."""
