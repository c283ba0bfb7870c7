"""Scores samples that are retrieved with: asks RAG and judge at the same time, and neither twice for the same."""

import asyncio
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from qinglan.clients.rag import CallCount, RagClient, request_body
from qinglan.errors import ConfigError, LedgerError
from qinglan.ledger import Ledger, Retrieval
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes._verdicts import BEST, reference_of, verdict_recipe
from qinglan.recipes.scoring.outages import OutageWait
from qinglan.recipes.scoring.scorer import Sample, Scorer, judge_asked
from qinglan.recipes.scoring.service import Baseline, GradedRewrite, RewardService, Scored
from qinglan.rows import Retrieved
from qinglan.runs.artifacts import hash_of

if TYPE_CHECKING:
    from qinglan.recipes import RetrievalRecipe
    from qinglan.recipes.answer_judge import AnswerJudge

_MAX_IN_MEMORY = 20_000


@dataclass
class RetrievedSample(Sample):
    rag: CallCount = field(default_factory=CallCount)
    rag_cached: bool = False

    def used(self) -> dict[str, float | None]:
        return {"rag_calls": self.rag.made, "rag_cached": self.rag_cached} | super().used()

    def entry(self) -> dict[str, Any]:
        return super().entry() | {"rag_failed": self.rag.failed}


class Retrievals:
    """What the RAG found: from memory, from the ledger, or from the service. Belongs to one event loop.

    Within `RewardService.retrieval_scope` the same request has the same answer.
    """

    def __init__(
        self, service: RewardService, rag: RagClient, ledger: Ledger, queue: LedgerQueue, wait: OutageWait
    ) -> None:
        assert service.rag is not None
        self._service, self._settings, self._rag, self._queue, self._wait = service, service.rag, rag, queue, wait
        self._stored = ledger.retrieval_keys(service.retrieval_scope)
        self._recent: dict[str, Retrieved] = {}
        self._under_way: dict[str, asyncio.Task[tuple[Retrieved, bool]]] = {}

    async def find(self, baseline: Baseline, rewrite: str, count: CallCount) -> tuple[Retrieved, bool]:
        """What a rewrite retrieves, and whether it was known or asked for already.

        Args:
            count: counts the calls that this took, with those that check whether the service is down.
        """
        body = request_body(self._settings, self._service.tenant.id, baseline.question, rewrite)
        # The configured address, as that of an embedded RAG differs between runs; and the fields that are stored.
        key = hash_of(self._service.retrieval_scope, self._settings.url, sorted(Retrieved.model_fields), body)
        if key in self._recent:
            return self._recent[key], True
        joined = key in self._under_way
        if not joined:
            task = self._under_way[key] = asyncio.create_task(self._fetch(key, baseline, rewrite, count))
            task.add_done_callback(lambda _: self._under_way.pop(key))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        found, stored = await asyncio.shield(self._under_way[key])
        return found, joined or stored

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, key: str, baseline: Baseline, rewrite: str, count: CallCount) -> tuple[Retrieved, bool]:
        found = None
        if key in self._stored:
            with suppress(LedgerError):  # the RAG is asked again
                found = await self._queue.find_retrieval(key)
        stored = found is not None
        if found is None:
            question, answered_before = baseline.question, baseline.teacher_rewrite or None
            found = await self._wait.call(
                lambda: self._rag.retrieve(question, rewrite, count=count),
                probe=lambda: self._rag.retrieve(question, answered_before, count=count, max_retries=0),
            )
            self._queue.keep_retrieval(Retrieval(key=key, scope=self._service.retrieval_scope, found=found))
            self._stored.add(key)
        self._recent[key] = found
        if len(self._recent) > _MAX_IN_MEMORY:
            self._recent.pop(next(iter(self._recent)))
        return found, stored


class RetrievalScorer(Scorer[RetrievedSample]):
    """Of one recipe; `extra_info` holds a `Baseline`."""

    _recipe: "RetrievalRecipe"
    _sample_class = RetrievedSample

    def __init__(self, service: RewardService, recipe: "RetrievalRecipe") -> None:
        if service.rag is None or service.judge is None:
            raise ConfigError(f"recipe `{recipe.NAME}`: its reward service needs a RAG and a judge")
        self._recipe = recipe
        self._verdicts = verdict_recipe(service.judge_recipe) if service.judge_recipe else None
        self._rag = RagClient(service.rag, service.rag_url, service.tenant.id, with_passage=True)
        super().__init__(service)

    def _open(self) -> None:
        self._retrievals = Retrievals(self._service, self._rag, self._ledger, self._queue, self._outage_wait("rag"))

    async def close(self) -> None:
        await self._retrievals.close()
        try:
            await super().close()
        finally:
            await self._rag.close()

    async def _score(self, extra_info: dict[str, Any], sample: RetrievedSample) -> dict[str, float]:
        baseline = Baseline.model_validate(extra_info)
        config = self._service.reward
        if not sample.text:  # the policy's own failure: there is nothing to retrieve or judge with
            return asdict(
                Scored(
                    score=-1.0,
                    judge=math.nan,
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

    async def _by_verdict(self, judge: "AnswerJudge", baseline: Baseline, sample: RetrievedSample) -> Scored:
        """Does the best passage agree with the reference? The verdict answers both of the judge's questions.

        The teacher's side is the reference itself. Where there is none, the judge is not asked.
        """
        config = self._service.reward
        retrieved, sample.rag_cached = await self._retrieve(baseline, sample.text, sample)
        best, _ = await self._retrieve(baseline, baseline.teacher_rewrite, sample)
        reference = reference_of(best, baseline.gold_id, use_labels=config.use_labels)
        judged = judge_asked(baseline.question, sample.text, config.judged_share)
        gated = self._needs_relevance(baseline)
        verdict, passage = None, retrieved.first_passage
        if reference and (judged or gated):
            if passage and passage != reference:
                messages = judge.verdict_messages(baseline.question, reference, passage, self._service.tenant)
                verdict = await self._ask(messages, sample, judge.verdict_score)
            else:
                verdict = BEST if passage else 0.0
        baseline = baseline.model_copy(update={"teacher_judge": BEST})
        rewrite = GradedRewrite(sample.text, retrieved, verdict if judged else None, verdict if gated else None)
        return self._recipe.reward(config, baseline, rewrite)

    async def _retrieve(self, baseline: Baseline, text: str, sample: RetrievedSample) -> tuple[Retrieved, bool]:
        with sample.calling("rag"):
            return await self._retrievals.find(baseline, text, sample.rag)

    async def _judge_rewrite(self, baseline: Baseline, sample: RetrievedSample) -> float | None:
        if not judge_asked(baseline.question, sample.text, self._service.reward.judged_share):
            return None
        messages = self._recipe.judge_messages(baseline.question, sample.text, self._service.tenant)
        return await self._ask(messages, sample, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA)

    async def _judge_passage(self, baseline: Baseline, retrieved: Retrieved, sample: RetrievedSample) -> float | None:
        """The judge's score of the best passage, where no label says whether it is the right one."""
        if not self._needs_relevance(baseline):
            return None
        if not retrieved.first_passage:
            return 0.0
        messages = self._recipe.relevance_messages(baseline.question, retrieved.first_passage, self._service.tenant)
        return await self._ask(messages, sample, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA)

    def _needs_relevance(self, baseline: Baseline) -> bool:
        config = self._service.reward
        return config.relevance_gate and not (config.use_labels and baseline.gold_id)
