"""Counts the questions of a run, and the prompts that they make.

Prompts are counted by the stage or role that asks; of those whose text is known in advance, the
ledger says how many it can answer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from qinglan.clients.completions import Request
from qinglan.clients.openai_protocol import Message
from qinglan.clients.rag.answers import PASSAGE_CHARS
from qinglan.clients.roles import ChatRole
from qinglan.config import EMBEDDED, Endpoint, Profile
from qinglan.data.dataset.pools import assign, draw_rl_prompts
from qinglan.data.dataset.splits import split_of
from qinglan.data.forgotten import Tombstones
from qinglan.data.new_rows import take_new_rows
from qinglan.data.sources.database import query_database
from qinglan.data.versions import latest_version
from qinglan.data.workbook import read_rows
from qinglan.evaluation.teacher_comparison import draw
from qinglan.ledger import Ledger
from qinglan.recipes import Recipe, get_recipe
from qinglan.recipes.requests import (
    distill_requests,
    extract_requests,
    judge_requests,
    teacher_requests,
)
from qinglan.rows import Row, Split
from qinglan.runs.artifacts import write_jsonl
from qinglan.simulators.domains import sample_of

EXTRACT = "extract"
VALIDATE = "validate"
STUDENTS = 4
"""Arms of the evaluation at most: the base model, SFT's, RL's and the champion."""
ARMS = STUDENTS + 2
"""Arms with the teacher and the original question: so many texts the panel reads of a question,
beside further teachers'."""
_BATCH_ROWS = 1000
"""Rows for which the ledger is asked at once."""
_LONGEST_PASSAGE = "字" * PASSAGE_CHARS


@dataclass
class QuestionCounts:
    """Counts of the rows that are questions."""

    questions: int = 0
    prompts: Counter[str] = field(default_factory=Counter)
    """Prompts by who asks: a role of distillation, `extract`, `validate`, a teacher of a
    comparison, or a `JudgeUse`. A row that brings its own answer makes none for distillation."""
    answered: Counter[str] = field(default_factory=Counter)
    """Those of the prompts that the ledger can answer."""
    prompt_chars: Counter[str] = field(default_factory=Counter)
    """Characters of all prompts, of the answered ones too."""
    test: int = 0
    dev: int = 0
    train: int = 0
    """Rows of these splits; one without a split is where the dataset stage would place it."""
    rl_prompts: int = 0
    """Rows that the dataset stage would draw of `train` for RL, were all of them usable."""
    learnt: int = 0
    """Rows that are not known to be of another split than train."""
    passage_judged: int = 0
    """Those of the learnt rows whose samples' best passages are judged in RL."""

    def add_prompts(self, key: str, prompts: Sequence[Sequence[Message]]) -> None:
        self.prompts[key] += len(prompts)
        for prompt in prompts:
            self.prompt_chars[key] += sum(len(message["content"]) for message in prompt)

    def add_requests(self, key: str, requests: Sequence[Request], ledger: Ledger) -> None:
        """Count requests as prompts, and those that the ledger can answer."""
        self.add_prompts(key, [request.body["messages"] for request in requests])
        hashes = {request.request_hash for request in requests}
        self.answered[key] += len(ledger.get_many(hashes))


@dataclass(frozen=True)
class _Requests:
    """Functions that make the requests about a row to a profile's models."""

    recipe: Recipe
    distill: Callable[[Row], dict[ChatRole, Request]]
    extract: Callable[[Row], Request | None]
    judge: Callable[[Row, str], Request | None]

    @classmethod
    def of(cls, profile: Profile) -> "_Requests":
        return cls(
            get_recipe(profile.recipe),
            distill_requests(profile),
            extract_requests(profile),
            judge_requests(profile),
        )


@contextmanager
def questions_of(profile: Profile) -> Iterator[Iterator[Row]]:
    """The questions that a run of this profile would read now.

    Those of a database are a snapshot that is deleted afterwards.
    """
    data = profile.data
    inputs = get_recipe(profile.recipe).INPUTS
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
    """Count the questions in these rows and, where a ledger is given, what is asked about them."""
    requests = _Requests.of(profile)
    grader = requests.recipe.grader
    counts = QuestionCounts()
    rows_by_split = Counter[Split]()
    train_rows: list[Row] = []
    compared_rows: list[Row] = []
    usable_rows = (row for row in rows if row.status == "ok")
    while batch := list(islice(usable_rows, _BATCH_ROWS)):
        for row in batch:
            split = row.split or split_of(row.id, profile.dataset)
            rows_by_split[split] += 1
            if split == "train" and profile.dataset.rl_shares:
                train_rows.append(row)
            if row.split in ("train", None):
                counts.learnt += 1
                counts.passage_judged += grader.needs_relevance(profile.reward, row)
        if ledger:
            _count_prompts(counts, batch, requests, profile, ledger)
            # A sample of the sample and the next rows is one of all of them.
            compared_rows = draw([*compared_rows, *batch], profile.compare.rows)
    if ledger:
        _count_prompts_of_comparison(counts, compared_rows, profile, ledger)
    counts.questions = rows_by_split.total()
    counts.train = rows_by_split["train"]
    counts.dev = rows_by_split["dev"]
    counts.test = rows_by_split["test"]
    pooled_rows = assign(train_rows, requests.recipe, profile.data.pool_shares)
    repeats = draw_rl_prompts(pooled_rows, profile.dataset).repeats
    counts.rl_prompts = counts.train if repeats is None else sum(repeats.values())
    return counts


def comparison_prompts(label: str) -> str:
    """The key in `QuestionCounts.prompts` of a teacher of the comparison."""
    return f"distill {label}"


def _count_prompts(
    counts: QuestionCounts,
    rows: Sequence[Row],
    requests: _Requests,
    profile: Profile,
    ledger: Ledger,
) -> None:
    """Add what `extract`, distillation, validation and the judge ask about the rows."""
    recipe = requests.recipe
    counts.add_requests(EXTRACT, list(filter(None, map(requests.extract, rows))), ledger)
    requests_by_row = list(map(requests.distill, rows))
    for role in recipe.DISTILL_ROLES:
        of_role = [by_role[role] for by_role in requests_by_row if role in by_role]
        counts.add_requests(role, of_role, ledger)
    judge_requests_of_own: list[Request] = []
    for row in rows:
        # Answers that rows bring are there already, so that their judgement may be, too.
        own_answer = recipe.own_answer(row)
        request = requests.judge(row, own_answer) if own_answer else None
        if request:
            judge_requests_of_own.append(request)
    counts.add_requests(VALIDATE, judge_requests_of_own, ledger)
    texts = ARMS + len(profile.evaluate.teachers)
    for use in recipe.grader.judge_uses:
        prompts: list[list[Message]] = []
        for row in rows:
            messages = recipe.grader.estimate_messages(use, row, profile, texts, _LONGEST_PASSAGE)
            prompts.append(messages)
        counts.add_prompts(use, prompts)


def compared_teachers(profile: Profile) -> dict[str, Endpoint]:
    """All teachers of a comparison, the profile's own first, by their labels."""
    return {"teacher": profile.teacher, **profile.compare.teachers}


def _count_prompts_of_comparison(
    counts: QuestionCounts, rows: Sequence[Row], profile: Profile, ledger: Ledger
) -> None:
    """Add what each teacher of a comparison is asked about the rows that are drawn for it."""
    for label, teacher in compared_teachers(profile).items():
        teacher_request = teacher_requests(profile.model_copy(update={"teacher": teacher}))
        requests = list(filter(None, map(teacher_request, rows)))
        counts.add_requests(comparison_prompts(label), requests, ledger)
