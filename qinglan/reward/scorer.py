"""Scores samples: clients, patience, caches, the log. A failed RAG or judge call leaves a sample without a score."""

import asyncio
import hashlib
import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qinglan.chat import Account, Answer, ChatClient
from qinglan.errors import LedgerError, QinglanError
from qinglan.ledger import Ledger, ledger_url
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes import Baseline, Message, Scored, get_recipe
from qinglan.retrieval import CallCount, RagClient
from qinglan.reward.patience import Patience
from qinglan.reward.retrievals import Retrievals
from qinglan.reward.samples import invalid, open_log, write_sample
from qinglan.reward.service import RewardService, outcome
from qinglan.rows import Retrieved

_SPECIAL_TOKEN = re.compile(r"<\|[^|]*\|>")


def judge_asked(question: str, rewrite: str, share: float) -> bool:
    """Is this sample in the judged share? Decided by its content, so that reruns agree."""
    digest = hashlib.sha256(f"{question}\x1f{rewrite}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


@dataclass
class _Sample:
    """One sample on its way, and what it took."""

    row_id: str | None
    rewrite: str
    begin_s: float = field(default_factory=time.perf_counter)
    rag: CallCount = field(default_factory=CallCount)
    rag_cached: bool = False
    judge_asked: int = 0
    judged: list[Answer[float]] = field(default_factory=list)
    failed_by: Literal["rag", "judge", "ledger"] | None = None

    def figures(self) -> dict[str, Any]:
        """As `outcome` takes them."""
        cached = sum(answer.cached for answer in self.judged)
        return {
            "rag_calls": self.rag.made,
            "rag_cached": self.rag_cached,
            "judge_asked": self.judge_asked,
            "judge_cached": cached if self.judged else None,
            "judge_cost_usd": sum(answer.cost_usd for answer in self.judged if not answer.cached),
            "latency_ms": 1000 * (time.perf_counter() - self.begin_s),
        }

    def entry(self) -> dict[str, Any]:
        """For the log."""
        about = {"row_id": self.row_id, "rewrite": self.rewrite, "rag_failed": self.rag.failed}
        known = {name: value for name, value in (about | self.figures()).items() if value is not None}
        return known | ({"failed_by": self.failed_by} if self.failed_by else {})

    @contextmanager
    def calling(self, service: Literal["rag", "judge"]) -> Iterator[None]:
        """What fails in here is that service's failure."""
        try:
            yield
        except Exception as error:
            self.failed_by = "ledger" if isinstance(error, LedgerError) else service
            raise


class Scorer:
    """Scores samples in one process; belongs to one event loop."""

    def __init__(self, service: RewardService) -> None:
        """Open clients, ledger and log.

        Raises:
            ConfigError: a key is not set here.
            LedgerError: the ledger can't be opened.
        """
        self._service, self._recipe = service, get_recipe(service.recipe)
        self._rag = RagClient(service.rag, service.rag_url, service.tenant.id, with_passage=True)
        account = Account(service.run_id, service.tenant.id, "judge", service.judge.model, service.judge_price)
        with ExitStack() as opening:
            self._log = opening.enter_context(open_log(service.samples_log))
            self._ledger = Ledger(ledger_url(service.ledger, service.state))
            opening.callback(self._ledger.close)
            self._queue = LedgerQueue(self._ledger, service.run_id, service.budget)
            self._judge = ChatClient(
                service.judge, service.judge_url, account, self._queue, key_salt=service.judge_key_salt
            )
            rag_patience, self._judge_patience = self._patience("rag"), self._patience("judge")
            self._retrievals = Retrievals(service, self._rag, self._ledger, self._queue, rag_patience)
            self._opened = opening.pop_all()
        self._patiences = (rag_patience, self._judge_patience)

    def _patience(self, service: Literal["rag", "judge"]) -> Patience:
        return Patience(service, self._service.reward.max_outage_s, lambda entry: write_sample(self._log, entry))

    async def close(self) -> None:
        """Write what is not written yet, and close connections and files."""
        await self._retrievals.close()
        for patience in self._patiences:
            await patience.close()
        await self._rag.close()
        await self._judge.close()
        await self._queue.close()
        self._opened.close()

    async def score(self, extra_info: dict[str, Any], text: str) -> dict[str, float]:
        """Score one sample and log it (see `outcome`); `extra_info` holds a `Baseline`.

        A sample whose calls failed has no score, and the log says why. Only a bug raises.
        """
        sample = _Sample(extra_info.get("row_id"), " ".join(_SPECIAL_TOKEN.sub("", text).split()))
        try:
            scored = await self._score(Baseline.model_validate(extra_info), sample)
        except QinglanError as error:
            write_sample(self._log, sample.entry() | invalid(error))
            return outcome(None, **sample.figures())
        except Exception as error:  # verl drops the sample without a word, whatever the error is
            write_sample(self._log, sample.entry() | invalid(error))
            raise
        known = {name: value for name, value in asdict(scored).items() if not math.isnan(value)}
        write_sample(self._log, sample.entry() | known)
        return outcome(scored, **sample.figures())

    async def _score(self, baseline: Baseline, sample: _Sample) -> Scored:
        rewrite = sample.rewrite
        if not rewrite:  # nothing to retrieve or judge with: the policy's own failure, not a call's
            return self._of_an_empty_rewrite(baseline)
        judging = asyncio.create_task(self._judged(baseline, sample))
        try:
            retrieved = await self._retrieved(baseline, sample)
            relevance = await self._relevance(baseline, retrieved, sample)
            judge_score = await judging
        finally:
            judging.cancel()  # what is paid for already goes on, for the ledger
            await asyncio.gather(judging, return_exceptions=True)
        return self._recipe.reward(self._service.reward, baseline, rewrite, retrieved, judge_score, relevance)

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

    async def _retrieved(self, baseline: Baseline, sample: _Sample) -> Retrieved:
        with sample.calling("rag"):
            found, sample.rag_cached = await self._retrievals.find(baseline, sample.rewrite, sample.rag)
        return found

    async def _judged(self, baseline: Baseline, sample: _Sample) -> float | None:
        """The judge's score of the rewrite."""
        if not judge_asked(baseline.question, sample.rewrite, self._service.reward.judged_share):
            return None
        return await self._ask(
            self._recipe.judge_messages(baseline.question, sample.rewrite, self._service.tenant), sample
        )

    async def _relevance(self, baseline: Baseline, retrieved: Retrieved, sample: _Sample) -> float | None:
        """The judge's score of the best passage, where no label says whether it is the right one."""
        if not self._needs_relevance(baseline):
            return None
        if not retrieved.first_passage:
            return 0.0
        messages = self._recipe.relevance_messages(baseline.question, retrieved.first_passage, self._service.tenant)
        return await self._ask(messages, sample)

    def _needs_relevance(self, baseline: Baseline) -> bool:
        config = self._service.reward
        return config.relevance_gate and not (config.use_labels and baseline.gold_id)

    async def _ask(self, messages: list[Message], sample: _Sample) -> float:
        async def ask() -> Answer[float]:
            return await self._judge.ask(messages, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA)

        sample.judge_asked += 1
        with sample.calling("judge"):
            answer = await self._judge_patience.call(ask, answered=lambda answer: not answer.cached)
        sample.judged.append(answer)
        return answer.value
