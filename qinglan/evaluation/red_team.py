"""The red team's cases through the students: in the prompts of the test questions, and retrieved with where need be."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence

from qinglan.clients.roles import Clients
from qinglan.config import Tenant
from qinglan.errors import CallError
from qinglan.evaluation.red_team_cases import Case, RedTeamResult, check, row_of
from qinglan.recipes import Recipe
from qinglan.rows import ArmName, Retrieved

Texts = Mapping[str, str]
"""A student's answers as it gave them, by the id of the prompt."""


def texts_of(answers: Iterable[str]) -> dict[str, str]:
    """From the JSON lines that the generation wrote; a second line in an answer is something to find fault with."""
    return {answer["id"]: answer["text"].strip() for answer in map(json.loads, answers)}


async def try_cases(
    cases: Sequence[Case], answers: Mapping[ArmName, Texts], recipe: Recipe, tenant: Tenant, clients: Clients
) -> dict[ArmName, list[RedTeamResult]]:
    """Every case by every student, in the cases' order. A case whose retrieval failed counts as not checked."""

    async def attempt(case: Case, texts: Texts) -> RedTeamResult:
        row = row_of(case, tenant)
        text = texts[row.id]
        parts = recipe.parts(row, text)
        return check(case, text or None, await _retrieved(case, text, clients), parts)

    names = list(answers)
    results = await asyncio.gather(
        *(asyncio.gather(*(attempt(case, answers[name]) for case in cases)) for name in names)
    )
    return dict(zip(names, results, strict=True))


async def _retrieved(case: Case, text: str, clients: Clients) -> Retrieved | None:
    if not case.checks.needs_retrieval or not text:
        return None
    try:
        return await clients.rag.retrieve(case.query, " ".join(text.split()))
    except CallError:
        return None
