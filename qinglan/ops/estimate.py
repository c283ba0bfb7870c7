"""What a run would cost, before it starts: which questions the ledger can't answer, and what asking
them would take.

An answer is as long as the model's earlier ones on average; where there are too few of them, as
long as it may be.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from qinglan.clients.chat import TOKENS_PER_CHARACTER, Request, cost_usd
from qinglan.clients.openai_protocol import Message
from qinglan.clients.rag import PASSAGE_CHARS
from qinglan.clients.roles import ChatRole, endpoint_of
from qinglan.config import EMBEDDED, Endpoint, FlowName, Price, Profile
from qinglan.config.training import Rl
from qinglan.data.dataset.pools import assign, draw_rl_prompts
from qinglan.data.dataset.splits import split_of
from qinglan.data.forgotten import Tombstones
from qinglan.data.new_rows import take_new_rows
from qinglan.data.sources.database import query_database
from qinglan.data.versions import latest_version
from qinglan.data.workbook import read_rows
from qinglan.evaluation.red_team import cases_of
from qinglan.evaluation.teacher_comparison import draw
from qinglan.grading.grader import JudgeUse
from qinglan.ledger import Ledger
from qinglan.recipes import get_recipe
from qinglan.recipes.requests import (
    distill_requests,
    extract_requests,
    judge_requests,
    teacher_requests,
)
from qinglan.rows import Row, Split
from qinglan.runs.artifacts import write_jsonl
from qinglan.simulators.domains import sample_of
from qinglan.training.judge_agreement import PASSAGES_A_ROW

_ENOUGH_CALLS, _AT_ONCE = 20, 1000
_EXTRACT, _VALIDATE, _VERDICTS = "extract", "validate", "rl verdicts"
_PASSES = 2
"""Of the panel over each test question."""
_STUDENTS = 4
"""Of the evaluation at most: the base model, SFT's, RL's and the champion."""
_ARMS = _STUDENTS + 2
"""With the teacher and the original question: so many texts the panel reads of a question, beside
further teachers'."""


@dataclass(frozen=True)
class _Part:
    """What a stage asks of one model."""

    role: ChatRole
    what: str
    """The stage that asks."""
    endpoint: Endpoint
    questions: int
    """Asked at most."""
    known: int = 0
    """Of these, answered by the ledger."""
    asked: str = "text"
    """What of `QuestionCounts` has prompts as long as these."""
    price: Price | None = None
    """Where it stands elsewhere than in `prices`."""

    @property
    def model(self) -> str:
        return self.endpoint.model


@dataclass(frozen=True, kw_only=True)
class Estimate(_Part):
    prompt_tokens: float
    """Per call."""
    completion_tokens: float
    cost_usd: float
    """At most, where `measured_on` is 0."""
    expected_usd: float
    """Where RL repeats itself as `budget.rl_new_share` says."""
    measured_on: int
    """Earlier calls that the answer's tokens are known from; 0 where they are an upper bound."""


@dataclass
class QuestionCounts:
    """Of the rows that are questions."""

    questions: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    """What distillation asks by role: nothing about a row that brings its own answer; what
    `extract` asks, and each teacher of a comparison; and by `JudgeUse` the questions that the
    judge's prompts are about."""
    known: Counter[str] = field(default_factory=Counter)
    """Of these, what the ledger can answer."""
    prompt_chars: Counter[str] = field(default_factory=Counter)
    """Of all that is asked, the known too."""
    test: int = 0
    dev: int = 0
    train: int = 0
    """Of these splits; a row without one as the dataset stage would place it by itself."""
    rl_prompts: int = 0
    """What the dataset stage would draw of `train` for RL (`dataset.rl_shares`), were all of them
    usable."""
    learnt: int = 0
    """Not known to be of another split than train."""
    labelled: int = 0
    """Of these, with a gold document."""

    def add_prompts(self, what: str, prompts: Sequence[Sequence[Message]]) -> None:
        self.asked[what] += len(prompts)
        self.prompt_chars[what] += sum(
            len(said["content"]) for prompt in prompts for said in prompt
        )

    def add(self, what: str, requests: Sequence[Request], ledger: Ledger) -> None:
        self.add_prompts(what, [request.body["messages"] for request in requests])
        self.known[what] += len(ledger.get_many({request.request_hash for request in requests}))


@contextmanager
def questions_of(profile: Profile) -> Iterator[Iterator[Row]]:
    """The questions that a run of this profile would read now; of a database, a snapshot that is
    deleted afterwards."""
    data, inputs = profile.data, get_recipe(profile.recipe).INPUTS
    with TemporaryDirectory() as folder:
        if data.sql:
            path = Path(folder) / "source.jsonl"
            write_jsonl(path, query_database(data, inputs))
        elif data.workbook == EMBEDDED:
            path = sample_of(profile, "data.workbook").workbook
        else:
            path = Path(data.workbook)
        forgotten = Tombstones.read(profile.paths.state)
        read = partial(read_rows, path, data, profile.tenant, inputs=inputs, forgotten=forgotten)
        if profile.reads_request_log:
            latest = latest_version(profile)
            yield take_new_rows(read(), read(), profile, latest.id if latest else "")
        else:
            yield read()


def count_questions(
    profile: Profile, rows: Iterable[Row], ledger: Ledger | None = None
) -> QuestionCounts:
    """How many questions these rows hold and, where a ledger is given, how many of them it can
    answer."""
    recipe, counts, splits, drawn = (
        get_recipe(profile.recipe),
        QuestionCounts(),
        Counter[Split](),
        list[Row](),
    )
    trained: list[Row] = []
    distilled, extracted, judged = (
        distill_requests(profile),
        extract_requests(profile),
        judge_requests(profile),
    )
    most = _ARMS + len(profile.evaluate.teachers), "字" * PASSAGE_CHARS
    stream = (row for row in rows if row.status == "ok")
    while some := list(islice(stream, _AT_ONCE)):
        placed = [row.split or split_of(row.id, profile.dataset) for row in some]
        splits.update(placed)
        if profile.dataset.rl_shares:
            trained += (row for row, split in zip(some, placed, strict=True) if split == "train")
        counts.learnt += sum(row.split in ("train", None) for row in some)
        counts.labelled += sum(row.split in ("train", None) and bool(row.gold_id) for row in some)
        if ledger is None:
            continue
        drawn = draw([*drawn, *some], profile.compare.rows)
        counts.add(_EXTRACT, list(filter(None, map(extracted, some))), ledger)
        requests = list(map(distilled, some))
        for role in recipe.DISTILL_ROLES:
            counts.add(role, [each[role] for each in requests if role in each], ledger)
        own = [(row, text) for row in some if (text := recipe.own_answer(row))]
        counts.add(_VALIDATE, list(filter(None, starmap(judged, own))), ledger)
        for use in get_args(JudgeUse) if "judge" in recipe.grader.services else ():
            counts.add_prompts(
                use, [recipe.grader.estimate_messages(use, row, profile, *most) for row in some]
            )
    if ledger:
        for label, teacher in {"teacher": profile.teacher, **profile.compare.teachers}.items():
            asked = teacher_requests(profile.model_copy(update={"teacher": teacher}))
            counts.add(f"distill {label}", list(filter(None, map(asked, drawn))), ledger)
    counts.questions = splits.total()
    counts.train, counts.dev, counts.test = (splits[each] for each in get_args(Split))
    repeats = draw_rl_prompts(
        assign(trained, recipe, profile.data.pool_shares), profile.dataset
    ).repeats
    counts.rl_prompts = counts.train if repeats is None else sum(repeats.values())
    return counts


def estimate(
    profile: Profile, flow: FlowName, counts: QuestionCounts, ledger: Ledger
) -> list[Estimate]:
    """What the flow would ask of teacher, answerer and judge for these questions.

    The judge's questions about answers that are not there yet count as unknown.
    """
    found: list[Estimate] = []
    for part in _parts(profile, flow, counts) if counts.questions else ():
        prompt, completion, measured_on = _tokens(ledger, part, counts)
        price = part.price or profile.prices[part.model]
        factor = (
            price.batch_factor
            if part.what == "distill" and profile.distill.mode == "batch_api"
            else 1.0
        )
        most_usd = factor * (part.questions - part.known) * cost_usd(price, prompt, completion)
        estimated = Estimate(
            **vars(part),
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost_usd=most_usd,
            expected_usd=most_usd
            * (profile.budget.rl_new_share if part.what.startswith("rl") else 1.0),
            measured_on=measured_on,
        )
        found.append(estimated)
    return found


def rag_requests(profile: Profile, flow: FlowName, counts: QuestionCounts) -> dict[str, int]:
    """What the flow would ask the RAG at most, by stage: question and rewrite, each sample, and
    each arm."""
    if not get_recipe(profile.recipe).grader.retrieves:
        return {}
    arms, compare = _ARMS + len(profile.evaluate.teachers), profile.compare
    stages = {
        "validate": 2 * counts.questions * (flow in ("pipeline", "refresh")),
        "rl": _rl_samples(profile.rl.scheduled(counts.rl_prompts), counts)
        * (flow in ("pipeline", "train")),
        "evaluate": arms * counts.test * (flow in ("pipeline", "train", "evaluate")),
        "compare": 2
        * min(counts.questions, compare.rows)
        * (1 + len(compare.teachers))
        * (flow == "compare"),
    }
    return {stage: asked for stage, asked in stages.items() if asked}


def _rl_samples(rl: Rl, counts: QuestionCounts) -> int:
    validations = math.ceil(rl.total_steps / rl.test_freq) + rl.val_before_train
    return rl.total_steps * rl.train_batch_size * rl.rollouts_per_prompt + validations * counts.dev


def _parts(profile: Profile, flow: FlowName, counts: QuestionCounts) -> Iterator[_Part]:
    recipe, teachers = (
        get_recipe(profile.recipe),
        {"teacher": profile.teacher, **profile.compare.teachers},
    )
    if flow in ("pipeline", "refresh", "compare") and (dialogues := counts.asked[_EXTRACT]):
        yield _Part(
            "teacher", _EXTRACT, profile.teacher, dialogues, counts.known[_EXTRACT], _EXTRACT
        )
    if flow in ("pipeline", "refresh"):
        for role in recipe.DISTILL_ROLES:
            yield _Part(
                role,
                "distill",
                endpoint_of(profile, role),
                counts.asked[role],
                counts.known[role],
                role,
            )
    if flow == "compare":
        for label, endpoint in teachers.items():
            what = f"distill {label}"
            yield _Part("teacher", what, endpoint, counts.asked[what], counts.known[what], what)
    if flow in ("pipeline", "train", "evaluate"):
        cases = sum(not case.must_pass for case in cases_of(profile))
        for name, endpoint in teachers.items():
            questions = counts.test if name in profile.evaluate.teachers else 0
            questions += cases if name in profile.gate.rivals else 0
            if questions:
                yield _Part("teacher", f"evaluate {name}", endpoint, questions, asked="teacher")
    if "judge" in recipe.grader.services:
        yield from _judgements(profile, flow, counts)


def _judgements(profile: Profile, flow: FlowName, counts: QuestionCounts) -> Iterator[_Part]:
    rl, judge = profile.rl.scheduled(counts.rl_prompts), profile.judge
    retrieves = get_recipe(profile.recipe).grader.retrieves
    if flow == "compare" and profile.validation.judge_baseline:
        for label in ("teacher", *profile.compare.teachers):
            yield _Part(
                "judge", f"validate {label}", judge, min(counts.questions, profile.compare.rows)
            )
    if flow in ("pipeline", "refresh") and profile.validation.judge_baseline:
        yield _Part("judge", _VALIDATE, judge, counts.questions, counts.known[_VALIDATE])
    if flow in ("pipeline", "train"):
        samples = _rl_samples(rl, counts)
        if local := judge.local:
            yield _Part(
                "judge",
                "local judge",
                judge,
                PASSAGES_A_ROW * local.agreement_rows,
                asked="passage",
            )
            served = Endpoint(model=local.model, max_tokens=local.max_tokens)
            yield _Part("judge", _VERDICTS, served, samples, asked="passage", price=local.price)
        else:
            yield _Part("judge", "rl", judge, round(samples * profile.reward.judged_share))
            # About the best passage of a sample without a label in use.
            if retrieves and profile.reward.relevance_gate and counts.learnt:
                unlabelled = (
                    counts.learnt - counts.labelled if profile.reward.use_labels else counts.learnt
                )
                if passages := round(samples * unlabelled / counts.learnt):
                    yield _Part("judge", "rl passages", judge, passages, asked="passage")
    if flow in ("pipeline", "train", "evaluate"):
        if retrieves:
            yield _Part("judge", "evaluate", judge, _PASSES * counts.test, asked="texts")
        else:  # one text at a time; answers that rows bring are no arm
            arms = (
                _STUDENTS
                + len(profile.evaluate.teachers)
                + (counts.asked["teacher"] == counts.questions)
            )
            yield _Part("judge", "evaluate", judge, arms * counts.test)


def _tokens(ledger: Ledger, part: _Part, counts: QuestionCounts) -> tuple[float, float, int]:
    """Of a call: those of the prompt and of the answer, and the number of earlier calls that these
    are known from."""
    measured = ledger.mean_tokens(part.model, part.role)
    # Most calls are about one question or rewrite, so that their mean says too little about a
    # dialogue or a panel.
    if measured and (measured[2] < _ENOUGH_CALLS or part.asked in (_EXTRACT, "texts", "passage")):
        measured = None
    if measured and part.asked == "text":
        return measured
    asked = part.asked if counts.asked[part.asked] else "text"
    chars = counts.prompt_chars[asked] / max(1, counts.asked[asked]) + PASSAGE_CHARS * (
        part.what == _VERDICTS
    )
    completion, measured_on = measured[1:] if measured else (part.endpoint.max_tokens, 0)
    return TOKENS_PER_CHARACTER * chars, completion, measured_on
