"""Distill: get what the student is to learn from each question, mostly by asking the teacher."""

from collections.abc import Callable

from qinglan.clients.chat import Request, request_of
from qinglan.clients.roles import ChatRole, endpoint_of, key_salt
from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.extraction import EXTRACTION_SCHEMA
from qinglan.rows import Row


def distill_requests(profile: Profile) -> Callable[[Row], dict[ChatRole, Request]]:
    """What is or would be asked about a row, by role, and the ledger's keys for it."""
    recipe = get_recipe(profile.recipe)
    asked = {
        role: (endpoint_of(profile, role), key_salt(profile, role)) for role in recipe.DISTILL_ROLES
    }

    def requests(row: Row) -> dict[ChatRole, Request]:
        messages = recipe.distill_messages(row, profile.tenant)
        return {role: request_of(*asked[role], each) for role, each in messages.items()}

    return requests


def extract_requests(profile: Profile) -> Callable[[Row], Request | None]:
    """What the teacher is or would be asked about a row's dialogue; None where it is not asked."""
    recipe, salt = get_recipe(profile.recipe), key_salt(profile, "teacher")

    def request(row: Row) -> Request | None:
        messages = recipe.extract_messages(row, profile.tenant, profile.extract)
        return request_of(profile.teacher, salt, messages, EXTRACTION_SCHEMA) if messages else None

    return request


def judge_requests(profile: Profile) -> Callable[[Row, str], Request | None]:
    """What the judge is or would be asked about one text of a row; None where it is not asked."""
    recipe, salt = get_recipe(profile.recipe), key_salt(profile, "judge")

    def request(row: Row, text: str) -> Request | None:
        messages = (
            recipe.messages_about(row, text, profile.tenant) if "judge" in recipe.graders else None
        )
        return request_of(profile.judge, salt, messages, recipe.JUDGE_SCHEMA) if messages else None

    return request


def teacher_requests(profile: Profile) -> Callable[[Row], Request | None]:
    """What the teacher is or would be asked about a row; None where the row brings its own
    answer."""
    asked = distill_requests(profile)
    return lambda row: asked(row).get("teacher")


def require_teacher_alone(profile: Profile) -> None:
    """Raise ConfigError where the batch API would be asked what takes several models in turn."""
    roles = get_recipe(profile.recipe).DISTILL_ROLES
    if profile.distill.mode == "batch_api" and not set(roles) <= {"teacher"}:
        raise ConfigError(
            f"distill.mode: batch_api can ask the teacher alone, and recipe `{profile.recipe_name}` asks "
            f"{' and '.join(roles)} about each row; set it to live"
        )
