"""Scorers of RL samples, one for each kind of recipe. A failed call leaves a sample without a
score.

Rewrites are scored by what they retrieve and by the judge, which are asked at the same time, and
neither twice for the same; answers by the recipe's rules, and by the judge where its score counts.
"""

import asyncio
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

from qinglan.clients.chat import Account, Answer, ChatClient
from qinglan.clients.openai_protocol import JsonSchema
from qinglan.clients.rag import CallCount, RagClient, request_body
from qinglan.errors import ConfigError, LedgerError
from qinglan.ledger import Ledger, Retrieval, ledger_url
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes import JUDGE, AnswerRecipe, Message, Recipe, RetrievalRecipe
from qinglan.recipes.passage_judge import BEST, PassageJudge, verdict_recipe
from qinglan.recipes.scoring.outages import OutageWait
from qinglan.recipes.scoring.samples import write_sample
from qinglan.recipes.scoring.service import Baseline, GradedRewrite, RewardService, Scored
from qinglan.rows import Retrieved, Row, hash_fraction
from qinglan.runs.artifacts import hash_of

_SPECIAL_TOKEN = re.compile(r"<\|[^|]*\|>")
_MAX_IN_MEMORY = 20_000
Service = Literal["rag", "judge"]


def judge_asked(question: str, text: str, share: float) -> bool:
    """Is this sample in the judged share? Decided by its content, so that reruns agree."""
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
    passage: str = ""  # that the judge was asked about
    judge_asked: int = 0
    """How many questions the judge was asked about it."""
    judged: list[Answer[float]] = field(default_factory=list)
    failed_by: Literal["rag", "judge", "ledger"] | None = None

    def used(self) -> dict[str, float | None]:
        """Calls and time; None for what is not known."""
        cached = sum(answer.cached for answer in self.judged)
        retrieved = {"rag_calls": self.rag.made, "rag_cached": self.rag_cached} if self.rag else {}
        return {
            **retrieved,
            "judge_asked": self.judge_asked,
            "judge_cached": cached if self.judged else None,
            "judge_cost_usd": sum(answer.cost_usd for answer in self.judged if not answer.cached),
            "latency_ms": 1000 * (time.perf_counter() - self.begin_s),
        }

    def entry(self) -> dict[str, Any]:
        known: dict[str, Any] = {"row_id": self.row_id, "text": self.text}
        known |= {name: value for name, value in self.used().items() if value is not None}
        known |= {
            name: value for name in ("passage", "failed_by") if (value := getattr(self, name))
        }
        return known | ({"rag_failed": self.rag.failed} if self.rag else {})

    @contextmanager
    def calling(self, service: Service) -> Iterator[None]:
        """What fails in here is that service's failure."""
        try:
            yield
        except Exception as error:
            self.failed_by = "ledger" if isinstance(error, LedgerError) else service
            raise


class Scorer(ABC):
    """Scores samples in one process; belongs to one event loop."""

    _recipe: Recipe

    def __init__(self, service: RewardService) -> None:
        self._service = service
        self._outage_waits: list[OutageWait] = []
        with ExitStack() as opening:
            self._log = opening.enter_context(service.samples_log.open("ab", buffering=0))
            self._ledger = Ledger(ledger_url(service.ledger, service.state))
            opening.callback(self._ledger.close)
            self._queue = LedgerQueue(self._ledger, service.run_id, service.budget)
            self._open()
            self._opened = opening.pop_all()

    def _open(self) -> None:
        self._judge: ChatClient | None = None
        self._judge_wait = self._outage_wait("judge")
        service = self._service
        if service.judge is None:
            return
        if service.judge_price is None:
            raise ConfigError(f"prices has no entry for judge.model {service.judge.model!r}")
        role = "judge.local" if service.judge_recipe else "judge"
        account = Account(
            service.run_id, service.tenant.id, role, service.judge.model, service.judge_price
        )
        url, salt = service.judge_url, service.judge_key_salt
        self._judge = ChatClient(service.judge, url, account, self._queue, key_salt=salt)

    def _outage_wait(self, service: Service) -> OutageWait:
        max_outage_s = self._service.reward.max_outage_s
        self._outage_waits.append(
            OutageWait(service, max_outage_s, lambda entry: write_sample(self._log, entry))
        )
        return self._outage_waits[-1]

    async def close(self) -> None:
        for wait in self._outage_waits:
            await wait.close()
        if self._judge:
            await self._judge.close()
        await self._queue.close()
        self._opened.close()

    async def score(self, extra_info: dict[str, Any], text: str) -> dict[str, float]:
        """Score one sample and log it (see `RewardService.outcome`); `extra_info` is the training
        file's.

        A sample whose calls failed, or whose recipe has a bug, has no score, and the log says why.
        """
        text = self._recipe.clean(_SPECIAL_TOKEN.sub("", text))
        sample = Sample(extra_info.get("row_id"), text, CallCount() if self._service.rag else None)
        try:
            scored = await self._score(extra_info, sample)
        except Exception as error:  # noqa: BLE001 (of what raises verl says nothing: it drops the sample)
            write_sample(self._log, sample.entry(), error)
            return self._service.outcome(None, sample.used())
        known = {name: value for name, value in scored.items() if not math.isnan(value)}
        write_sample(self._log, sample.entry() | known)
        return self._service.outcome(scored, sample.used())

    @abstractmethod
    async def _score(self, extra_info: dict[str, Any], sample: Sample) -> dict[str, float]:
        """`score` and what it is made of; NaN for what is not known."""

    async def _ask(
        self,
        messages: list[Message],
        sample: Sample,
        parse: Callable[[str], float],
        schema: JsonSchema | None = None,
    ) -> float:
        """The judge's score, 0–5; waits while the judge is down."""
        assert self._judge is not None, "a recipe that asks a judge has one"
        ask = partial(self._judge.ask, messages, parse, schema)
        sample.judge_asked += 1
        with sample.calling("judge"):
            answer = await self._judge_wait.call(ask, answered=lambda answer: not answer.cached)
        sample.judged.append(answer)
        return answer.value


class AnswerScorer(Scorer):
    """Of samples that are graded by themselves; `extra_info` holds the row."""

    _recipe: AnswerRecipe

    def __init__(self, service: RewardService, recipe: AnswerRecipe) -> None:
        self._recipe, self._parts = recipe, recipe.score_parts
        counts = (recipe.WEIGHTS | service.reward.part_weights).get(JUDGE, 0) > 0
        self._judged_share = service.reward.judge_share if counts and service.judge else 0.0
        super().__init__(service)

    async def _score(self, extra_info: dict[str, Any], sample: Sample) -> dict[str, float]:
        row = Row.model_validate_json(extra_info["row"])
        parts = self._recipe.checked_parts(row, sample.text)
        judge = await self._judged(row, sample)
        score = -1.0
        if sample.text:
            known = parts if judge is None else parts | {JUDGE: judge / 5}
            score = self._recipe.reward(self._service.reward, known)
            if math.isnan(score):
                named = ", ".join(known) or "none"
                raise ConfigError(
                    f"recipe `{self._recipe.NAME}`: no part with a weight is known for this row (known: {named})"
                )
        metrics = self._recipe.metric_values(row, sample.text, parts)
        shown = {name: value for name, value in metrics.items() if name in self._parts}
        return {"score": score, JUDGE: math.nan if judge is None else judge, **shown, **parts}

    async def _judged(self, row: Row, sample: Sample) -> float | None:
        """The judge's score, 0–5; None where it is not asked. An empty text gets 0 unasked."""
        if not judge_asked(self._recipe.question_text(row), sample.text, self._judged_share):
            return None
        messages = self._recipe.judge_messages(row, sample.text, self._service.tenant)
        if messages is None:
            return None
        if not sample.text:
            return 0.0
        return await self._ask(
            messages, sample, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA
        )


class Retrievals:
    """What the RAG found: from memory, from the ledger, or from the service. Belongs to one event
    loop.

    Within `RewardService.retrieval_scope` the same request has the same answer.
    """

    def __init__(
        self,
        service: RewardService,
        rag: RagClient,
        ledger: Ledger,
        queue: LedgerQueue,
        wait: OutageWait,
    ) -> None:
        assert service.rag is not None
        self._service, self._settings, self._rag, self._queue, self._wait = (
            service,
            service.rag,
            rag,
            queue,
            wait,
        )
        self._stored = ledger.retrieval_keys(service.retrieval_scope)
        self._recent: dict[str, Retrieved] = {}
        self._under_way: dict[str, asyncio.Task[tuple[Retrieved, bool]]] = {}

    async def find(
        self, baseline: Baseline, rewrite: str, count: CallCount
    ) -> tuple[Retrieved, bool]:
        """What a rewrite retrieves, and whether it was known or asked for already.

        `count` counts the calls that this took, with those that check whether the service is down.
        """
        body = request_body(self._settings, self._service.tenant.id, baseline.question, rewrite)
        # The configured address, as that of an embedded RAG differs between runs; and the fields
        # that are stored.
        key = hash_of(
            self._service.retrieval_scope,
            self._settings.answer_key,
            sorted(Retrieved.model_fields),
            body,
        )
        if key in self._recent:
            return self._recent[key], True
        joined = key in self._under_way
        if not joined:
            task = self._under_way[key] = asyncio.create_task(
                self._fetch(key, baseline, rewrite, count)
            )
            task.add_done_callback(lambda _: self._under_way.pop(key))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        found, stored = await asyncio.shield(self._under_way[key])
        return found, joined or stored

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(
        self, key: str, baseline: Baseline, rewrite: str, count: CallCount
    ) -> tuple[Retrieved, bool]:
        found = None
        if key in self._stored:
            with suppress(LedgerError):  # the RAG is asked again
                found = await self._queue.find_retrieval(key)
        stored = found is not None
        if found is None:
            question, answered_before = baseline.question, baseline.teacher_rewrite or None
            found = await self._wait.call(
                lambda: self._rag.retrieve(question, rewrite, count=count),
                probe=lambda: self._rag.retrieve(
                    question, answered_before, count=count, max_retries=0
                ),
            )
            self._queue.keep_retrieval(
                Retrieval(key=key, scope=self._service.retrieval_scope, found=found)
            )
            self._stored.add(key)
        self._recent[key] = found
        if len(self._recent) > _MAX_IN_MEMORY:
            self._recent.pop(next(iter(self._recent)))
        return found, stored


class RetrievalScorer(Scorer):
    """Of samples that are retrieved with; `extra_info` holds a `Baseline`."""

    _recipe: RetrievalRecipe

    def __init__(self, service: RewardService, recipe: RetrievalRecipe) -> None:
        if service.rag is None or service.judge is None:
            raise ConfigError(f"recipe `{recipe.NAME}`: its reward service needs a RAG and a judge")
        self._recipe = recipe
        self._verdicts = verdict_recipe(service.judge_recipe) if service.judge_recipe else None
        self._rag = RagClient(service.rag, service.rag_url, service.tenant.id, with_passage=True)
        super().__init__(service)

    def _open(self) -> None:
        super()._open()
        self._retrievals = Retrievals(
            self._service, self._rag, self._ledger, self._queue, self._outage_wait("rag")
        )

    async def close(self) -> None:
        await self._retrievals.close()
        try:
            await super().close()
        finally:
            await self._rag.close()

    async def _score(self, extra_info: dict[str, Any], sample: Sample) -> dict[str, float]:
        baseline = Baseline.model_validate(extra_info)
        config = self._service.reward
        if not sample.text:  # the policy's own failure: there is nothing to retrieve or judge with
            return asdict(
                Scored(
                    score=-1.0,
                    judge=0.0
                    if judge_asked(baseline.question, "", config.judged_share)
                    else math.nan,
                    rq=0.0,
                    rq_gain=-baseline.teacher_quality,
                    win=config.loss if baseline.teacher_quality > config.tie_margin else 0.0,
                    gold_top1=0.0 if baseline.gold_id else math.nan,
                    relevant=0.0 if self._needs_relevance(baseline) else math.nan,
                    guard_ok=0.0,
                )
            )
        if self._verdicts:
            return asdict(await self._by_verdict(self._verdicts, baseline, sample))
        judging = asyncio.create_task(self._judge_rewrite(baseline, sample))
        try:
            retrieved, sample.rag_cached = await self._retrieve(baseline, sample.text, sample)
            relevance = await self._judge_passage(baseline, retrieved, sample)
            judge_score = await judging
        finally:
            judging.cancel()  # the ledger still gets an answer that is paid for already
            await asyncio.gather(judging, return_exceptions=True)
        rewrite = GradedRewrite(sample.text, retrieved, judge_score, relevance)
        return asdict(self._recipe.reward(config, baseline, rewrite))

    async def _by_verdict(self, judge: PassageJudge, baseline: Baseline, sample: Sample) -> Scored:
        """The verdict on the best passage answers both of the judge's questions; the teacher's side
        counts as right."""
        config = self._service.reward
        retrieved, sample.rag_cached = await self._retrieve(baseline, sample.text, sample)
        judged = judge_asked(baseline.question, sample.text, config.judged_share)
        gated = self._needs_relevance(baseline)
        verdict, passage = 0.0, retrieved.first_passage
        if passage and (judged or gated):
            messages = judge.verdict_messages(baseline.question, passage, self._service.tenant)
            verdict = await self._ask(messages, sample, judge.verdict_score)
        baseline = baseline.model_copy(update={"teacher_judge": BEST})
        rewrite = GradedRewrite(
            sample.text, retrieved, verdict if judged else None, verdict if gated else None
        )
        return self._recipe.reward(config, baseline, rewrite)

    async def _retrieve(
        self, baseline: Baseline, text: str, sample: Sample
    ) -> tuple[Retrieved, bool]:
        assert sample.rag is not None, "its service has a RAG"
        with sample.calling("rag"):
            return await self._retrievals.find(baseline, text, sample.rag)

    async def _judge_rewrite(self, baseline: Baseline, sample: Sample) -> float | None:
        if not judge_asked(baseline.question, sample.text, self._service.reward.judged_share):
            return None
        messages = self._recipe.judge_messages(baseline.question, sample.text, self._service.tenant)
        return await self._ask(
            messages, sample, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA
        )

    async def _judge_passage(
        self, baseline: Baseline, retrieved: Retrieved, sample: Sample
    ) -> float | None:
        """The judge's score of the best passage, where no label says whether it is the right
        one."""
        if not self._needs_relevance(baseline):
            return None
        if not (passage := retrieved.first_passage):
            return 0.0
        sample.passage = passage
        messages = self._recipe.relevance_messages(baseline.question, passage, self._service.tenant)
        return await self._ask(
            messages, sample, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA
        )

    def _needs_relevance(self, baseline: Baseline) -> bool:
        config = self._service.reward
        return config.relevance_gate and not (config.use_labels and baseline.gold_id)
