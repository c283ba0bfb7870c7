"""The requests that a run makes or would make of its models, with the ledger's keys for them."""

from collections.abc import Callable

from qinglan.clients.completions import Request, request_of
from qinglan.clients.roles import ChatRole, endpoint_of, key_salt
from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe
from qinglan.recipes.extraction import EXTRACTION_SCHEMA
from qinglan.rows import Row


def distill_requests(profile: Profile) -> Callable[[Row], dict[ChatRole, Request]]:
    """A function that gives the requests about a row, by role."""
    recipe = get_recipe(profile.recipe)
    endpoints = {role: endpoint_of(profile, role) for role in recipe.DISTILL_ROLES}
    salts = {role: key_salt(profile, role) for role in recipe.DISTILL_ROLES}

    def requests(row: Row) -> dict[ChatRole, Request]:
        messages_by_role = recipe.distill_messages(row, profile.tenant)
        return {
            role: request_of(endpoints[role], salts[role], messages)
            for role, messages in messages_by_role.items()
        }

    return requests


def extract_requests(profile: Profile) -> Callable[[Row], Request | None]:
    """A function that gives the teacher's request about a row's dialogue.

    It gives None where the teacher is not asked.
    """
    recipe = get_recipe(profile.recipe)
    salt = key_salt(profile, "teacher")

    def request(row: Row) -> Request | None:
        messages = recipe.extract_messages(row, profile.tenant, profile.extract)
        if not messages:
            return None
        return request_of(profile.teacher, salt, messages, EXTRACTION_SCHEMA)

    return request


def judge_requests(profile: Profile) -> Callable[[Row, str], Request | None]:
    """A function that gives the judge's request about one text of a row.

    It gives None where the judge is not asked.
    """
    grader = get_recipe(profile.recipe).grader
    salt = key_salt(profile, "judge")

    def request(row: Row, text: str) -> Request | None:
        messages = grader.messages_about(row, text, profile.tenant)
        if not messages:
            return None
        return request_of(profile.judge, salt, messages, grader.judge_schema)

    return request


def teacher_requests(profile: Profile) -> Callable[[Row], Request | None]:
    """A function that gives the teacher's request about a row.

    It gives None where the row brings its own answer.
    """
    requests = distill_requests(profile)
    return lambda row: requests(row).get("teacher")


def require_teacher_alone(profile: Profile) -> None:
    """Raise ConfigError where the batch API would be asked what takes several models in turn."""
    roles = get_recipe(profile.recipe).DISTILL_ROLES
    if profile.distill.mode == "batch_api" and not set(roles) <= {"teacher"}:
        raise ConfigError(
            "distill.mode: batch_api can ask the teacher alone, and recipe "
            f"`{profile.recipe_name}` asks {' and '.join(roles)} about each row; set it to live"
        )
