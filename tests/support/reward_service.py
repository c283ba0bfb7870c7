"""A reward service of query rewriting without gates, by the addresses of a RAG and a judge."""

from pathlib import Path
from typing import Any

from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Tenant
from qinglan.recipes import Baseline, RetrievalRecipe
from qinglan.training.reward_service.settings import RewardService

NO_JUDGE = "http://127.0.0.1:9/v1"
BASELINE = Baseline(
    row_id="1",
    question="虾青素咋吃",
    gold_id="",
    teacher_rewrite="虾青素 服用方法",
    teacher_quality=0.5,
    teacher_judge=3.0,
)
"""The teacher's side of a question."""


def reward_service(folder: Path, **given: Any) -> RewardService:
    settings = {
        "recipe": "query_rewrite",
        "parts": RetrievalRecipe.score_parts,
        "rag": Rag(),
        "retrieval_scope": "r",
        "judge": Endpoint(model="j"),
        "judge_url": NO_JUDGE,
        "judge_price": Price(input_per_million_usd=1, output_per_million_usd=1),
        "judge_key_salt": "",
        "tenant": Tenant(),
        "ledger": LedgerStore(),
        "state": folder,
        "budget": Budget(),
        "run_id": "r",
        "samples_log": folder / "samples.jsonl",
    }
    return RewardService(**settings | given)
