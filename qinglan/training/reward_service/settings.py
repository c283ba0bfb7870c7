"""The reward service's settings, and the shape of what it answers.

Every reward worker of verl imports this module, so it imports neither clients nor the ledger.
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, Field

from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Reward, Tenant


class RewardService(BaseModel, frozen=True):
    """The settings of a run's reward service, as JSON beside the training files.

    They hold no secret.
    """

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
    """Recipe of a served judge of passages, which is asked for verdicts; else empty."""
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
        """The name by which all of a training's processes find the service."""
        return re.sub(r"[^A-Za-z0-9_-]", "_", f"qinglan_reward_{self.run_id}_{self.attempt}")

    def outcome(
        self,
        scores: Mapping[str, float] | None = None,
        usage: Mapping[str, float | None] | None = None,
    ) -> dict[str, float]:
        """The values that verl gets for a sample: the same keys whether it was scored or not.

        A value that is not known is NaN, but for the score: it is 0 beside `invalid` = 1.

        Args:
            scores: `score` and the parts that are known; None for a sample without a score: a call
                for it failed.
            usage: calls and time that it took; None for what is not known.
        """
        values: dict[str, float] = {"score": 0.0, **dict.fromkeys(self.parts, math.nan)}
        if scores is not None:
            values.update(scores)
        values["invalid"] = float(scores is None)
        if self.rag:
            values["rag_calls"] = 0.0
            values["rag_cached"] = 0.0
        values["judge_asked"] = 0.0
        values["judge_cached"] = math.nan
        values["judge_cost_usd"] = 0.0
        values["latency_ms"] = 0.0
        for name, value in (usage or {}).items():
            values[name] = math.nan if value is None else float(value)
        return values
