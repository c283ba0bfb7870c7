"""What the report calls things, in English and Chinese, as `texts.yaml` has it.

A name that is not there, such as a teacher's or a tenant's, was given by a user and is the same in both languages.
"""

from importlib.resources import files

import yaml

from qinglan.text import ARMS, Both, Language

_FILE = files("qinglan.evaluation").joinpath("texts.yaml")
TEXTS = {
    table: {key: Both(**{"en": key} | text) for key, text in texts.items()}
    for table, texts in yaml.load(_FILE.read_text(encoding="utf-8"), yaml.CSafeLoader).items()
}


def arm_words(name: str, *, head: bool = False) -> Both:
    """An arm's name in a sentence, or at the head of a column."""
    return (TEXTS["arm_heads"] if head else ARMS).get(name) or Both(name, name)


def rival_words(name: str) -> Both:
    """An arm as somebody's rival: `the teacher`; a name that a user gave stays as it is."""
    arm = arm_words(name)
    return Both(f"the {arm.en}", arm.zh) if name in ARMS else arm


def rule_words(name: str) -> Both:
    """A rule of the gate, whatever arm or version it carries."""
    what, against, rival = name.partition("_vs_")
    if against and what in TEXTS["rules_against"]:
        form, named = TEXTS["rules_against"][what], rival_words(rival)
        return Both(form.en.format(named.en), form.zh.format(named.zh))
    return TEXTS["rules"].get(name) or Both(name.replace("_", " "), name.replace("_", " "))


def words(text: str) -> Both:
    """What a stage, a row's reason, a curve or a slice is called; a user's own word stays as it is."""
    return TEXTS["row_reasons"].get(text) or TEXTS["phrases"].get(text) or Both(text, text)


def listed(texts: list[Both]) -> Both:
    """`a, b and c`."""

    def joined(language: Language, joint: str, final: str) -> str:
        *others, last = (getattr(text, language) for text in texts)
        return f"{joint.join(others)}{final}{last}" if others else last

    return Both(joined("en", ", ", " and "), joined("zh", "、", "和"))
