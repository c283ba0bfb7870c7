"""What verl calls in its workers to score a sample: retrieve, maybe ask the judge, and let the recipe reward it.

A failed RAG or judge call raises, which makes verl leave the sample out; it is never scored. Every sample, scored
or not, goes to a log that the flow watches: too many unscored ones stop the run.
"""

import hashlib
import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict

from qinglan.chat import Account, ChatClient
from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Reward, Tenant
from qinglan.engines.launcher import JsonlTail
from qinglan.errors import StageError
from qinglan.ledger import Ledger, ledger_url
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes import Baseline, Scored, get_recipe
from qinglan.retrieval import RagClient
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
        self._log = _open_log(service.samples_log)

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
            _write(self._log, entry | self._new_rag_calls() | _invalid(error))
            raise
        known = {name: value for name, value in asdict(scored).items() if not math.isnan(value)}
        latency_ms = 1000 * (time.perf_counter() - start)
        _write(self._log, entry | self._new_rag_calls() | known | {"latency_ms": latency_ms})
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


def _open_log(path: Path) -> BinaryIO:
    return path.open("ab", buffering=0)  # one write a line, so that the lines of several workers don't mix


def _write(log: BinaryIO, entry: dict[str, Any]) -> None:
    log.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())


def _invalid(error: Exception) -> dict[str, str]:
    return {"invalid": " ".join(f"{error or type(error).__name__}".split())[:500]}


@contextmanager
def _calling(service: Literal["rag", "judge"], entry: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception:
        entry["failed_by"] = service
        raise


class SampleWatch:
    """Follows the samples log from outside and stops a run whose samples can't be scored.

    The figures are of the whole log, over all attempts of the stage; the alarm looks at this attempt only.
    """

    def __init__(self, samples_log: Path, config: Reward, dev_rows: Collection[str] = ()) -> None:
        """`dev_rows`: rows of the dev split, as verl does not tell a reward function that it validates."""
        self._tail, self._config, self._dev_rows = JsonlTail(samples_log), config, frozenset(dev_rows)
        self._recent: deque[bool] = deque(maxlen=config.invalid_window)
        self._counts: Counter[str] = Counter()
        for entry in self._tail.new():
            self._count(entry)

    def __call__(self) -> None:
        """Look for new samples.

        Raises:
            StageError: too many of the last `invalid_window` samples have no score.
        """
        for entry in self._tail.new():
            self._count(entry)
            self._recent.append("invalid" in entry)
            limit = self._config.max_invalid_share * self._config.invalid_window
            if sum(self._recent) > limit:
                raise StageError(
                    f"rl: {sum(self._recent)} of the last {len(self._recent)} samples could not be scored, more than "
                    f"reward.max_invalid_share = {self._config.max_invalid_share:.0%} of {self._config.invalid_window} "
                    f"allows; last: {entry.get('invalid')}. Mend the service and run again; it continues from the "
                    "last checkpoint"
                )

    @property
    def summary(self) -> dict[str, int]:
        """Samples of training and of dev validation, and those of both without a score, by what failed."""
        names = ("samples", "dev_samples", "invalid", "invalid_rag", "invalid_judge")
        return {name if "samples" in name else f"samples_{name}": self._counts[name] for name in names}

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """Use of the RAG, as its client counts it, and of the judge's cache; the ledger knows the judge's calls."""
        roles = {"rag": ("calls", "failed", "cached"), "judge": ("asked", "cached")}
        return {role: {name: self._counts[f"{role}_{name}"] for name in names} for role, names in roles.items()}

    def _count(self, entry: dict[str, Any]) -> None:
        failed_by = entry.get("failed_by")
        self._counts["dev_samples" if entry.get("row_id") in self._dev_rows else "samples"] += 1
        self._counts["invalid"] += "invalid" in entry
        if failed_by:
            self._counts[f"invalid_{failed_by}"] += 1
        self._counts["rag_calls"] += entry.get("rag_calls", 0)
        self._counts["rag_failed"] += entry.get("rag_failed", 0)
        self._counts["rag_cached"] += bool(entry.get("rag_cached"))
        self._counts["judge_asked"] += "judge_cached" in entry or failed_by == "judge"
        self._counts["judge_cached"] += bool(entry.get("judge_cached"))


@lru_cache(maxsize=1)
def _scorer(config_path: str) -> Scorer:
    service = RewardService.model_validate_json(Path(config_path).read_text(encoding="utf-8"))
    try:
        return Scorer(service)
    except Exception as error:  # such as a key that this machine lacks: the flow has to hear of it
        with _open_log(service.samples_log) as log:
            _write(log, _invalid(error))
        raise


async def compute_score(
    data_source: str,  # noqa: ARG001 (verl's signature)
    solution_str: str,
    ground_truth: str,  # noqa: ARG001
    extra_info: dict[str, Any],
    config_path: str,
    **_: Any,
) -> dict[str, float]:
    """verl's custom reward function: the score, and its parts as extra metrics.

    verl wants the same keys from every sample, so a part that is unknown for this one is NaN, and means skip it.
    """
    scored = await _scorer(config_path).score(extra_info, solution_str)
    return asdict(scored)
