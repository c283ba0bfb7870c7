"""Scores samples that are retrieved with: asks RAG and judge at the same time, with caches and patience for both."""

import asyncio
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from qinglan.clients.rag import CallCount, RagClient
from qinglan.errors import ConfigError
from qinglan.recipes._verdicts import BEST, VerdictRecipe, reference_of, verdict_recipe
from qinglan.recipes.scoring.retrievals import Retrievals
from qinglan.recipes.scoring.scorer import Sample, Scorer, judge_asked
from qinglan.recipes.scoring.service import Baseline, RewardService, Scored
from qinglan.rows import Retrieved

if TYPE_CHECKING:
    from qinglan.recipes import Message, RetrievalRecipe


@dataclass
class RetrievedSample(Sample):
    """A sample that the RAG is asked about."""

    rag: CallCount = field(default_factory=CallCount)
    rag_cached: bool = False

    def used(self) -> dict[str, float | None]:
        """The RAG's calls too."""
        return {"rag_calls": self.rag.made, "rag_cached": self.rag_cached} | super().used()

    def about(self) -> dict[str, Any]:
        """Those that failed too."""
        return super().about() | {"rag_failed": self.rag.failed}


class RetrievalScorer(Scorer[RetrievedSample]):
    """Of one recipe; `extra_info` holds a `Baseline`."""

    def __init__(self, service: RewardService, recipe: "RetrievalRecipe") -> None:
        if service.rag is None or service.judge is None:
            raise ConfigError(f"recipe `{recipe.NAME}`: its reward service needs a RAG and a judge")
        self._recipe = recipe
        self._verdicts = verdict_recipe(service.judge_recipe) if service.judge_recipe else None
        self._rag = RagClient(service.rag, service.rag_url, service.tenant.id, with_passage=True)
        super().__init__(service)

    def _open(self) -> None:
        self._retrievals = Retrievals(self._service, self._rag, self._ledger, self._queue, self._patience("rag"))

    async def _drop_calls(self) -> None:
        await self._retrievals.close()

    async def _close_services(self) -> None:
        await self._rag.close()

    def _sample(self, row_id: str | None, text: str) -> RetrievedSample:
        return RetrievedSample(row_id, " ".join(text.split()))

    async def _score(self, extra_info: dict[str, Any], sample: RetrievedSample) -> dict[str, float]:
        baseline = Baseline.model_validate(extra_info)
        if not sample.text:  # nothing to retrieve or judge with: the policy's own failure, not a call's
            return asdict(self._of_an_empty_rewrite(baseline))
        if self._verdicts:
            return asdict(await self._by_verdict(self._verdicts, baseline, sample))
        judging = asyncio.create_task(self._judged(baseline, sample))
        try:
            retrieved = await self._retrieved(baseline, sample)
            relevance = await self._relevance(baseline, retrieved, sample)
            judge_score = await judging
        finally:
            judging.cancel()  # what is paid for already goes on, for the ledger
            await asyncio.gather(judging, return_exceptions=True)
        config = self._service.reward
        return asdict(self._recipe.reward(config, baseline, sample.text, retrieved, judge_score, relevance))

    async def _by_verdict(self, judge: VerdictRecipe, baseline: Baseline, sample: RetrievedSample) -> Scored:
        """Does the best passage agree with the reference? The verdict answers both of the judge's questions.

        The teacher's side is the reference itself. Where there is none, nobody is asked.
        """
        retrieved, config = await self._retrieved(baseline, sample), self._service.reward
        best = await self._found(baseline, baseline.teacher_rewrite, sample)
        reference = reference_of(best, baseline.gold_id, use_labels=config.use_labels)
        judged = judge_asked(baseline.question, sample.text, config.judged_share)
        gated = self._needs_relevance(baseline)
        verdict = None
        if reference and (judged or gated):
            verdict = await self._verdict(judge, baseline.question, reference, retrieved.first_passage, sample)
        baseline = baseline.model_copy(update={"teacher_judge": BEST})
        score, relevance = verdict if judged else None, verdict if gated else None
        return self._recipe.reward(config, baseline, sample.text, retrieved, score, relevance)

    async def _verdict(
        self, judge: VerdictRecipe, question: str, reference: str, passage: str, sample: RetrievedSample
    ) -> float:
        if not passage:
            return 0.0
        if passage == reference:
            return BEST
        messages = judge.verdict_messages(question, reference, passage, self._service.tenant)
        return await self._ask(messages, sample, judge.verdict_score)

    def _of_an_empty_rewrite(self, baseline: Baseline) -> Scored:
        lost = baseline.teacher_quality > self._service.reward.tie_margin
        return Scored(
            score=-1.0,
            judge=math.nan,
            rq=0.0,
            rq_gain=-baseline.teacher_quality,
            win=self._service.reward.loss if lost else 0.0,
            gold_top1=0.0 if baseline.gold_id else math.nan,
            relevant=0.0 if self._needs_relevance(baseline) else math.nan,
            guard_ok=0.0,
        )

    async def _retrieved(self, baseline: Baseline, sample: RetrievedSample) -> Retrieved:
        with sample.calling("rag"):
            found, sample.rag_cached = await self._retrievals.find(baseline, sample.text, sample.rag)
        return found

    async def _found(self, baseline: Baseline, text: str, sample: RetrievedSample) -> Retrieved:
        with sample.calling("rag"):
            return (await self._retrievals.find(baseline, text, sample.rag))[0]

    async def _judged(self, baseline: Baseline, sample: RetrievedSample) -> float | None:
        """The judge's score of the rewrite."""
        if not judge_asked(baseline.question, sample.text, self._service.reward.judged_share):
            return None
        return await self._asked(
            self._recipe.judge_messages(baseline.question, sample.text, self._service.tenant), sample
        )

    async def _relevance(self, baseline: Baseline, retrieved: Retrieved, sample: RetrievedSample) -> float | None:
        """The judge's score of the best passage, where no label says whether it is the right one."""
        if not self._needs_relevance(baseline):
            return None
        if not retrieved.first_passage:
            return 0.0
        messages = self._recipe.relevance_messages(baseline.question, retrieved.first_passage, self._service.tenant)
        return await self._asked(messages, sample)

    def _needs_relevance(self, baseline: Baseline) -> bool:
        config = self._service.reward
        return config.relevance_gate and not (config.use_labels and baseline.gold_id)

    async def _asked(self, messages: "list[Message]", sample: RetrievedSample) -> float:
        return await self._ask(messages, sample, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA)
