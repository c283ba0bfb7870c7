"""Further teachers on the test questions, as distillation asks them."""

from collections.abc import Sequence

from qinglan.clients.roles import Clients
from qinglan.config import Tenant
from qinglan.errors import CallError
from qinglan.recipes import Recipe
from qinglan.recipes.measuring.arms import ask_about, check_failures, teacher_rows
from qinglan.rows import ArmRow, Row


async def ask_teacher(
    rows: Sequence[Row], recipe: Recipe, clients: Clients, tenant: Tenant, max_failed_share: float
) -> list[ArmRow]:
    """This teacher's arm, not retrieved with yet. What it refuses or leaves empty is a finding about it.

    Raises:
        StageError: its service failed too often to say anything about the teacher.
    """
    lost = list[str]()

    async def attempt(row: Row) -> Row:
        try:
            return await recipe.distill(row, clients, tenant)
        except CallError as error:
            if error.transient:
                lost.append(error.reason)
            return row.failed(error.reason)

    answered = await ask_about(map(_unanswered, rows), attempt)
    check_failures(lost, len(rows), max_failed_share)
    return teacher_rows(answered.values())


def _unanswered(row: Row) -> Row:
    """The question alone: what the main teacher made of it is another arm."""
    kept = (
        *("id", "tenant", "query", "profile", "history", "gold_id", "intent"),
        *("inputs", "pool", "split", "group", "source"),
    )
    return Row(**{name: getattr(row, name) for name in kept})
