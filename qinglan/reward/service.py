"""What the reward service is told, and what it answers. Light: every reward worker of verl imports this."""

import math
import os
import re
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Reward, Tenant
from qinglan.recipes import Scored

_UNSCORED = Scored(0.0, *[math.nan] * (len(Scored.__dataclass_fields__) - 1))


class RewardService(BaseModel):
    """What the reward service needs to know; written as JSON beside the training files. Holds no secret."""

    model_config = ConfigDict(frozen=True)

    recipe: str
    reward: Reward
    rag: Rag
    rag_url: str
    retrieval_scope: str
    """Where the RAG's answers hold and need not be asked for again: one run, or one state of a knowledge base."""
    judge: Endpoint
    judge_url: str
    judge_price: Price
    judge_key_salt: str
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
    scored: Scored | None,
    *,
    rag_calls: int = 0,
    rag_cached: bool = False,
    judge_asked: int = 0,
    judge_cached: int | None = None,
    judge_cost_usd: float = 0.0,
    latency_ms: float = 0.0,
) -> dict[str, float]:
    """What verl is told of a sample: the same keys whatever became of it, NaN for what is not known.

    Args:
        scored: None for a sample without a score: a call for it failed.
        judge_asked: how many questions the judge was asked: about the rewrite, about the best passage.
        judge_cached: how many of them the ledger knew; None where none was answered.
    """
    return {
        **asdict(scored or _UNSCORED),
        "invalid": float(scored is None),
        "rag_calls": float(rag_calls),
        "rag_cached": float(rag_cached),
        "judge_asked": float(judge_asked),
        "judge_cached": math.nan if judge_cached is None else float(judge_cached),
        "judge_cost_usd": judge_cost_usd,
        "latency_ms": latency_ms,
    }
