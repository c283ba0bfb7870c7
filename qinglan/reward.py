"""The reward that verl calls in its workers: how much better than the teacher did this rewrite retrieve?

    R = 0.35·tanh(3·(judge_s − judge_t)/5) + 0.40·tanh(3·(rq_s − rq_t)) + 0.25·win,   clipped to [−1, 1]

with win = +0.5 / −0.3 / 0 and rq as in `Retrieved.quality`. Weights of parts that are not known for a sample (the
judge was not asked) are shared among the rest: an unasked judge is not a tie. Guards cap what a rewrite can earn
that lost the question's meaning; without them this formula is hacked (docs/decisions.md).

A failed RAG or judge call raises, which makes verl leave the sample out; it is never scored. Every sample, scored
or not, goes to a log that the flow watches: too many unscored ones stop the run.
"""

import hashlib
import json
import math
import re
import time
from collections import deque
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict

from qinglan.chat import ChatClient
from qinglan.config import Endpoint, Price, Rag, Reward, Tenant
from qinglan.engines.launcher import JsonlTail
from qinglan.errors import StageError
from qinglan.ledger import Ledger
from qinglan.recipes import query_rewrite as recipe
from qinglan.retrieval import RagClient
from qinglan.rows import Retrieved

_WORDS = re.compile(r"[一-鿿]+|[a-z0-9]+")
_SPECIAL_TOKEN = re.compile(r"<\|[^|]*\|>")


class RewardService(BaseModel):
    """What a reward worker needs to know; written as JSON beside the training files. Holds no secret."""

    model_config = ConfigDict(frozen=True)

    reward: Reward
    rag: Rag
    rag_url: str
    judge: Endpoint
    judge_url: str
    judge_price: Price
    judge_key_salt: str
    tenant: Tenant
    ledger: Path
    run_id: str
    samples_log: Path


class Baseline(BaseModel):
    """The teacher's side of one prompt, computed once before RL (`extra_info` of the training file)."""

    row_id: str
    question: str
    gold_id: str
    """Empty where the row is not labelled."""
    teacher_rewrite: str
    teacher_quality: float
    teacher_judge: float
    """−1 where the judge was not asked."""


@dataclass(frozen=True)
class Scored:
    """One sample's reward and what it is made of; NaN for a part that is not known."""

    score: float
    judge: float
    rq: float
    rq_gain: float
    win: float
    gold_top1: float
    guard_ok: float


def character_grams(text: str) -> set[str]:
    """Bigrams of Chinese runs, and alphanumeric runs whole: the units in which short texts overlap."""
    grams: set[str] = set()
    for run in _WORDS.findall(text.lower()):
        if run.isascii() or len(run) == 1:
            grams.add(run)
        else:
            grams.update(run[i : i + 2] for i in range(len(run) - 1))
    return grams


def entity_kept(question: str, teacher_rewrite: str, rewrite: str) -> bool:
    """Does the rewrite still speak of what the question is about?

    The anchors are the teacher's words that share characters with the question: mostly the entity. One of them must
    leave a trace in the rewrite. Where the teacher and the question share nothing, there is nothing to hold on to.
    """
    asked = character_grams(question)
    anchors = [grams for word in teacher_rewrite.split() if (grams := character_grams(word)) & asked]
    return not anchors or any(grams & character_grams(rewrite) for grams in anchors)


def is_repetitive(rewrite: str) -> bool:
    """The same word twice, or one character filling half of the text."""
    words = rewrite.split()
    text = "".join(words)
    return len(set(words)) < len(words) or (len(text) > 5 and max(map(text.count, set(text))) * 2 > len(text))


def combine(
    config: Reward, baseline: Baseline, rewrite: str, retrieved: Retrieved, judge_score: float | None
) -> Scored:
    """The reward from its parts. Pure."""
    rq_gain = retrieved.quality - baseline.teacher_quality
    win = 0.0 if abs(rq_gain) <= config.tie_margin else (config.win if rq_gain > 0 else config.loss)
    parts = [(config.retrieval_weight, math.tanh(3 * rq_gain)), (config.win_weight, win)]
    if judge_score is not None and baseline.teacher_judge >= 0:
        parts.append((config.judge_weight, math.tanh(3 * (judge_score - baseline.teacher_judge) / 5)))
    score = sum(weight * value for weight, value in parts) / sum(weight for weight, _ in parts)
    guard_ok = _guard_ok(config, baseline, rewrite, judge_score)
    if not guard_ok:
        score = min(score, config.guard_cap)
    gold_top1 = math.nan
    if baseline.gold_id:
        gold_top1 = float(retrieved.rank(baseline.gold_id) == 1)
        if config.gold_gate and not gold_top1:
            score = min(score, config.gold_gate_cap)
    judge = math.nan if judge_score is None else judge_score
    return Scored(max(-1.0, min(1.0, score)), judge, retrieved.quality, rq_gain, win, gold_top1, float(guard_ok))


def _guard_ok(config: Reward, baseline: Baseline, rewrite: str, judge_score: float | None) -> bool:
    if not config.preservation_guard:
        return True
    if judge_score is not None and judge_score < config.guard_min_judge:
        return False
    if len(rewrite) > config.max_chars or is_repetitive(rewrite):
        return False
    return entity_kept(baseline.question, baseline.teacher_rewrite, rewrite)


def judge_asked(question: str, rewrite: str, share: float) -> bool:
    """Is this sample in the judged share? Decided by its content, so that reruns agree."""
    digest = hashlib.sha256(f"{question}\x1f{rewrite}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


class Scorer:
    """Scores samples in one worker process: HTTP clients, a cache by content, the log."""

    def __init__(self, service: RewardService) -> None:
        self._service, self._ledger = service, Ledger(service.ledger)
        self._rag = RagClient(service.rag, service.rag_url, service.tenant.id)
        self._judge = ChatClient(
            service.judge,
            service.judge_url,
            role="judge",
            ledger=self._ledger,
            price=service.judge_price,
            run_id=service.run_id,
            tenant=service.tenant.id,
            key_salt=service.judge_key_salt,
        )
        self._retrieved: dict[tuple[str, str], Retrieved] = {}
        self._log = _open_log(service.samples_log)

    async def close(self) -> None:
        """Close connections and files; a worker that lives as long as its process need not."""
        await self._rag.close()
        await self._judge.close()
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
            entry["rag_cached"] = not rewrite or (baseline.question, rewrite) in self._retrieved
            scored = await self._score(baseline, rewrite)
        except Exception as error:  # verl drops the sample without a word, whatever the error is
            _write(self._log, entry | _invalid(error))
            raise
        known = {name: value for name, value in asdict(scored).items() if not math.isnan(value)}
        _write(self._log, entry | known | {"latency_ms": 1000 * (time.perf_counter() - start)})
        return scored

    async def _score(self, baseline: Baseline, rewrite: str) -> Scored:
        config = self._service.reward
        if not rewrite:  # nothing to retrieve or judge with: the policy's own failure, not a call's
            gold_top1 = 0.0 if baseline.gold_id else math.nan
            return Scored(-1.0, math.nan, 0.0, -baseline.teacher_quality, config.loss, gold_top1, 0.0)
        key = (baseline.question, rewrite)
        if key not in self._retrieved:
            self._retrieved[key] = await self._rag.retrieve(baseline.question, rewrite)
        judge_score = None
        if judge_asked(*key, config.judge_share):
            judge_score = await self._ask_judge(*key)
        return combine(config, baseline, rewrite, self._retrieved[key], judge_score)

    async def _ask_judge(self, question: str, rewrite: str) -> float:
        messages = recipe.judge_messages(question, rewrite, self._service.tenant)
        return (await self._judge.ask(messages, recipe.parse_judge)).value


def _open_log(path: Path) -> BinaryIO:
    return path.open("ab", buffering=0)  # one write a line, so that the lines of several workers don't mix


def _write(log: BinaryIO, entry: dict[str, Any]) -> None:
    log.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())


def _invalid(error: Exception) -> dict[str, str]:
    return {"invalid": " ".join(f"{error or type(error).__name__}".split())[:500]}


class SampleWatch:
    """Follows the samples log from outside and stops a run whose samples can't be scored."""

    def __init__(self, samples_log: Path, config: Reward) -> None:
        self._tail, self._config = JsonlTail(samples_log, from_end=True), config
        self._recent: deque[bool] = deque(maxlen=config.invalid_window)
        self.samples = self.invalid = self.rag_calls = self.rag_cached = 0

    def __call__(self) -> None:
        """Look for new samples.

        Raises:
            StageError: too many of the last `invalid_window` samples have no score.
        """
        for entry in self._tail.new():
            invalid = "invalid" in entry
            self.samples += 1
            self.invalid += invalid
            self.rag_cached += bool(entry.get("rag_cached"))
            self.rag_calls += not entry.get("rag_cached")
            self._recent.append(invalid)
            limit = self._config.max_invalid_share * self._config.invalid_window
            if sum(self._recent) > limit:
                raise StageError(
                    f"rl: {sum(self._recent)} of the last {len(self._recent)} samples could not be scored, more than "
                    f"reward.max_invalid_share = {self._config.max_invalid_share:.0%} of {self._config.invalid_window} "
                    f"allows; last: {entry.get('invalid')}. Mend the service and run again; it continues from the "
                    "last checkpoint"
                )


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
