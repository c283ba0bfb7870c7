"""The facts of the sample: supplements, what users ask about them, and how a knowledge base titles
them.

The knowledge base has its own wording for five of twelve intents and its own names for three of 44
products. The simulated teacher does not know these wordings, but sometimes writes an alternative
that is one of them: reinforcement learning has to find it.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from random import Random

from qinglan.rows import Split
from qinglan.simulators.domains import load_facts, owner_of


@dataclass(frozen=True)
class Intent:
    """Something that users want to know about a product; for the fields see `facts.yaml`."""

    name: str
    topic: str
    kb_term: str
    """How the knowledge base titles it."""
    habit: str
    """How the teacher titles it."""
    alternatives: tuple[tuple[str, int], ...]
    """What the teacher writes instead now and then, with weights."""
    phrasings: dict[Split, tuple[str, ...]]
    """Half of the dev and test rows use train's."""
    passage: str
    draws: tuple[tuple[int, tuple[str | int, ...]], ...] = ()
    bridge: str = ""
    """A sentence in the teacher's wording that some passages carry; empty where the knowledge
    base's is the same."""
    synonyms: tuple[str, ...] = ()
    """Further words that a judge takes for this intent."""

    @property
    def accepted_words(self) -> frozenset[str]:
        """All words that name this intent, whoever uses them."""
        terms = (self.kb_term, self.habit, *(term for term, _ in self.alternatives))
        return frozenset(word for term in terms for word in term.split()) | frozenset(self.synonyms)


@dataclass(frozen=True)
class _Tables:
    products: dict[str, tuple[str, ...]]
    name_mismatch: dict[str, str]
    product_typos: dict[str, tuple[str, ...]]
    word_typos: dict[str, str]
    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    references: tuple[str, ...]
    histories: tuple[str, ...]
    plain_profiles: tuple[str, ...]
    informative_profiles: dict[str, tuple[str, ...]]
    ambiguous: dict[Split, tuple[str, ...]]
    intents: dict[str, Intent]
    question_cues: dict[str, str]
    profile_cues: dict[str, str]


_TABLES = load_facts(__package__, _Tables)
PRODUCTS, PRODUCT_TYPOS, NAME_MISMATCH = (
    _TABLES.products,
    _TABLES.product_typos,
    _TABLES.name_mismatch,
)
WORD_TYPOS, PREFIXES, SUFFIXES = _TABLES.word_typos, _TABLES.prefixes, _TABLES.suffixes
REFERENCES, HISTORIES, PLAIN_PROFILES = (
    _TABLES.references,
    _TABLES.histories,
    _TABLES.plain_profiles,
)
INFORMATIVE_PROFILES = _TABLES.informative_profiles
INTENTS, AMBIGUOUS = _TABLES.intents, _TABLES.ambiguous
QUESTION_CUES, PROFILE_CUES = _TABLES.question_cues, _TABLES.profile_cues

P_FOLLOW_UP = 0.20
P_PROFILE_DECIDES = 0.25
"""Of the questions with one of the intents in `INFORMATIVE_PROFILES`: about 6% of all."""
P_PLAIN_PROFILE = 0.12
P_MISLEADING_PROFILE = 0.02
P_UNRELATED_HISTORY = 0.04
P_PRODUCT_TYPO = 0.05
P_WORD_TYPO = 0.05
P_BRIDGE = 0.75
"""Share of the mismatched intents' passages that also carry the teacher's wording."""

_PAIR_SEED = 189
"""Chosen so that every intent, product and mismatched name occurs in the test split in
proportion."""


@dataclass(frozen=True)
class RewriteQuestion:
    """What a user says, with what the product remembers of them."""

    query: str
    profile: str = ""
    history: str = ""


def pair_split(product: str, intent: str) -> Split:
    """Which split owns a product × intent pair: no other one asks about it. Three in ten are
    test's, one is dev's."""
    digest = hashlib.sha256(f"{_PAIR_SEED}|{product}|{intent}".encode()).digest()
    return owner_of(int.from_bytes(digest[:4], "big") % 10 / 10, p_test=0.3, p_dev=0.1)


@cache
def pairs(split: Split) -> tuple[tuple[str, str], ...]:
    return tuple((p, i) for p in PRODUCTS for i in INTENTS if pair_split(p, i) == split)


def ask(rng: Random, product: str, intent: str, phrased: Split = "train") -> RewriteQuestion:
    """A colloquial question about a pair, in a phrasing of the split `phrased`."""
    profile = _profile(rng, intent)
    ambiguous = profile and profile in INFORMATIVE_PROFILES.get(intent, ())
    phrasings = AMBIGUOUS if ambiguous else INTENTS[intent].phrasings
    phrasing = _misspell(rng, rng.choice(phrasings[phrased]))
    if product in PRODUCT_TYPOS and rng.random() < P_PRODUCT_TYPO:
        name = rng.choice(PRODUCT_TYPOS[product])
    else:
        name = rng.choice(PRODUCTS[product])
    if rng.random() < P_FOLLOW_UP:
        query = "那" + phrasing.format(p=rng.choice(REFERENCES)) + rng.choice(("", "", "？", "呢"))
        return RewriteQuestion(query, profile, rng.choice(HISTORIES).format(p=name))
    history = ""
    if rng.random() < P_UNRELATED_HISTORY:
        other = rng.choice([p for p in PRODUCTS if p != product])
        history = rng.choice(HISTORIES).format(p=rng.choice(PRODUCTS[other]))
    return RewriteQuestion(
        rng.choice(PREFIXES) + phrasing.format(p=name) + rng.choice(SUFFIXES), profile, history
    )


def _profile(rng: Random, intent: str) -> str:
    """A profile that decides (only for the intents that have one), misleads, or doesn't matter."""
    if intent in INFORMATIVE_PROFILES and rng.random() < P_PROFILE_DECIDES:
        return rng.choice(INFORMATIVE_PROFILES[intent])
    draw = rng.random()
    if draw < P_MISLEADING_PROFILE and intent not in INFORMATIVE_PROFILES:
        return rng.choice(
            [profile for profiles in INFORMATIVE_PROFILES.values() for profile in profiles]
        )
    return rng.choice(PLAIN_PROFILES) if draw < P_MISLEADING_PROFILE + P_PLAIN_PROFILE else ""


def _misspell(rng: Random, phrasing: str) -> str:
    for right, wrong in WORD_TYPOS.items():
        if right in phrasing:
            return phrasing.replace(right, wrong) if rng.random() < P_WORD_TYPO else phrasing
    return phrasing


@dataclass(frozen=True)
class Document:
    id: str
    title: str
    content: str


def title(product: str, intent: str) -> str:
    """How the knowledge base titles a pair; as a query, the oracle."""
    return f"{product} {INTENTS[intent].kb_term}"


def passage(rng: Random, product: str, intent: str, bridge: bool = False) -> str:
    """A freshly drawn passage; `bridge` forces the sentence in the teacher's wording."""
    known = INTENTS[intent]
    has_bridge = bridge or rng.random() < P_BRIDGE
    other = rng.choice([p for p in PRODUCTS if p != product]) if "{other}" in known.passage else ""
    drawn = [value for count, values in known.draws for value in rng.sample(values, count)]
    return known.passage.format(*drawn, p=product, other=other) + (
        known.bridge if has_bridge else ""
    )


def documents() -> list[Document]:
    """The sample's knowledge base: one document per pair."""
    rng = Random(5)
    return [
        Document(f"{p}-{i}", title(p, i), passage(rng, p, i)) for p in PRODUCTS for i in INTENTS
    ]
