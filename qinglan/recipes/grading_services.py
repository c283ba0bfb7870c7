"""The services that grade a profile's texts, with the settings that name them."""

from typing import NamedTuple

from qinglan.config import EMBEDDED, Profile
from qinglan.grading.grade import GradingRole
from qinglan.recipes import get_recipe


class GradingService(NamedTuple):
    url: str
    """`embedded` where a simulator plays the service."""
    api_key_env: str | None
    """The variable that holds its key; None where it needs none."""

    @property
    def is_embedded(self) -> bool:
        return self.url == EMBEDDED


def grading_services(profile: Profile) -> dict[GradingRole, GradingService]:
    """The services that the profile's recipe asks for a grade, by role."""
    judge = profile.judge
    rag = profile.rag
    services: dict[GradingRole, GradingService] = {
        "judge": GradingService(judge.base_url, judge.api_key_env),
        "rag": GradingService(rag.url, rag.api_key_env),
    }
    return {role: services[role] for role in get_recipe(profile.recipe).grader.services}
