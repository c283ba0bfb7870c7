"""Extract: a row's profile and history, as the teacher reads them in its dialogue.

Whoever writes in a dialogue may write instructions too, so that an answer counts only as far as the
dialogue says it.
"""

import re
import unicodedata

from qinglan.config import Extract
from qinglan.errors import TeacherError
from qinglan.recipes.kinds.elements import object_schema
from qinglan.recipes.kinds.untrusted import one_line, read_json, undelimited
from qinglan.rows import DIALOGUE, Row, normalise

EXTRACTION_SCHEMA = object_schema(profile={"type": "string"}, history={"type": "string"})
_NOTHING = frozenset({"", "无", "没有", "暂无", "未知", "未提及", "null", "none"})
"""How models say that there is nothing, by `normalise`."""
_CLAUSE = re.compile("[,，、。;；:：!！?？ ]")


def without_dialogue(row: Row) -> Row:
    return row.model_copy(
        update={"inputs": {name: text for name, text in row.inputs.items() if name != DIALOGUE}}
    )


def extracted(row: Row, text: str, limits: Extract) -> Row:
    """The row with what the workbook lacks, from an answer such as `{"profile": "孕28周", "history":
    "问过钙片"}`.

    An empty value is an answer: the dialogue may say nothing. TeacherError where the answer can't
    be read, and where a value is too long or not in the dialogue.
    """
    context, dialogue, text = (
        {"profile": row.profile, "history": row.history},
        row.inputs[DIALOGUE],
        undelimited(text),
    )
    longest = {"profile": limits.max_profile_chars, "history": limits.max_history_chars}
    for name in (each for each, own in context.items() if not own):
        value = read_json(text, name)
        if not isinstance(value, str):
            raise TeacherError(
                f"the answer has no text as {name}", "extract_unreadable", said=text[:80]
            )
        value = " ".join(one_line(value).split())
        if normalise(value) in _NOTHING:
            continue
        if len(value) > longest[name]:
            raise TeacherError(
                f"the {name} has {len(value):,} characters", "extract_too_long", said=value[:80]
            )
        if not _is_said(value, dialogue, limits.min_support):
            raise TeacherError(
                f"the dialogue does not say what the {name} says",
                "not_in_dialogue",
                said=value[:80],
            )
        context[name] = value
    return without_dialogue(row).model_copy(update=context)


def _is_said(value: str, dialogue: str, min_support: float) -> bool:
    """Has the dialogue every number, and enough characters of every clause?"""
    said, numbers = set(normalise(dialogue)), _numbers(dialogue)
    clauses = filter(None, map(normalise, _CLAUSE.split(value)))
    return _numbers(value) <= numbers and all(
        sum(character in said for character in clause) >= min_support * len(clause)
        for clause in clauses
    )


def _numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+", unicodedata.normalize("NFKC", text)))
