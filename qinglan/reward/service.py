"""Scores samples: HTTP clients, a cache by content, the log.

A failed RAG or judge call raises; it is never scored.
"""

import hashlib
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from qinglan.chat import Account, ChatClient
from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Reward, Tenant
from qinglan.ledger import Ledger, ledger_url
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes import Baseline, Scored, get_recipe
from qinglan.retrieval import RagClient
from qinglan.reward.samples import invalid, open_log, write_sample
from qinglan.rows import Retrieved

_SPECIAL_TOKEN = re.compile(r"<\|[^|]*\|>")


class RewardService(BaseModel):
    """What a reward worker needs to know; written as JSON beside the training files. Holds no secret."""

    model_config = ConfigDict(frozen=True)

    recipe: str
    reward: Reward
    rag: Rag
    rag_url: str
    judge: Endpoint
    judge_url: str
    judge_price: Price
    judge_key_salt: str
    tenant: Tenant
    ledger: LedgerStore
    state: Path
    budget: Budget
    run_id: str
    samples_log: Path


def judge_asked(question: str, rewrite: str, share: float) -> bool:
    """Is this sample in the judged share? Decided by its content, so that reruns agree."""
    digest = hashlib.sha256(f"{question}\x1f{rewrite}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


class Scorer:
    """Scores samples in one worker process: HTTP clients, a cache by content, the log."""

    def __init__(self, service: RewardService) -> None:
        self._service, self._ledger = service, Ledger(ledger_url(service.ledger, service.state))
        self._queue = LedgerQueue(self._ledger, service.run_id, service.budget)
        self._recipe = get_recipe(service.recipe)
        self._rag = RagClient(service.rag, service.rag_url, service.tenant.id)
        account = Account(service.run_id, service.tenant.id, "judge", service.judge.model, service.judge_price)
        self._judge = ChatClient(
            service.judge, service.judge_url, account, self._queue, key_salt=service.judge_key_salt
        )
        self._retrieved: dict[tuple[str, str], Retrieved] = {}
        self._rag_counted = (0, 0)
        self._log = open_log(service.samples_log)

    async def close(self) -> None:
        """Close connections and files; a worker that lives as long as its process need not."""
        await self._rag.close()
        await self._judge.close()
        await self._queue.close()
        self._ledger.close()
        self._log.close()

    async def score(self, extra_info: dict[str, Any], text: str) -> Scored:
        """Score one sample and log it; `extra_info` holds a `Baseline`.

        Raises:
            QinglanError: the RAG or the judge failed after its retries; the sample has no score.
        """
        start, rewrite = time.perf_counter(), " ".join(_SPECIAL_TOKEN.sub("", text).split())
        entry: dict[str, Any] = {"row_id": extra_info.get("row_id"), "rewrite": rewrite}
        try:
            baseline = Baseline.model_validate(extra_info)
            entry["rag_cached"] = (baseline.question, rewrite) in self._retrieved
            scored = await self._score(baseline, rewrite, entry)
        except Exception as error:  # verl drops the sample without a word, whatever the error is
            write_sample(self._log, entry | self._new_rag_calls() | invalid(error))
            raise
        known = {name: value for name, value in asdict(scored).items() if not math.isnan(value)}
        latency_ms = 1000 * (time.perf_counter() - start)
        write_sample(self._log, entry | self._new_rag_calls() | known | {"latency_ms": latency_ms})
        return scored

    def _new_rag_calls(self) -> dict[str, int]:
        """Calls since the last line, repeated ones included: also of samples under way, but the sums are right."""
        before, now = self._rag_counted, (self._rag.call_count, self._rag.failed_count)
        self._rag_counted = now
        return {"rag_calls": now[0] - before[0], "rag_failed": now[1] - before[1]}

    async def _score(self, baseline: Baseline, rewrite: str, entry: dict[str, Any]) -> Scored:
        config = self._service.reward
        if not rewrite:  # nothing to retrieve or judge with: the policy's own failure, not a call's
            gold_top1 = 0.0 if baseline.gold_id else math.nan
            return Scored(-1.0, math.nan, 0.0, -baseline.teacher_quality, config.loss, gold_top1, 0.0)
        key = (baseline.question, rewrite)
        if key not in self._retrieved:
            with _calling("rag", entry):
                self._retrieved[key] = await self._rag.retrieve(baseline.question, rewrite)
        judge_score = None
        if judge_asked(*key, config.judge_share):
            with _calling("judge", entry):
                judge_score, entry["judge_cached"] = await self._ask_judge(*key)
        return self._recipe.reward(config, baseline, rewrite, self._retrieved[key], judge_score)

    async def _ask_judge(self, question: str, rewrite: str) -> tuple[float, bool]:
        messages = self._recipe.judge_messages(question, rewrite, self._service.tenant)
        answer = await self._judge.ask(messages, self._recipe.parse_judge, self._recipe.JUDGE_SCHEMA)
        return answer.value, answer.cached


@contextmanager
def _calling(service: Literal["rag", "judge"], entry: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception:
        entry["failed_by"] = service
        raise
