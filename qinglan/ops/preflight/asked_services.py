"""The services that a flow asks: the models of its chat roles, and further teachers."""

from collections.abc import Iterable
from typing import get_args

from qinglan.clients.roles import ChatRole, endpoint_of
from qinglan.config import ENGINE_FLOWS, Endpoint, FlowName, Profile
from qinglan.evaluation.gate import TEACHER
from qinglan.recipes import get_recipe

TEACHER_FLOWS = ("pipeline", "refresh", "compare")
"""Flows that read the workbook and ask the teacher its questions."""


def asked_roles(profile: Profile, flow: FlowName) -> list[ChatRole]:
    """The chat roles that a flow asks; the recipe must be one that there is."""
    recipe = get_recipe(profile.recipe)
    roles: set[ChatRole] = set()
    if flow in TEACHER_FLOWS:
        roles.update(recipe.DISTILL_ROLES)
    # A teacher that is the gate's rival is asked the red team's cases.
    is_rival = flow in ENGINE_FLOWS and TEACHER in profile.gate.rivals
    if is_rival and TEACHER in recipe.DISTILL_ROLES:
        roles.add("teacher")
    if _asks_judge(profile, flow):
        roles.add("judge")
    return [role for role in get_args(ChatRole) if role in roles]


def further_teachers(profile: Profile, flow: FlowName) -> dict[str, Endpoint]:
    """The teachers that a flow asks beside its own, by their setting."""
    names: Iterable[str] = ()
    if flow == "compare":
        names = profile.compare.teachers
    elif flow in ENGINE_FLOWS:
        names = profile.evaluate.teachers
    return {f"compare.teachers.{name}": profile.compare.teachers[name] for name in names}


def asked_endpoints(profile: Profile, flow: FlowName) -> dict[str, Endpoint]:
    """The chat services that a flow asks, by role or setting.

    An answerer that the profile lacks is left out.
    """
    endpoints: dict[str, Endpoint] = {}
    for role in asked_roles(profile, flow):
        if role != "answerer" or profile.answerer:
            endpoints[role] = endpoint_of(profile, role)
    return endpoints | further_teachers(profile, flow)


def asks_rag(profile: Profile, flow: FlowName) -> bool:
    """Tell whether a flow asks the RAG; release only reads what was evaluated."""
    return flow != "release" and get_recipe(profile.recipe).grader.asks_rag


def _asks_judge(profile: Profile, flow: FlowName) -> bool:
    if flow == "release":
        return False
    # These two only validate the teachers' answers.
    only_validates = flow in ("refresh", "compare")
    if only_validates and not profile.validation.judge_baseline:
        return False
    return get_recipe(profile.recipe).grader.asks_judge
