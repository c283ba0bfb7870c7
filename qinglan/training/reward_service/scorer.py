"""Scores the samples of reinforcement learning by the recipe's grader.

A failed call leaves a sample without a score. The RAG and the judge are asked nothing twice, and
are waited for while they are down.
"""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from qinglan.clients.chat import Answer, ChatClient
from qinglan.clients.completions import Account
from qinglan.clients.openai_protocol import JsonSchema, Message
from qinglan.clients.outages import OutageWait
from qinglan.clients.rag import CallCount, RagClient
from qinglan.clients.retrieval_cache import RetrievalCache
from qinglan.config import Tenant
from qinglan.errors import ConfigError, LedgerError
from qinglan.grading.grade import Grade, Scores
from qinglan.grading.grader import Grader
from qinglan.ledger import Ledger, ledger_url
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes import Recipe
from qinglan.recipes.passage_judge import BEST, PassageJudge, verdict_recipe
from qinglan.rows import Retrieved, Row, hash_fraction
from qinglan.training.reward_service.samples import write_sample
from qinglan.training.reward_service.settings import RewardService

_SPECIAL_TOKEN = re.compile(r"<\|[^|]*\|>")
Value = TypeVar("Value")


def judge_asked(question: str, text: str, share: float) -> bool:
    """Tell whether this sample is in the judged share.

    Its content decides, so that reruns agree.
    """
    return hash_fraction(f"{question}\x1f{text}") < share


@dataclass
class Sample:
    """One sample on its way, and what it took."""

    row_id: str | None
    text: str
    rag: CallCount | None = None
    """None where texts are not retrieved with."""
    rag_cached: bool = False
    begin_s: float = field(default_factory=time.perf_counter)
    passage: str = ""
    """The passage that the judge was asked about."""
    judge_asked: int = 0
    """How many questions the judge was asked about it."""
    judge_answers: list[Answer[Any]] = field(default_factory=list)
    failed_by: Literal["rag", "judge", "ledger"] | None = None

    @property
    def usage(self) -> dict[str, float | None]:
        """Calls and time; None for what is not known."""
        usage: dict[str, float | None] = {}
        if self.rag:
            usage["rag_calls"] = self.rag.made
            usage["rag_cached"] = self.rag_cached
        new_answers = [answer for answer in self.judge_answers if not answer.cached]
        cached_count = len(self.judge_answers) - len(new_answers)
        usage["judge_asked"] = self.judge_asked
        usage["judge_cached"] = cached_count if self.judge_answers else None
        usage["judge_cost_usd"] = sum(answer.cost_usd for answer in new_answers)
        usage["latency_ms"] = 1000 * (time.perf_counter() - self.begin_s)
        return usage

    @contextmanager
    def calling(self, service: Literal["rag", "judge"]) -> Iterator[None]:
        """Note the service whose call fails in here, or the ledger where that is at fault."""
        try:
            yield
        except Exception as error:
            self.failed_by = "ledger" if isinstance(error, LedgerError) else service
            raise

    def log_entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"row_id": self.row_id, "text": self.text}
        for name, value in self.usage.items():
            if value is not None:
                entry[name] = value
        if self.passage:
            entry["passage"] = self.passage
        if self.failed_by:
            entry["failed_by"] = self.failed_by
        if self.rag:
            entry["rag_failed"] = self.rag.failed
        return entry


class _SampleRag:
    """The RAG as one sample asks it: through the cache, with the calls counted."""

    def __init__(self, cache: RetrievalCache, sample: Sample, teacher_rewrite: str | None) -> None:
        self._cache = cache
        self._sample = sample
        self._teacher_rewrite = teacher_rewrite

    async def retrieve(self, query: str, rewritten_query: str | None = None) -> Retrieved:
        assert self._sample.rag is not None, "its service has a RAG"
        with self._sample.calling("rag"):
            answer = await self._cache.retrieve(
                query, rewritten_query, self._sample.rag, answered_rewrite=self._teacher_rewrite
            )
        self._sample.rag_cached = answer.is_cached
        return answer.retrieved


class _SampleJudge:
    """The judge as one sample asks it: waited for while it is down, with the answers counted."""

    def __init__(self, judge: ChatClient, wait: OutageWait, sample: Sample) -> None:
        self._judge = judge
        self._wait = wait
        self._sample = sample

    async def ask(
        self,
        messages: list[Message],
        parse: Callable[[str], Value],
        schema: JsonSchema | None = None,
    ) -> Answer[Value]:
        self._sample.judge_asked += 1
        ask = partial(self._judge.ask, messages, parse, schema)
        with self._sample.calling("judge"):
            answer = await self._wait.call(ask, answered=_is_from_service)
        self._sample.judge_answers.append(answer)
        return answer


def _is_from_service(answer: Answer[Any]) -> bool:
    return not answer.cached


class _SampleServices:
    """The services as one sample asks them."""

    def __init__(self, rag: _SampleRag | None, judge: _SampleJudge | None) -> None:
        self._rag = rag
        self._judge = judge

    @property
    def rag(self) -> _SampleRag:
        assert self._rag is not None, "a recipe that retrieves has a RAG"
        return self._rag

    @property
    def judge(self) -> _SampleJudge:
        assert self._judge is not None, "a recipe that asks a judge has one"
        return self._judge


class Scorer:
    """Scores samples in one process; belongs to one event loop."""

    def __init__(self, service: RewardService, recipe: Recipe) -> None:
        self._service = service
        self._recipe = recipe
        self._passage_judge: PassageJudge | None = None
        self._grader: Grader = recipe.grader
        if service.judge_recipe:
            self._passage_judge = verdict_recipe(service.judge_recipe)
            self._grader = _judged_by(self._passage_judge, recipe)
        settings = {"rag": service.rag, "judge": service.judge}
        missing = [role for role in self._grader.services if settings[role] is None]
        if missing:
            raise ConfigError(
                f"recipe `{recipe.NAME}`: its reward service lacks {' and '.join(missing)}"
            )
        with ExitStack() as opening:
            self._log = opening.enter_context(service.samples_log.open("ab", buffering=0))
            self._ledger = Ledger(ledger_url(service.ledger, service.state))
            opening.callback(self._ledger.close)
            self._queue = LedgerQueue(self._ledger, service.run_id, service.budget)
            self._judge_wait = self._outage_wait("judge")
            self._rag_wait = self._outage_wait("rag")
            self._judge = self._open_judge()
            self._rag = self._open_rag()
            self._retrievals = self._open_cache()
            self._opened = opening.pop_all()

    def _open_judge(self) -> ChatClient | None:
        service = self._service
        if service.judge is None:
            return None
        if service.judge_price is None:
            raise ConfigError(f"prices has no entry for judge.model {service.judge.model!r}")
        role = "judge.local" if service.judge_recipe else "judge"
        account = Account(
            service.run_id, service.tenant.id, role, service.judge.model, service.judge_price
        )
        return ChatClient(
            service.judge,
            service.judge_url,
            account,
            self._queue,
            key_salt=service.judge_key_salt,
        )

    def _open_rag(self) -> RagClient | None:
        service = self._service
        if service.rag is None:
            return None
        return RagClient(service.rag, service.rag_url, service.tenant.id, with_passage=True)

    def _open_cache(self) -> RetrievalCache | None:
        service = self._service
        if self._rag is None or service.rag is None:
            return None
        return RetrievalCache(
            self._rag,
            service.rag,
            service.tenant.id,
            service.retrieval_scope,
            self._ledger,
            self._queue,
            self._rag_wait,
        )

    def _outage_wait(self, service: Literal["rag", "judge"]) -> OutageWait:
        max_outage_s = self._service.reward.max_outage_s
        return OutageWait(service, max_outage_s, partial(write_sample, self._log))

    async def close(self) -> None:
        if self._retrievals:
            await self._retrievals.close()
        try:
            await self._judge_wait.close()
            await self._rag_wait.close()
            if self._judge:
                await self._judge.close()
            await self._queue.close()
            self._opened.close()
        finally:
            if self._rag:
                await self._rag.close()

    async def score(self, extra_info: dict[str, Any], text: str) -> Scores:
        """Score one sample and log it (see `RewardService.outcome`).

        A sample whose calls failed, or whose recipe has a bug, has no score, and the log says why.

        Args:
            extra_info: the training file's: `row_id`, and the `row` with its teacher's answer.
        """
        plain_text = self._grader.clean(_SPECIAL_TOKEN.sub("", text))
        count = CallCount() if self._service.rag else None
        sample = Sample(extra_info.get("row_id"), plain_text, count)
        try:
            scores = await self._score(Row.model_validate_json(extra_info["row"]), sample)
        except Exception as error:  # noqa: BLE001 (of what raises verl says nothing: it drops the sample)
            write_sample(self._log, sample.log_entry(), error)
            return self._service.outcome(None, sample.usage)
        known_scores = {name: value for name, value in scores.items() if not math.isnan(value)}
        write_sample(self._log, sample.log_entry() | known_scores)
        return self._service.outcome(scores, sample.usage)

    async def _score(self, row: Row, sample: Sample) -> Scores:
        config = self._service.reward
        question = self._recipe.question_text(row)
        is_judged = judge_asked(question, sample.text, self._grader.judged_share(config))
        needs_relevance = self._grader.needs_relevance(config, row)
        if self._passage_judge:
            row = row.with_judge_score(BEST)
            grade = await self._grade(
                row, sample, judge=False, relevance=is_judged or needs_relevance
            )
            # One verdict on the best passage answers both of the judge's questions.
            grade = replace(
                grade,
                judge_score=grade.relevance if is_judged else None,
                relevance=grade.relevance if needs_relevance else None,
            )
        else:
            grade = await self._grade(row, sample, judge=is_judged, relevance=needs_relevance)
        return self._grader.score(config, row, grade)

    async def _grade(self, row: Row, sample: Sample, *, judge: bool, relevance: bool) -> Grade:
        """The sample's grade; raises the error of a call that failed."""
        services = self._services_of(row, sample)
        grades = await self._grader.grade(
            row, [sample.text], services, self._service.tenant, judge=judge, relevance=relevance
        )
        grade = grades[sample.text]
        if relevance and grade.retrieved and not self._passage_judge:
            sample.passage = grade.retrieved.first_passage
        if grade.failures:
            # Both may have failed; the log names the one whose error it has.
            sample.failed_by = next(iter(grade.failures))
        grade.raise_failure()
        return grade

    def _services_of(self, row: Row, sample: Sample) -> _SampleServices:
        rag = None
        if self._retrievals:
            rag = _SampleRag(self._retrievals, sample, row.answer)
        judge = None
        if self._judge:
            judge = _SampleJudge(self._judge, self._judge_wait, sample)
        return _SampleServices(rag, judge)


def _judged_by(judge: PassageJudge, recipe: Recipe) -> Grader:
    """The recipe's grader with a judge of passages in the place of the model asked about them."""

    def messages(row: Row, passage: str, tenant: Tenant) -> list[Message]:
        return judge.verdict_messages(recipe.question_text(row), passage, tenant)

    return recipe.grader.with_passage_judge(messages, judge.verdict_score)
