"""Grades texts by themselves: by rules on their row, and by a judge where the recipe asks one."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from qinglan.clients.openai_protocol import JsonSchema, Message
from qinglan.config import Profile, Reward, Select, Tenant
from qinglan.errors import CallError, ConfigError, ModelError
from qinglan.grading.failures import LOWEST_JUDGE_SCORE, LOWEST_REWARD, settle
from qinglan.grading.grade import QUESTION_ITSELF, Grade, GradingRole, GradingServices, Scores
from qinglan.grading.grader import Grader, JudgeCalls, JudgeUse
from qinglan.grading.judge_answers import SCORE_SCHEMA, parse_score
from qinglan.grading.metrics import JUDGE, QUALITY, Metric, PrimaryMetric
from qinglan.grading.panel import Panel
from qinglan.grading.validation_statistics import RuleStatistics
from qinglan.grading.wording import Wording
from qinglan.rows import ArmRow, Row

_RESERVED_NAMES = frozenset(
    {
        # Of a sample, in what verl gets and in the log.
        "score",
        "row_id",
        "target",
        "text",
        "passage",
        "invalid",
        "failed_by",
        "outage",
        "rag_calls",
        "rag_cached",
        "rag_failed",
        "judge_asked",
        "judge_cached",
        "judge_cost_usd",
        "latency_ms",
        # Of a step.
        "samples",
        "alone",
        "steps",
        "reward",
        "entropy",
        "kl",
        "clip_fraction",
        "policy_loss",
        "value_loss",
    }
)
"""Figures of training that a part of a recipe's can't be called after."""


def bad_format(row: Row) -> str | None:
    """The flaw of an answer whose `format` is below 1; None where it has none."""
    parts = row.parts or {}
    return "bad_format" if parts.get("format", 1.0) < 1 else None


def parts_as_metrics(row: Row, text: str, parts: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG001
    """Metrics of a text that are its parts, unchanged."""
    return dict(parts)


def always_possible(part: str, row: Row) -> bool:  # noqa: ARG001
    """Every row's samples can have every part."""
    return True


@dataclass(eq=False, kw_only=True)
class RuleGrader(Grader):
    """Grades answers to a question, with whatever else the row brings."""

    recipe: str
    """The recipe's name, for messages."""
    parts: Callable[[Row, str], dict[str, float]]
    """The text by rule, each part from 0 to 1. Pure; a part without a value for this row is
    absent."""
    weights: Mapping[str, float]
    """Every part of the reward and its weight, 0 for one that is only logged; `judge` is the
    judge's score / 5. `reward.part_weights` may change them."""
    metrics: tuple[Metric, ...]
    judge_messages: Callable[[Row, str, Tenant], list[Message] | None] | None = None
    """The prompt that asks the judge about a text, or None for a text that it is not asked about;
    without such a prompt no judge is asked. An empty text gets the lowest score unasked."""
    parse_judge: Callable[[str], float] = parse_score
    """Reads the judge's score, 0–5."""
    judge_schema: JsonSchema | None = field(default_factory=lambda: SCORE_SCHEMA)
    """JSON schema of the judge's answer."""
    reward: Callable[[Mapping[str, float], Mapping[str, float]], float] | None = None
    """Another reward, in [−1, 1], from a text's known parts and the parts' weights; the weighted
    mean of the parts if None. Pure; NaN where no part with a weight is known."""
    text_metrics: Callable[[Row, str, Mapping[str, float]], dict[str, float]] = parts_as_metrics
    """Metrics of one text from its parts, by name; one without a value is absent. `quality` comes
    from the judge, not from here."""
    flaw: Callable[[Row], str | None] = bad_format
    """Why the teacher's graded answer must not teach; None where it may."""
    rl_reasons: frozenset[str | None] = frozenset({None})
    """RL may ask the questions of rows with one of these: None are those that may teach. Add a flaw
    of the teacher's answer where the reward does not depend on that answer."""
    can_have_part: Callable[[str, Row], bool] = always_possible
    """Whether a row's samples can have that part of the score."""

    services: tuple[GradingRole, ...] = field(init=False)
    panel: Panel | None = field(init=False, default=None)
    retrieves: ClassVar[bool] = False
    question_is_arm: ClassVar[bool] = False
    wording: ClassVar[Wording] = Wording(
        text_zh="回答",
        report_terms="terms_of_answers",
        too_few_rows_hint="correct the teacher's prompt or the recipe's rules, or add questions",
    )

    def __post_init__(self) -> None:
        self.services = () if self.judge_messages is None else ("judge",)

    @property
    def judge_uses(self) -> tuple[JudgeUse, ...]:
        return ("text",) if self.asks_judge else ()

    # Texts

    def clean(self, text: str) -> str:
        return text.strip()

    def require_servable(self, text: str, max_chars: int | None) -> None:
        if max_chars and len(text) > max_chars:
            raise ModelError(f"the answer has {len(text)} characters", "answer_too_long")

    def read_correction(self, text: str, parse_answer: Callable[[str], str]) -> str:
        """The answer that the recipe finds in the text, as it does in a teacher's."""
        return parse_answer(text)

    def limit_broken_by(self, correction: str, config: Select) -> str | None:  # noqa: ARG002 (limits are for rewrites)
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
        relevance: bool = False,  # noqa: ARG002 (nothing is retrieved)
    ) -> dict[str | None, Grade]:
        """The grades of these texts; the user's own words are no answer and have none."""
        grade_text = partial(self._grade_text, row, services, tenant, judge)
        grades = await settle(*(grade_text(text) for text in texts))
        return dict(zip(texts, grades, strict=True))

    async def _grade_text(
        self, row: Row, services: GradingServices, tenant: Tenant, judge: bool, text: str | None
    ) -> Grade:
        if text is QUESTION_ITSELF:
            return Grade(QUESTION_ITSELF)
        parts = self.checked_parts(row, text)
        messages = self.messages_about(row, text, tenant) if judge else None
        if messages is None:
            return Grade(text, parts=parts)
        if not text:
            return Grade(text, parts=parts, judge_score=LOWEST_JUDGE_SCORE)
        try:
            answer = await services.judge.ask(messages, self.parse_judge, self.judge_schema)
        except CallError as error:
            return Grade(text, parts=parts, failures={"judge": error})
        return Grade(
            text,
            parts=parts,
            judge_score=answer.value,
            judge_requests=(answer.request_hash,),
        )

    def checked_parts(self, row: Row, text: str) -> dict[str, float]:
        """The text's parts; raises ConfigError where they are not as the recipe declares them."""
        parts = self.parts(row, text)
        rule_parts = self.rule_parts
        for name, value in parts.items():
            if name not in rule_parts:
                raise ConfigError(
                    f"recipe `{self.recipe}`: parts() gave `{name}`, which `weights` does not name"
                )
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"recipe `{self.recipe}`: parts() gave {name} = {value}, "
                    "which is not from 0 to 1"
                )
        return parts

    # Arms and their metrics

    def teacher_is_arm(self, rows: Sequence[Row]) -> bool:
        """True where all answers are the teacher's: those that rows bring are no arm."""
        answered_rows = [row for row in rows if row.answer]
        return bool(answered_rows) and all(row.answer_request for row in answered_rows)

    def value_to_compare(self, entry: ArmRow, row: Row) -> float | None:
        """The first of the metrics that the text has."""
        values = self.values_of(entry, row)
        for metric in self.metrics:
            if metric.name in values:
                return values[metric.name]
        return None

    def metric_values(self, entry: ArmRow, row: Row) -> dict[str, float]:
        return self.text_metrics(row, entry.text or "", entry.parts or {})

    @property
    def rule_parts(self) -> tuple[str, ...]:
        return tuple(name for name in self.weights if name != JUDGE)

    def validation_statistics(self) -> RuleStatistics:
        return RuleStatistics(self.rule_parts, self.flaw)

    # The red team

    def default_checks(self, *, must_pass: bool) -> dict[str, bool | int]:  # noqa: ARG002
        """None hold of every answer: it may be long, and it may refuse."""
        return {}

    def gold_of(self, row: Row) -> str | None:  # noqa: ARG002 (nothing is retrieved)
        return None

    # The judge's prompts

    def messages_about(self, row: Row, text: str, tenant: Tenant) -> list[Message] | None:
        return None if self.judge_messages is None else self.judge_messages(row, text, tenant)

    def judge_prompts(self, row: Row, tenant: Tenant) -> dict[str, list[Message]]:
        messages = self.messages_about(row, row.query, tenant)
        return {} if messages is None else {"judge": messages}

    def estimate_messages(
        self,
        use: JudgeUse,  # noqa: ARG002 (the judge reads one text at a time)
        row: Row,
        profile: Profile,
        texts: int,  # noqa: ARG002
        passage: str,  # noqa: ARG002
    ) -> list[Message]:
        longest_answer = "字" * profile.student.max_new_tokens
        return self.messages_about(row, longest_answer, profile.tenant) or []

    def with_passage_judge(
        self,
        messages: Callable[[Row, str, Tenant], list[Message]],  # noqa: ARG002
        parse: Callable[[str], float],  # noqa: ARG002
    ) -> Grader:
        raise ConfigError(
            f"recipe `{self.recipe}`: retrieves no passage that a judge could be asked about; "
            "leave judge.local out"
        )

    def evaluation_calls(self, arms: int) -> JudgeCalls:
        """The judge reads one text at a time."""
        return JudgeCalls("text", arms)

    # Selection

    def drop_reason(self, row: Row, config: Select) -> str | None:  # noqa: ARG002 (limits are for rewrites)
        return "not_validated" if row.parts is None else self.flaw(row)

    # Reinforcement learning

    def check_profile(self, profile: Profile) -> None:
        if "original" in profile.gate.rivals:
            raise ConfigError(
                f"gate.rivals: recipe `{self.recipe}` does not retrieve; "
                "name another arm than original"
            )
        config = profile.reward
        weights = self._weights(config)
        for name in config.part_weights:
            if name not in self.weights:
                raise ConfigError(
                    f"reward.part_weights: recipe `{self.recipe}` has no part `{name}`; "
                    f"its parts: {', '.join(self.weights)}"
                )
        judge_counts = weights.get(JUDGE, 0) > 0
        if judge_counts and not self.services:
            raise ConfigError(
                f"reward.part_weights: recipe `{self.recipe}` asks no judge; leave out {JUDGE}"
            )
        rules_count = any(weight for name, weight in weights.items() if name != JUDGE)
        always_judged = judge_counts and config.judge_share == 1
        if not rules_count and not always_judged:
            raise ConfigError(
                "reward.part_weights: a part that a rule gives must weigh more than 0, "
                "or the judge must be asked for every sample"
            )
        self._check_names()

    def may_ask_in_rl(self, row: Row) -> bool:
        """Any row whose answer may teach, or that the recipe can reward all the same."""
        reason = None if row.status == "ok" else row.reason
        return reason in self.rl_reasons and bool(row.target)

    def judged_share(self, config: Reward) -> float:
        judge_counts = self._weights(config).get(JUDGE, 0) > 0
        return config.judge_share if judge_counts and self.services else 0.0

    def needs_relevance(self, config: Reward, row: Row) -> bool:  # noqa: ARG002
        return False

    @property
    def score_parts(self) -> tuple[str, ...]:
        self._check_names()
        return self._part_names()

    def score(self, config: Reward, row: Row, grade: Grade) -> Scores:
        text = grade.text or ""
        parts = dict(grade.parts or {})
        score = LOWEST_REWARD
        if text:
            known_parts = dict(parts)
            if grade.judge_score is not None:
                known_parts[JUDGE] = grade.judge_score / 5
            score = self._reward(known_parts, config)
        scores = {
            "score": score,
            JUDGE: math.nan if grade.judge_score is None else grade.judge_score,
        }
        part_names = self._part_names()
        for name, value in self.text_metrics(row, text, parts).items():
            if name in part_names:
                scores[name] = value
        return scores | parts

    @property
    def primary_metric(self) -> PrimaryMetric:
        first = self.metrics[0]
        return PrimaryMetric(JUDGE if first.name == QUALITY else first.name, first.en)

    def dev_metric(self, config: Reward, rows: Sequence[Row]) -> str:
        """The first metric, where RL measures it and a dev row can have it, else the reward."""
        part = self.primary_metric.part
        is_measured = part != JUDGE or self.judged_share(config) > 0
        if is_measured and any(self.can_have_part(part, row) for row in rows):
            return part
        return "score"

    def can_have(self, part: str, row: Row) -> bool:
        return self.can_have_part(part, row)

    def _weights(self, config: Reward) -> dict[str, float]:
        return {**self.weights, **config.part_weights}

    def _reward(self, known_parts: dict[str, float], config: Reward) -> float:
        formula = self.reward or weighted_mean
        reward = formula(known_parts, self._weights(config))
        if math.isnan(reward):
            names = ", ".join(known_parts) or "none"
            raise ConfigError(
                f"recipe `{self.recipe}`: no part with a weight is known for this row "
                f"(known: {names})"
            )
        return reward

    def _part_names(self) -> tuple[str, ...]:
        metrics = [metric.name for metric in self.metrics if metric.name != QUALITY]
        return tuple(dict.fromkeys((JUDGE, *self.rule_parts, *metrics)))

    def _check_names(self) -> None:
        reserved = sorted(_RESERVED_NAMES.intersection(self._part_names()))
        if reserved:
            raise ConfigError(
                f"recipe `{self.recipe}`: training has figures called {', '.join(reserved)}; "
                "rename the part"
            )


def weighted_mean(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The weighted mean of the parts, from [0, 1] to [−1, 1].

    A part counts where it has a weight; NaN where none does.
    """
    counted = [(weights[name], value) for name, value in parts.items() if weights.get(name, 0) > 0]
    if not counted:
        return math.nan
    weighted_sum = sum(weight * value for weight, value in counted)
    mean = weighted_sum / sum(weight for weight, _ in counted)
    return max(-1.0, min(1.0, 2 * mean - 1))
