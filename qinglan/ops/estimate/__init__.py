"""The cost of a run before it starts: questions that the ledger can't answer, and their price.

An answer is as long as the model's earlier ones on average; where there are too few of them, as
long as it may be.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from qinglan.clients.completions import TOKENS_PER_CHARACTER, cost_usd
from qinglan.clients.rag.answers import PASSAGE_CHARS
from qinglan.clients.roles import ChatRole, endpoint_of
from qinglan.config import ENGINE_FLOWS, TRAINING_FLOWS, Endpoint, FlowName, Price, Profile
from qinglan.config.training import Rl
from qinglan.evaluation.red_team import cases_of
from qinglan.ledger import Ledger
from qinglan.ops.estimate.counting import (
    ARMS,
    EXTRACT,
    STUDENTS,
    VALIDATE,
    QuestionCounts,
    compared_teachers,
    comparison_prompts,
)
from qinglan.recipes import Recipe, get_recipe
from qinglan.training.judge_agreement import PASSAGES_A_ROW

_DATA_FLOWS = ("pipeline", "refresh")
_VERDICTS = "rl verdicts"
_ENOUGH_CALLS = 20
"""Earlier calls of a model whose mean says how long its next answers are."""


@dataclass(frozen=True)
class _Part:
    """The questions of one stage to one model."""

    role: ChatRole
    what: str
    """The stage that asks."""
    endpoint: Endpoint
    questions: int
    """Questions at most."""
    known: int = 0
    """Those of the questions that the ledger can answer."""
    prompts_as: str = "text"
    """Key of `QuestionCounts.prompts` whose prompts are as long as these."""
    price: Price | None = None
    """The price, where it stands elsewhere than in `prices`."""

    @property
    def model(self) -> str:
        return self.endpoint.model


@dataclass(frozen=True, kw_only=True)
class Estimate(_Part):
    """The questions of one stage to one model, with their cost."""

    prompt_tokens: float
    """Tokens per call."""
    completion_tokens: float
    cost_usd: float
    """Cost at most, where `measured_on` is 0."""
    expected_usd: float
    """Cost where RL repeats itself as `budget.rl_new_share` says."""
    measured_on: int
    """Earlier calls that the answer's tokens are known from; 0 where they are an upper bound."""


def estimate(
    profile: Profile, flow: FlowName, counts: QuestionCounts, ledger: Ledger
) -> list[Estimate]:
    """The questions of the flow to teacher, answerer and judge, with their cost.

    The judge's questions about answers that are not there yet count as unknown.
    """
    if not counts.questions:
        return []
    estimates: list[Estimate] = []
    for part in _parts(profile, flow, counts):
        prompt_tokens, completion_tokens, measured_on = _tokens(ledger, part, counts)
        price = part.price or profile.prices[part.model]
        is_in_batches = part.what == "distill" and profile.distill.mode == "batch_api"
        factor = price.batch_factor if is_in_batches else 1.0
        unknown = part.questions - part.known
        most_usd = factor * unknown * cost_usd(price, prompt_tokens, completion_tokens)
        new_share = profile.budget.rl_new_share if part.what.startswith("rl") else 1.0
        estimates.append(
            Estimate(
                **vars(part),
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                cost_usd=most_usd,
                expected_usd=most_usd * new_share,
                measured_on=measured_on,
            )
        )
    return estimates


def rag_requests(profile: Profile, flow: FlowName, counts: QuestionCounts) -> dict[str, int]:
    """The flow's requests to the RAG at most, by stage."""
    if not get_recipe(profile.recipe).grader.asks_rag:
        return {}
    requests: dict[str, int] = {}
    if flow in _DATA_FLOWS:
        # Each question, and its rewrite.
        requests["validate"] = 2 * counts.questions
    if flow in TRAINING_FLOWS:
        requests["rl"] = _rl_samples(profile.rl.scheduled(counts.rl_prompts), counts)
    if flow in ENGINE_FLOWS:
        arms = ARMS + len(profile.evaluate.teachers)
        requests["evaluate"] = arms * counts.test
    if flow == "compare":
        questions = min(counts.questions, profile.compare.rows)
        teachers = 1 + len(profile.compare.teachers)
        requests["compare"] = 2 * questions * teachers
    return {stage: count for stage, count in requests.items() if count}


def _rl_samples(rl: Rl, counts: QuestionCounts) -> int:
    """Samples that RL scores, those of its validations too."""
    validations = math.ceil(rl.total_steps / rl.test_freq) + rl.val_before_train
    return rl.total_steps * rl.train_batch_size * rl.rollouts_per_prompt + validations * counts.dev


def _parts(profile: Profile, flow: FlowName, counts: QuestionCounts) -> Iterator[_Part]:
    """All questions of the flow, by stage and model, in the order of the stages."""
    recipe = get_recipe(profile.recipe)
    yield from _distill_parts(profile, flow, counts, recipe)
    if flow in ENGINE_FLOWS:
        yield from _teacher_parts_of_evaluation(profile, counts)
    if not recipe.grader.asks_judge:
        return
    if profile.validation.judge_baseline:
        yield from _judge_parts_of_validation(profile, flow, counts)
    if flow in TRAINING_FLOWS:
        yield from _judge_parts_of_rl(profile, counts)
    if flow in ENGINE_FLOWS:
        yield _judge_part_of_evaluation(profile, counts, recipe)


def _distill_parts(
    profile: Profile, flow: FlowName, counts: QuestionCounts, recipe: Recipe
) -> Iterator[_Part]:
    """Dialogues to read, and questions to answer."""
    dialogues = counts.prompts[EXTRACT]
    if flow in (*_DATA_FLOWS, "compare") and dialogues:
        yield _Part(
            role="teacher",
            what=EXTRACT,
            endpoint=profile.teacher,
            questions=dialogues,
            known=counts.answered[EXTRACT],
            prompts_as=EXTRACT,
        )
    if flow in _DATA_FLOWS:
        for role in recipe.DISTILL_ROLES:
            yield _Part(
                role=role,
                what="distill",
                endpoint=endpoint_of(profile, role),
                questions=counts.prompts[role],
                known=counts.answered[role],
                prompts_as=role,
            )
    if flow == "compare":
        for label, endpoint in compared_teachers(profile).items():
            key = comparison_prompts(label)
            yield _Part(
                role="teacher",
                what=key,
                endpoint=endpoint,
                questions=counts.prompts[key],
                known=counts.answered[key],
                prompts_as=key,
            )


def _teacher_parts_of_evaluation(profile: Profile, counts: QuestionCounts) -> Iterator[_Part]:
    """The test questions to further teachers, and the red team's cases to the gate's rivals."""
    cases = sum(not case.must_pass for case in cases_of(profile))
    for name, endpoint in compared_teachers(profile).items():
        questions = 0
        if name in profile.evaluate.teachers:
            questions += counts.test
        if name in profile.gate.rivals:
            questions += cases
        if questions:
            yield _Part(
                role="teacher",
                what=f"evaluate {name}",
                endpoint=endpoint,
                questions=questions,
                prompts_as="teacher",
            )


def _judge_parts_of_validation(
    profile: Profile, flow: FlowName, counts: QuestionCounts
) -> Iterator[_Part]:
    if flow == "compare":
        questions = min(counts.questions, profile.compare.rows)
        for label in compared_teachers(profile):
            yield _Part("judge", f"validate {label}", profile.judge, questions)
    if flow in _DATA_FLOWS:
        answered = counts.answered[VALIDATE]
        yield _Part("judge", VALIDATE, profile.judge, counts.questions, answered)


def _judge_parts_of_rl(profile: Profile, counts: QuestionCounts) -> Iterator[_Part]:
    """The judgements of RL's samples, by the judge or, with `judge.local`, by the site's own model.

    That one is first compared with the judge.
    """
    samples = _rl_samples(profile.rl.scheduled(counts.rl_prompts), counts)
    judge = profile.judge
    local = judge.local
    if local:
        passages = PASSAGES_A_ROW * local.agreement_rows
        yield _Part("judge", "local judge", judge, passages, prompts_as="passage")
        served = Endpoint(model=local.model, max_tokens=local.max_tokens)
        yield _Part("judge", _VERDICTS, served, samples, prompts_as="passage", price=local.price)
        return
    yield _Part("judge", "rl", judge, round(samples * profile.reward.judged_share))
    passages = 0
    if counts.learnt:
        passages = round(samples * counts.passage_judged / counts.learnt)
    if passages:
        yield _Part("judge", "rl passages", judge, passages, prompts_as="passage")


def _judge_part_of_evaluation(profile: Profile, counts: QuestionCounts, recipe: Recipe) -> _Part:
    arms = STUDENTS + len(profile.evaluate.teachers)
    # Answers that rows bring are no arm.
    if counts.prompts["teacher"] == counts.questions:
        arms += 1
    use, calls = recipe.grader.evaluation_calls(arms)
    return _Part("judge", "evaluate", profile.judge, calls * counts.test, prompts_as=use)


def _tokens(ledger: Ledger, part: _Part, counts: QuestionCounts) -> tuple[float, float, int]:
    """Tokens of a call's prompt and answer, and the number of earlier calls they are known from."""
    measured = ledger.mean_tokens(part.model, part.role)
    # Most calls are about one question or rewrite, so that their mean says too little about a
    # dialogue or a panel.
    is_unusual = part.prompts_as in (EXTRACT, "texts", "passage")
    if measured and (measured[2] < _ENOUGH_CALLS or is_unusual):
        measured = None
    if measured and part.prompts_as == "text":
        return measured
    key = part.prompts_as if counts.prompts[part.prompts_as] else "text"
    chars = counts.prompt_chars[key] / max(1, counts.prompts[key])
    if part.what == _VERDICTS:
        # To stay an upper bound: a verdict's prompt may be a passage longer than the judge's.
        chars += PASSAGE_CHARS
    prompt_tokens = TOKENS_PER_CHARACTER * chars
    if measured:
        _, completion_tokens, calls = measured
        return prompt_tokens, completion_tokens, calls
    return prompt_tokens, part.endpoint.max_tokens, 0
