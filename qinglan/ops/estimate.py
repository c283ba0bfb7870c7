"""What a run would cost, before it starts: which questions the ledger can't answer, and what asking them would take.

A call takes the tokens that the model's earlier calls took on average; where there are too few of them, an upper bound.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from qinglan.clients.chat import TOKENS_PER_CHARACTER, Request, cost_usd
from qinglan.clients.rag import PASSAGE_CHARS
from qinglan.clients.roles import ChatRole, endpoint_of
from qinglan.config import EMBEDDED, Endpoint, FlowName, Price, Profile
from qinglan.data.forgotten import Tombstones
from qinglan.data.new_rows import take_new_rows
from qinglan.data.sources.database import query_database
from qinglan.data.versions import latest_version
from qinglan.data.workbook import read_rows
from qinglan.evaluation.red_team import cases_of
from qinglan.ledger import Ledger
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.distillation import distill_requests, extract_requests
from qinglan.recipes.kinds.recipe import JudgeUse
from qinglan.rows import Row, Split
from qinglan.runs.artifacts import write_jsonl
from qinglan.simulators.domains import sample_of
from qinglan.training.judge_agreement import PASSAGES_A_ROW

_ENOUGH_CALLS, _AT_ONCE = 20, 1000
_EXTRACT, _VERDICTS = "extract", "rl verdicts"
_PASSES = 2
"""Of the panel over each test question."""
_ARMS = 6
"""Of the evaluation at most, beside the further teachers: so many texts the panel reads of a question."""


class Estimate(BaseModel, frozen=True):
    role: ChatRole
    what: str
    """The stage that asks."""
    model: str
    questions: int
    """Asked at most."""
    known: int
    """Of these, answered by the ledger."""
    prompt_tokens: float
    """Per call."""
    completion_tokens: float
    cost_usd: float
    """At most."""
    expected_usd: float
    """Where RL repeats itself as `budget.rl_new_share` says."""
    measured_on: int
    """Earlier calls that the tokens are known from; 0 where they are an upper bound."""


@dataclass
class QuestionCounts:
    """Of the rows that are questions."""

    questions: int = 0
    sample: Row | None = None
    asked: Counter[str] = field(default_factory=Counter)
    """What distillation asks by role: nothing about a row that brings its own answer; and what `extract` asks."""
    known: Counter[str] = field(default_factory=Counter)
    """Of these, what the ledger can answer."""
    first: dict[str, Request] = field(default_factory=dict)
    """The first request of each."""
    test: int = 0
    dev: int = 0
    train: int = 0
    """Of these splits, by the workbook or, of rows that it gives none, by the shares of `dataset`."""
    learnt: int = 0
    """Not known to be of another split than train."""
    labelled: int = 0
    """Of these, with a gold document."""


@contextmanager
def questions_of(profile: Profile) -> Iterator[Iterator[Row]]:
    """The questions that a run of this profile would read now; of a database, a snapshot that is deleted afterwards."""
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


def count_questions(profile: Profile, rows: Iterable[Row], ledger: Ledger | None = None) -> QuestionCounts:
    """How many questions these rows hold and, where a ledger is given, how many of them it can answer."""
    asked, read = (distill_requests(profile), extract_requests(profile)) if ledger else (None, None)
    counts, splits = QuestionCounts(), Counter[Split | None]()
    stream = (row for row in rows if row.status == "ok")
    while some := list(islice(stream, _AT_ONCE)):
        counts.sample = counts.sample or some[0]
        splits.update(row.split for row in some)
        counts.labelled += sum(row.split in ("train", None) and bool(row.gold_id) for row in some)
        hashes: dict[str, set[str]] = {}
        if ledger is None or asked is None or read is None:
            continue
        dialogues = [(_EXTRACT, request) for row in some if (request := read(row))]
        for role, request in chain(dialogues, *(asked(row).items() for row in some)):
            counts.asked[role] += 1
            counts.first.setdefault(role, request)
            hashes.setdefault(role, set()).add(request.request_hash)
        for role, requests in hashes.items():
            counts.known[role] += len(ledger.get_many(requests))
    train, dev = profile.dataset.train_share, profile.dataset.dev_share
    counts.questions, counts.learnt = splits.total(), splits["train"] + splits[None]
    counts.test = splits["test"] + round(splits[None] * (1 - train - dev))
    counts.dev = splits["dev"] + round(splits[None] * dev)
    counts.train = splits["train"] + round(splits[None] * train)
    return counts


def estimate(profile: Profile, flow: FlowName, counts: QuestionCounts, ledger: Ledger) -> list[Estimate]:
    """What the flow would ask of teacher, answerer and judge for these questions.

    The judge's questions depend on answers that are not there yet, so they count as unknown.
    """
    found: list[Estimate] = []
    for part in _parts(profile, flow, counts) if counts.sample else ():
        prompt, completion, measured_on = _tokens(profile, ledger, part, counts)
        price = part.price or profile.prices[part.endpoint.model]
        factor = price.batch_factor if part.what == "distill" and profile.distill.mode == "batch_api" else 1.0
        most_usd = factor * max(0, part.questions - part.known) * cost_usd(price, prompt, completion)
        estimated = Estimate(
            role=part.role,
            what=part.what,
            model=part.endpoint.model,
            questions=part.questions,
            known=min(part.known, part.questions),
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost_usd=most_usd,
            expected_usd=most_usd * (profile.budget.rl_new_share if part.what.startswith("rl") else 1.0),
            measured_on=measured_on,
        )
        found.append(estimated)
    return found


@dataclass(frozen=True)
class _Part:
    role: ChatRole
    what: str
    endpoint: Endpoint
    questions: int
    known: int = 0
    use: JudgeUse = "text"
    price: Price | None = None
    """Where it stands elsewhere than in `prices`."""


def _parts(profile: Profile, flow: FlowName, counts: QuestionCounts) -> Iterator[_Part]:
    recipe, teachers = get_recipe(profile.recipe), {"teacher": profile.teacher, **profile.compare.teachers}
    if flow in ("pipeline", "refresh", "compare") and (dialogues := counts.asked[_EXTRACT]):
        yield _Part("teacher", _EXTRACT, profile.teacher, dialogues, counts.known[_EXTRACT])
    if flow in ("pipeline", "refresh"):
        for role in recipe.DISTILL_ROLES:
            yield _Part(role, "distill", endpoint_of(profile, role), counts.asked[role], counts.known[role])
    if flow == "compare":
        for label, endpoint in teachers.items():
            yield _Part("teacher", f"distill {label}", endpoint, min(counts.questions, profile.compare.rows))
    if flow in ("pipeline", "train", "evaluate"):
        cases = sum(not case.must_pass for case in cases_of(profile))
        for name, endpoint in teachers.items():
            questions = counts.test if name in profile.evaluate.teachers else 0
            questions += cases if name in profile.gate.rivals else 0
            if questions:
                yield _Part("teacher", f"evaluate {name}", endpoint, questions)
    if "judge" in recipe.graders:
        yield from _judgements(profile, flow, counts)


def _judgements(profile: Profile, flow: FlowName, counts: QuestionCounts) -> Iterator[_Part]:
    rl, judge = profile.rl.scheduled(counts.train), profile.judge
    retrieves = get_recipe(profile.recipe).retrieves
    if flow == "compare" and profile.validation.judge_baseline:
        for label in ("teacher", *profile.compare.teachers):
            yield _Part("judge", f"validate {label}", judge, min(counts.questions, profile.compare.rows))
    if flow in ("pipeline", "refresh") and profile.validation.judge_baseline:
        yield _Part("judge", "validate", judge, counts.questions)
    if flow in ("pipeline", "train"):
        validations = math.ceil(rl.total_steps / rl.test_freq) + rl.val_before_train
        samples = rl.total_steps * rl.train_batch_size * rl.rollouts_per_prompt + validations * counts.dev
        if local := judge.local:
            yield _Part("judge", "local judge", judge, PASSAGES_A_ROW * local.agreement_rows, use="passage")
            served = Endpoint(model=local.model, max_tokens=local.max_tokens)
            yield _Part("judge", _VERDICTS, served, samples, use="passage", price=local.price)
        else:
            yield _Part("judge", "rl", judge, round(samples * profile.reward.judged_share))
            # About the best passage of a sample without a label in use.
            if retrieves and profile.reward.relevance_gate and counts.learnt:
                unlabelled = counts.learnt - counts.labelled if profile.reward.use_labels else counts.learnt
                if passages := round(samples * unlabelled / counts.learnt):
                    yield _Part("judge", "rl passages", judge, passages, use="passage")
    if flow in ("pipeline", "train", "evaluate"):
        each = _PASSES if retrieves else _ARMS + len(profile.evaluate.teachers)
        yield _Part("judge", "evaluate", judge, each * counts.test, use="texts")


def _tokens(profile: Profile, ledger: Ledger, part: _Part, counts: QuestionCounts) -> tuple[float, float, int]:
    """Of a call: those of the prompt and of the answer, and the number of earlier calls that they are known from."""
    measured = ledger.mean_tokens(part.endpoint.model, part.role)
    # Most calls are about one question or rewrite, so that their mean says too little about a dialogue or a panel.
    if measured and measured[2] >= _ENOUGH_CALLS and part.what != _EXTRACT and part.use != "texts":
        return measured
    asked = _EXTRACT if part.what == _EXTRACT else part.role
    first = counts.first.get(asked) if part.role != "judge" or part.what == "distill" else None
    if first:
        messages = first.body["messages"]
    else:
        assert counts.sample  # else there is no part
        passage = "字" * PASSAGE_CHARS * (2 if part.what == _VERDICTS else 1)
        texts = _ARMS + len(profile.evaluate.teachers)
        messages = get_recipe(profile.recipe).estimate_messages(part.use, counts.sample, profile, texts, passage)
    return TOKENS_PER_CHARACTER * sum(len(message["content"]) for message in messages), part.endpoint.max_tokens, 0
