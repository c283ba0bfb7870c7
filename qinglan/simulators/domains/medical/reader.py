"""Finds what a question is about, by the phrasings and names that this domain knows."""

import re
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import NamedTuple

from qinglan.simulators.domains.medical import facts as domain
from qinglan.simulators.domains.medical.facts import TOPICS, MedicalQuestion

_LABEL = re.compile("^(?:患者情况|之前|问题)：", re.MULTILINE)


class _Phrasing(NamedTuple):
    topic: str
    unseen: bool
    pattern: re.Pattern[str]


def understand(text: str) -> MedicalQuestion | None:
    """The question, which may follow facts about the patient; None where it is about nothing in this domain."""
    asked = _LABEL.split(text)[-1]
    for topic, _, pattern in _phrasings():
        if found := pattern.search(asked):
            return MedicalQuestion(asked, topic, _owners()[topic, found["n"]])
    return None


def gives_away(text: str) -> bool:
    """Whether a text asks about a pair, or uses a phrasing, that only the test split has."""
    found = ((known, match) for known in _phrasings() if (match := known.pattern.search(text)))
    return any(
        known.unseen or domain.pair_split(known.topic, _owners()[known.topic, match["n"]]) == "test"
        for known, match in found
    )


@cache
def _phrasings() -> tuple[_Phrasing, ...]:
    """The longer ones first, since one may be part of another."""
    medicines = _either(chain.from_iterable(known.names for known in domain.MEDICINES.values()))
    found = [
        (topic, phrasing, phrasing in known.test_phrasings)
        for topic, known in TOPICS.items()
        for phrasing in (*known.phrasings, *known.test_phrasings)
    ]
    made = []
    for topic, phrasing, unseen in sorted(found, key=lambda one: -len(one[1])):
        names = _either(chain.from_iterable(domain.names(topic, thing) for thing in domain.things(topic)))
        pattern = re.escape(phrasing).replace(r"\{n\}", f"(?P<n>{names})").replace(r"\{o\}", f"(?:{medicines})")
        made.append(_Phrasing(topic, unseen, re.compile(pattern)))
    return tuple(made)


def _either(names: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))


@cache
def _owners() -> dict[tuple[str, str], str]:
    """Topic and name → what is called so."""
    pairs = [(topic, thing) for topic in TOPICS for thing in domain.things(topic)]
    return {(topic, name): thing for topic, thing in pairs for name in domain.names(topic, thing)}
