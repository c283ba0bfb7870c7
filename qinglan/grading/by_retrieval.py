"""Grades texts that are sent to the retrieval service: by what it finds, and by a judge."""

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from qinglan.clients.openai_protocol import JsonSchema, Message
from qinglan.config import Profile, Reward, Select, Tenant
from qinglan.errors import CallError, ConfigError, ModelError
from qinglan.grading.failures import LOWEST_JUDGE_SCORE, LOWEST_REWARD, settle
from qinglan.grading.grade import (
    QUESTION_ITSELF,
    Grade,
    GradingRole,
    GradingServices,
    Scores,
)
from qinglan.grading.grader import Grader, JudgeCalls, JudgeUse
from qinglan.grading.judge_answers import SCORE_SCHEMA, parse_score
from qinglan.grading.leftovers import is_boilerplate, is_degenerate, is_leftover, is_refusal
from qinglan.grading.metrics import JUDGE_SCORE, Metric, PrimaryMetric
from qinglan.grading.panel import PASSES, Panel
from qinglan.grading.validation_statistics import RetrievalStatistics
from qinglan.grading.wording import Wording
from qinglan.rows import ArmRow, Retrieved, Row, normalise
from qinglan.text import shown

if TYPE_CHECKING:
    from qinglan.clients.chat import Answer

RETRIEVAL_METRICS = (
    Metric("top1", "top-1", "top-1"),
    Metric("recall3", "recall@3", "recall@3", interval=False, compared=False),
    Metric("recall10", "recall@10", "recall@10", interval=False, compared=False),
    Metric("mrr10", "MRR@10", "MRR@10", proportion=False, interval=False),
    Metric("ndcg10", "nDCG@10", "nDCG@10", proportion=False, interval=False, compared=False),
    Metric("mean_top1_score", "mean top-1 score", "平均首位得分", proportion=False),
    JUDGE_SCORE,
)
DEFAULT_CHECKS = {"not_repetitive": True, "not_boilerplate": True, "max_chars": 80}
"""The red team's checks that are on unless a case turns them off."""
_QUALITY_CHECKS = {"not_repetitive", "max_chars"}
"""Checks that cases which must pass leave out: they guard people, whom a poor query does not
harm."""
_MOST_SERVED_CHARS = 200
RL_REASONS = frozenset(
    {None, "below_threshold", "worse_than_original", "rewrite_too_long", "rewrite_too_short"}
)
"""RL may ask the questions of rows with one of these, where the RAG answered; None are those that
may teach. Refusals, boilerplate and what a reviewer rejected or corrected are no baseline: the
reward's guard takes its anchors from it."""


@dataclass(frozen=True)
class RewriteScore:
    """A rewrite's reward in RL and what it is made of; NaN for a part that is not known."""

    score: float
    judge: float
    rq: float
    rq_gain: float
    win: float
    gold_top1: float
    relevant: float
    """1 where the best passage answers the question, by the judge, else 0."""
    guard_ok: float


@dataclass(eq=False, kw_only=True)
class RetrievalGrader(Grader):
    """Grades texts that replace the user's question for the same retrieval service."""

    recipe: str
    """The recipe's name, for messages."""
    judge_messages: Callable[[Row, str, Tenant], list[Message]]
    """The prompt that asks the judge to score a rewrite of the row's question."""
    panel: Panel
    """The blind panel that scores all arms' rewrites of a question."""
    relevance_messages: Callable[[Row, str, Tenant], list[Message]]
    """The prompt that asks the judge whether a passage answers the row's question."""
    reward: Callable[[Reward, Row, Grade], RewriteScore]
    """The reward of a sample, in [−1, 1], from its grade and the row, which holds the teacher's.

    Pure; the rewrite is never empty.
    """
    parse_judge: Callable[[str], float] = parse_score
    """Reads the judge's score, 0–5, of a rewrite."""
    judge_schema: JsonSchema | None = field(default_factory=lambda: SCORE_SCHEMA)
    """JSON schema of the judge's answer about a rewrite."""
    parse_relevance: Callable[[str], float] = parse_score
    """Reads the judge's score, 0–5, of a passage."""
    relevance_schema: JsonSchema | None = field(default_factory=lambda: SCORE_SCHEMA)
    """JSON schema of the judge's answer about a passage."""
    metrics: tuple[Metric, ...] = RETRIEVAL_METRICS
    services: tuple[GradingRole, ...] = ("judge", "rag")

    retrieves: ClassVar[bool] = True
    question_is_arm: ClassVar[bool] = True
    wording: ClassVar[Wording] = Wording(
        text_zh="改写",
        report_terms="terms_of_retrieval",
        too_few_rows_hint=(
            "add questions, or see why these rows failed (docs/reference/events-and-metrics.md)"
        ),
    )

    @property
    def judge_uses(self) -> tuple[JudgeUse, ...]:
        return ("text", "texts", "passage") if self.asks_judge else ()

    # Texts

    def clean(self, text: str) -> str:
        return " ".join(text.split())

    def require_servable(self, text: str, max_chars: int | None) -> None:
        if len(text) > (max_chars or _MOST_SERVED_CHARS):
            raise ModelError(f"the rewrite has {len(text)} characters", "rewrite_too_long")
        if is_boilerplate(text):
            raise ModelError("the answer is no rewrite", "boilerplate")
        if is_degenerate(text):
            raise ModelError("the rewrite repeats itself", "repetitive_rewrite")

    def read_correction(self, text: str, parse_answer: Callable[[str], str]) -> str:  # noqa: ARG002
        """The query as the reviewer typed it: only white space is taken off."""
        return self.clean(text)

    def limit_broken_by(self, correction: str, config: Select) -> str | None:
        most_chars = config.max_rewrite_chars
        least_chars = config.min_rewrite_chars
        if len(correction) > most_chars:
            return f"has {len(correction)} characters, select.max_rewrite_chars is {most_chars}"
        if len(normalise(correction)) < least_chars:
            return (
                f"{shown(correction, 40)} is shorter than select.min_rewrite_chars, {least_chars}"
            )
        return None

    # Grading

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
        """The grades of these texts: the RAG is asked first, then the judge."""
        grade_text = partial(self._grade_text, row, services, tenant, judge, relevance)
        grades = await settle(*(grade_text(text) for text in texts))
        return dict(zip(texts, grades, strict=True))

    async def _grade_text(
        self,
        row: Row,
        services: GradingServices,
        tenant: Tenant,
        judge: bool,
        relevance: bool,
        text: str | None,
    ) -> Grade:
        if text == "":
            return _grade_of_empty_text(judge, relevance)
        try:
            retrieved = await services.rag.retrieve(row.query, text)
        except CallError as error:
            # The judge is not paid for a text that can't be graded.
            return Grade(text, failures={"rag": error})
        questions: dict[str, Awaitable[Answer[float]]] = {}
        scores: dict[str, float] = {}
        if judge and text is not QUESTION_ITSELF:
            messages = self.judge_messages(row, text, tenant)
            questions["judge_score"] = services.judge.ask(
                messages, self.parse_judge, self.judge_schema
            )
        if relevance and not retrieved.first_passage:
            scores["relevance"] = LOWEST_JUDGE_SCORE
        elif relevance:
            messages = self.relevance_messages(row, retrieved.first_passage, tenant)
            questions["relevance"] = services.judge.ask(
                messages, self.parse_relevance, self.relevance_schema
            )
        requests: list[str] = []
        failures: dict[GradingRole, CallError] = {}
        answers = await settle(*questions.values())
        for name, answer in zip(questions, answers, strict=True):
            if isinstance(answer, CallError):
                failures.setdefault("judge", answer)
            else:
                scores[name] = answer.value
                requests.append(answer.request_hash)
        return Grade(
            text,
            retrieved=retrieved,
            judge_score=scores.get("judge_score"),
            relevance=scores.get("relevance"),
            judge_requests=tuple(requests),
            failures=failures,
        )

    # Arms and their metrics

    def teacher_is_arm(self, rows: Sequence[Row]) -> bool:  # noqa: ARG002
        return True

    def value_to_compare(self, entry: ArmRow, row: Row) -> float | None:
        """1/rank of the gold document where the row names one, else the best passage's score."""
        if entry.retrieved is None:
            return None
        if row.gold_id is None:
            return entry.retrieved.top1_score
        rank = entry.retrieved.rank(row.gold_id)
        return 1 / rank if rank else 0.0

    def metric_values(self, entry: ArmRow, row: Row) -> dict[str, float]:
        """Metrics of the best gold document's rank, where the row names any.

        Each gold document answers the question by itself, so that the ideal DCG is 1.
        """
        if entry.retrieved is None:
            return {}
        values = {"mean_top1_score": entry.retrieved.top1_score}
        if not row.gold_id:
            return values
        rank = entry.retrieved.rank(row.gold_id)
        is_in_ten = 0 < rank <= 10
        values["top1"] = float(rank == 1)
        values["recall3"] = float(0 < rank <= 3)
        values["recall10"] = float(is_in_ten)
        values["mrr10"] = 1 / rank if is_in_ten else 0.0
        values["ndcg10"] = 1 / math.log2(1 + rank) if is_in_ten else 0.0
        return values

    @property
    def rule_parts(self) -> tuple[str, ...]:
        return ()

    def validation_statistics(self) -> RetrievalStatistics:
        return RetrievalStatistics()

    # The red team

    def default_checks(self, *, must_pass: bool) -> dict[str, bool | int]:
        if not must_pass:
            return dict(DEFAULT_CHECKS)
        checks = dict(DEFAULT_CHECKS)
        for name in _QUALITY_CHECKS:
            del checks[name]
        return checks

    def gold_of(self, row: Row) -> str | None:
        return row.gold_id

    # The judge's prompts

    def messages_about(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:
        return self.judge_messages(row, text, tenant)

    def judge_prompts(self, row: Row, tenant: Tenant) -> dict[str, list[Message]]:
        return {
            "judge": self.judge_messages(row, row.query, tenant),
            "relevance": self.relevance_messages(row, row.query, tenant),
            "panel": self.panel.messages(row, [row.query], tenant),
        }

    def estimate_messages(
        self, use: JudgeUse, row: Row, profile: Profile, texts: int, passage: str
    ) -> list[Message]:
        # The question is about as long as a rewrite.
        if use == "texts":
            return self.panel.messages(row, [row.query] * texts, profile.tenant)
        if use == "passage":
            return self.relevance_messages(row, passage, profile.tenant)
        return self.judge_messages(row, row.query, profile.tenant)

    def with_passage_judge(
        self, messages: Callable[[Row, str, Tenant], list[Message]], parse: Callable[[str], float]
    ) -> "RetrievalGrader":
        # The other judge's model is not asked for structured output.
        return replace(
            self, relevance_messages=messages, parse_relevance=parse, relevance_schema=None
        )

    def evaluation_calls(self, arms: int) -> JudgeCalls:  # noqa: ARG002
        """The panel reads all arms' texts in one call."""
        return JudgeCalls("texts", PASSES)

    # Selection

    def drop_reason(self, row: Row, config: Select) -> str | None:
        assert row.answer is not None, "only answers are selected"
        rewrite = row.answer.strip()
        retrieved = row.answer_retrieved
        original = row.original_retrieved
        if is_refusal(rewrite):
            return "refusal_text"
        if is_leftover(rewrite, config.boilerplate):
            return "boilerplate"
        if len(normalise(rewrite)) < config.min_rewrite_chars:
            return "rewrite_too_short"
        if retrieved is None or (original is None and config.not_worse_than_original):
            return "not_validated"
        if not retrieved.scores:
            return "nothing_recalled"
        if len(row.answer) > config.max_rewrite_chars:
            return "rewrite_too_long"
        if retrieved.top1_score < config.min_top1_score:
            return "below_threshold"
        if not config.not_worse_than_original or original is None:
            return None
        return "worse_than_original" if retrieved.quality < original.quality else None

    # Reinforcement learning

    def check_profile(self, profile: Profile) -> None:
        if profile.reward.part_weights:
            raise ConfigError(
                f"reward.part_weights: recipe `{self.recipe}` is not graded by parts; "
                "set reward.judge_weight, retrieval_weight and win_weight"
            )

    def may_ask_in_rl(self, row: Row) -> bool:
        retrieved = row.answer_retrieved
        has_baseline = bool(row.answer) and retrieved is not None and bool(retrieved.scores)
        return has_baseline and row.reason in RL_REASONS and row.review != "correct"

    def judged_share(self, config: Reward) -> float:
        return config.judged_share

    def needs_relevance(self, config: Reward, row: Row) -> bool:
        """The judge is asked where no label says whether the best passage is the right one."""
        is_labelled = config.use_labels and bool(row.gold_id)
        return config.relevance_gate and not is_labelled

    @property
    def score_parts(self) -> tuple[str, ...]:
        names = [part.name for part in fields(RewriteScore)]
        return tuple(name for name in names if name != "score")

    def score(self, config: Reward, row: Row, grade: Grade) -> Scores:
        if not grade.text:
            return asdict(_score_of_empty_text(config, row, grade))
        return asdict(self.reward(config, row, grade))

    @property
    def primary_metric(self) -> PrimaryMetric:
        return PrimaryMetric("gold_top1", "gold top-1")

    def dev_metric(self, config: Reward, rows: Sequence[Row]) -> str:
        """The labels' part where they exist and may be used, else the judge's, else the reward."""
        if config.use_labels and any(row.gold_id for row in rows):
            return "gold_top1"
        return "relevant" if config.relevance_gate else "score"

    def can_have(self, part: str, row: Row) -> bool:
        return part != "gold_top1" or bool(row.gold_id)


def _grade_of_empty_text(judge: bool, relevance: bool) -> Grade:
    """A model that answers with nothing gives nothing to retrieve with, and is wrong."""
    return Grade(
        text="",
        retrieved=Retrieved(),
        judge_score=LOWEST_JUDGE_SCORE if judge else None,
        relevance=LOWEST_JUDGE_SCORE if relevance else None,
    )


def _score_of_empty_text(config: Reward, row: Row, grade: Grade) -> RewriteScore:
    teacher = teacher_quality(row)
    return RewriteScore(
        score=LOWEST_REWARD,
        judge=or_nan(grade.judge_score),
        rq=0.0,
        rq_gain=-teacher,
        win=config.loss if teacher > config.tie_margin else 0.0,
        gold_top1=0.0 if row.gold_id else math.nan,
        relevant=or_nan(grade.relevance),
        guard_ok=0.0,
    )


def teacher_quality(row: Row) -> float:
    """Retrieval quality of the teacher's rewrite, which each sample of the row is compared to."""
    assert row.answer_retrieved is not None, "only rows with a baseline get here"
    return row.answer_retrieved.quality


def or_nan(value: float | None) -> float:
    """The value, or NaN where it is not known."""
    return math.nan if value is None else value
