"""A reward service of query rewriting without gates, by the addresses of a RAG and a judge."""

from pathlib import Path
from typing import Any

from qinglan.config import Budget, Endpoint, LedgerStore, Price, Rag, Tenant
from qinglan.data.dataset.rl_rows import rl_record
from qinglan.recipes import Recipe, query_rewrite
from qinglan.rows import Retrieved, Row
from qinglan.training.reward_service.settings import RewardService

NO_JUDGE = "http://127.0.0.1:9/v1"


def rewritten_row(
    *, teacher_quality: float = 0.5, teacher_judge: float | None = 3.0, **changes: Any
) -> Row:
    """A question whose teacher's rewrite has this retrieval quality and judge's score."""
    row = Row(
        id="1",
        tenant="t",
        query="虾青素咋吃",
        source="f:1",
        answer="虾青素 服用方法",
        answer_retrieved=Retrieved(ids=("a", "b", "c"), scores=(teacher_quality,) * 3),
        judge_score=teacher_judge,
    )
    return row.model_copy(update=changes)


def extra_info(row: Row, recipe: Recipe = query_rewrite.RECIPE) -> dict[str, Any]:
    """The information that verl gives to the reward function for the row's samples."""
    info: dict[str, Any] = rl_record(row, recipe, Tenant())["extra_info"]
    return info


def reward_service(folder: Path, **changes: Any) -> RewardService:
    settings = {
        "recipe": "query_rewrite",
        "parts": query_rewrite.RECIPE.grader.score_parts,
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
    return RewardService(**settings | changes)
