"""Distill: ask the teacher for a rewrite of each question."""

from collections.abc import Callable

from qinglan.batches import Work
from qinglan.chat import Request, request_of
from qinglan.clients import Clients, key_salt
from qinglan.config import Profile, Tenant
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import Row


def distiller(recipe: Recipe, clients: Clients, tenant: Tenant) -> Work:
    """The work on one row: its rewrite, what it cost and which ledger entry holds it."""

    async def distill(row: Row) -> Row:
        answer = await clients.teacher.ask(recipe.teacher_messages(row, tenant), recipe.parse_rewrite)
        return row.model_copy(
            update={
                "answer": answer.value,
                "answer_request": answer.request_hash,
                "answer_latency_ms": answer.latency_ms,
                "answer_cost_usd": answer.cost_usd,
            }
        )

    return distill


def teacher_requests(profile: Profile) -> Callable[[Row], Request]:
    """What the teacher is or would be asked about a row, and the ledger's key for it."""
    recipe, salt = get_recipe(profile.recipe), key_salt(profile, "teacher")
    return lambda row: request_of(profile.teacher, salt, recipe.teacher_messages(row, profile.tenant))
