"""Extract: a row's profile and history, as the teacher reads them in its dialogue.

Whoever writes in a dialogue may write instructions too, so that an answer counts only as far as the
dialogue says it.
"""

import re
import unicodedata
from functools import partial
from typing import TYPE_CHECKING

from qinglan.config import Extract, Tenant
from qinglan.errors import TeacherError
from qinglan.grading.judge_answers import object_schema, read_json
from qinglan.recipes.base import Recipe
from qinglan.recipes.prompting import one_line, undelimited
from qinglan.rows import DIALOGUE, Row, normalise

if TYPE_CHECKING:
    from qinglan.clients.roles import Clients

EXTRACTION_SCHEMA = object_schema(profile={"type": "string"}, history={"type": "string"})
# How models say that there is nothing, by `normalise`.
_NOTHING = frozenset({"", "无", "没有", "暂无", "未知", "未提及", "null", "none"})
_CLAUSE_ENDS = re.compile("[,，、。;；:：!！?？ ]")
_SAID_CHARS = 80


async def extract(
    row: Row, recipe: Recipe, clients: "Clients", tenant: Tenant, limits: Extract
) -> Row:
    """The row with the profile and history that the workbook lacks.

    Raises:
        TeacherError: the teacher's answer can't be used.
    """
    messages = recipe.extract_messages(row, tenant, limits)
    if not messages:
        return row
    parse = partial(extracted, row, limits=limits)
    answer = await clients.teacher.ask(messages, parse, EXTRACTION_SCHEMA)
    return answer.value


def without_dialogue(row: Row) -> Row:
    inputs = {name: text for name, text in row.inputs.items() if name != DIALOGUE}
    return row.with_inputs(inputs)


def extracted(row: Row, text: str, limits: Extract) -> Row:
    """The row with what the workbook lacks, from the teacher's answer.

    The answer is such as `{"profile": "孕28周", "history": "问过钙片"}`. An empty value is an
    answer: the dialogue may say nothing.

    Raises:
        TeacherError: the answer can't be read, or a value is too long or not in the dialogue.
    """
    answer = undelimited(text)
    dialogue = row.inputs[DIALOGUE]
    profile = row.profile or _read_value(
        answer, "profile", dialogue, limits.max_profile_chars, limits.min_support
    )
    history = row.history or _read_value(
        answer, "history", dialogue, limits.max_history_chars, limits.min_support
    )
    return without_dialogue(row).with_context(profile, history)


def _read_value(answer: str, name: str, dialogue: str, max_chars: int, min_support: float) -> str:
    """The answer's value of that name, empty where the dialogue says nothing of it."""
    value = read_json(answer, name)
    if not isinstance(value, str):
        message = f"the answer has no text as {name}"
        raise TeacherError(message, "extract_unreadable", said=answer[:_SAID_CHARS])
    value = " ".join(one_line(value).split())
    if normalise(value) in _NOTHING:
        return ""
    if len(value) > max_chars:
        message = f"the {name} has {len(value):,} characters"
        raise TeacherError(message, "extract_too_long", said=value[:_SAID_CHARS])
    if not _is_supported(value, dialogue, min_support):
        message = f"the dialogue does not say what the {name} says"
        raise TeacherError(message, "not_in_dialogue", said=value[:_SAID_CHARS])
    return value


def _is_supported(value: str, dialogue: str, min_support: float) -> bool:
    """Tell whether the dialogue has all numbers of the value, and enough of each clause."""
    if not _numbers(value) <= _numbers(dialogue):
        return False
    dialogue_characters = set(normalise(dialogue))
    for clause in _CLAUSE_ENDS.split(value):
        characters = normalise(clause)
        supported = sum(character in dialogue_characters for character in characters)
        if supported < min_support * len(characters):
            return False
    return True


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+", unicodedata.normalize("NFKC", text)))
