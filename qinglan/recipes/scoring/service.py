"""The reward service's settings, what it reads of a row, and what it answers.

Every reward worker of verl imports this module, so it imports neither clients nor the ledger.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, Field

from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Reward, Tenant
from qinglan.rows import Retrieved

NOT_JUDGED = -1.0
"""`teacher_judge` in the RL files where the judge was not asked: a null would become NaN in the
file."""


class Baseline(BaseModel):
    """The teacher's side of one prompt, computed once before RL (`extra_info` of the training
    file)."""

    row_id: str
    question: str
    gold_id: str
    """Empty where the row is not labelled."""
    teacher_rewrite: str
    teacher_quality: float
    teacher_judge: float
    """`NOT_JUDGED` where the judge was not asked."""


class GradedRewrite(NamedTuple):
    """What a reward is made of; None where the judge was not asked."""

    text: str
    retrieved: Retrieved
    judge_score: float | None = None
    """0–5."""
    relevance: float | None = None
    """Of the best passage, 0–5."""


@dataclass(frozen=True)
class Scored:
    """A rewrite's reward and what it is made of; NaN for a part that is not known."""

    score: float
    judge: float
    rq: float
    rq_gain: float
    win: float
    gold_top1: float
    relevant: float
    """Does the best passage answer the question, by the judge? 1 or 0."""
    guard_ok: float


class RewardService(BaseModel, frozen=True):
    """What the reward service needs to know; written as JSON beside the training files. Holds no
    secret."""

    recipe: str
    parts: tuple[str, ...]
    """Names of what a score is made of: verl wants the same of every sample, scored or not."""
    reward: Reward
    rag: Rag | None = None
    """None for a recipe whose texts are not retrieved with."""
    rag_url: str = ""
    retrieval_scope: str = ""
    """Where the RAG's answers hold and need not be asked for again: one run, or one state of a
    knowledge base."""
    judge: Endpoint | None = None
    """None for a recipe that asks no judge."""
    judge_url: str = ""
    judge_price: Price | None = None
    judge_key_salt: str = ""
    judge_recipe: str = ""
    """Of a served answer judge, which is asked for verdicts on passages; else empty."""
    tenant: Tenant
    ledger: LedgerStore
    state: Path
    budget: Budget
    run_id: str
    attempt: str = Field(default_factory=lambda: os.urandom(4).hex())
    """Another one each time that training starts."""
    samples_log: Path

    @property
    def actor_name(self) -> str:
        """By which all of a training's processes find the service."""
        return re.sub(r"[^A-Za-z0-9_-]", "_", f"qinglan_reward_{self.run_id}_{self.attempt}")

    def outcome(
        self,
        scored: Mapping[str, float] | None = None,
        used: Mapping[str, float | None] | None = None,
    ) -> dict[str, float]:
        """What verl gets for a sample: the same keys whether it was scored or not, NaN for what is
        not known.

        Args:
            scored: `score` and the parts that are known; None for a sample without a score: a call
                for it failed.
            used: calls and time that it took; None for what is not known.
        """
        return {
            "score": 0.0,
            **dict.fromkeys(self.parts, math.nan),
            **(scored or {}),
            "invalid": float(scored is None),
            **({"rag_calls": 0.0, "rag_cached": 0.0} if self.rag else {}),
            **{
                "judge_asked": 0.0,
                "judge_cached": math.nan,
                "judge_cost_usd": 0.0,
                "latency_ms": 0.0,
            },
            **{
                name: math.nan if value is None else float(value)
                for name, value in (used or {}).items()
            },
        }
