"""Distill: ask the teacher for a rewrite of each question."""

from qinglan.batches import Work
from qinglan.clients import Clients
from qinglan.config import Tenant
from qinglan.recipes import Recipe
from qinglan.rows import Row


def distiller(recipe: Recipe, clients: Clients, tenant: Tenant) -> Work:
    """The work on one row: its rewrite, what it cost and which ledger entry holds it."""

    async def distill(row: Row) -> Row:
        answer = await clients.teacher.ask(recipe.teacher_messages(row, tenant), recipe.parse_rewrite)
        return row.model_copy(
            update={
                "rewrite": answer.value,
                "rewrite_request": answer.request_hash,
                "rewrite_latency_ms": answer.latency_ms,
                "rewrite_cost_usd": answer.cost_usd,
            }
        )

    return distill
