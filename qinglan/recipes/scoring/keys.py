"""What a score depends on beside the text: reused results must have been scored by the same recipe and services."""

from typing import Any

from qinglan.clients.roles import ANSWER_FIELDS, key_salt
from qinglan.config import Profile
from qinglan.recipes import get_recipe, recipe_key
from qinglan.runs.artifacts import hash_of
from qinglan.runs.run import Run


def scoring_key(profile: Profile) -> dict[str, Any]:
    """What a score depends on, beside the text: of RAG and judge, those that the recipe asks."""
    known: dict[str, Any] = {"recipe": recipe_key(profile.recipe), "tenant": profile.tenant.model_dump(mode="json")}
    graders = get_recipe(profile.recipe).graders
    if "rag" in graders:
        known["rag"] = profile.rag.answer_key
    if "judge" in graders:
        known["judge"] = profile.judge.model_dump(mode="json", include=set(ANSWER_FIELDS))
        known["server"] = key_salt(profile, "judge")
    return known


def scoring_digest(run: Run) -> str:
    """Digest of all that is known of what scored a run's rows; of a live service only its settings are."""
    return hash_of(scoring_key(run.profile), run.knowledge_base_sha256)
