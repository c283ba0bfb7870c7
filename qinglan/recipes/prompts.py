"""All prompts about a row, by role, for people who want to read them."""

from qinglan.clients.openai_protocol import Message
from qinglan.config import Profile
from qinglan.recipes.base import Recipe
from qinglan.rows import Row


def prompts_about(row: Row, recipe: Recipe, profile: Profile) -> dict[str, list[Message]]:
    """The prompts of every role that is asked about the row.

    The judge's are about the question in the place of an answer.
    """
    tenant = profile.tenant
    prompts: dict[str, list[Message]] = {}
    extract_messages = recipe.extract_messages(row, tenant, profile.extract)
    if extract_messages:
        prompts["extract"] = extract_messages
    prompts["student"] = recipe.student_messages(row, tenant)
    for role, messages in recipe.distill_messages(row, tenant).items():
        prompts[str(role)] = messages
    prompts.update(recipe.grader.judge_prompts(row, tenant))
    return prompts
