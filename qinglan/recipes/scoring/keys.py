"""What answers and scores depend on beside the text: what is reused must come from the same recipe
and services."""

from collections.abc import Iterable
from typing import Any

from qinglan.clients.roles import ANSWER_FIELDS, ChatRole, endpoint_of, key_salt
from qinglan.config import Profile
from qinglan.recipes import get_recipe, recipe_key
from qinglan.runs.artifacts import hash_of
from qinglan.runs.run import Run


def answers_key(profile: Profile, roles: Iterable[ChatRole]) -> dict[str, Any]:
    """What the answers of these roles depend on, beside what they are asked."""
    known: dict[str, Any] = {
        "recipe": recipe_key(profile.recipe),
        "tenant": profile.tenant.model_dump(mode="json"),
    }
    for role in roles:
        settings = endpoint_of(profile, role).model_dump(mode="json", include=set(ANSWER_FIELDS))
        known[role] = settings, key_salt(profile, role)
    return known


def scoring_key(profile: Profile) -> dict[str, Any]:
    """What a score depends on, beside the text: of RAG and judge, those that the recipe asks."""
    graders = get_recipe(profile.recipe).graders
    rag = {"rag": profile.rag.answer_key} if "rag" in graders else {}
    return answers_key(profile, ("judge",) if "judge" in graders else ()) | rag


def scoring_digest(run: Run) -> str:
    """Digest of all that is known of what scored a run's rows; of a live service only its settings
    are."""
    return hash_of(scoring_key(run.profile), run.knowledge_base_sha256)
