"""The parts of a stage's key that stand for recipe and services.

A result may be reused only where it comes from the same recipe and the same services.
"""

from collections.abc import Iterable
from typing import Any

from qinglan.clients.roles import ANSWER_FIELDS, ChatRole, endpoint_of, key_salt
from qinglan.config import Profile
from qinglan.recipes import get_recipe, recipe_key
from qinglan.runs.artifacts import hash_of
from qinglan.runs.run import Run


def answers_key(profile: Profile, roles: Iterable[ChatRole]) -> dict[str, Any]:
    """Everything that the answers of these roles depend on beside the prompts."""
    key: dict[str, Any] = {
        "recipe": recipe_key(profile.recipe),
        "tenant": profile.tenant.model_dump(mode="json"),
    }
    for role in roles:
        settings = endpoint_of(profile, role).model_dump(mode="json", include=set(ANSWER_FIELDS))
        key[role] = settings, key_salt(profile, role)
    return key


def scoring_key(profile: Profile) -> dict[str, Any]:
    """Everything that a grade depends on beside the text: recipe, and the services it asks."""
    grader = get_recipe(profile.recipe).grader
    key = answers_key(profile, [role for role in grader.services if role != "rag"])
    if grader.asks_rag:
        key["rag"] = profile.rag.answer_key
    return key


def grading_key(run: Run) -> dict[str, Any]:
    """Everything that this run's grades depend on beside the texts.

    It is `scoring_key` with the knowledge base's state where the RAG is asked.
    """
    key = scoring_key(run.profile)
    if "rag" in key:
        key["knowledge_base"] = run.knowledge_base_key
    return key


def scoring_digest(run: Run) -> str:
    """Digest of all that is known of what graded a run's rows.

    Of a live service only the settings are known.
    """
    return hash_of(scoring_key(run.profile), run.knowledge_base_sha256)
