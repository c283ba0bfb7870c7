"""The facts of the sample: supplements, users' questions, and a knowledge base's titles.

The knowledge base has its own wording for five of twelve intents and its own names for three of 44
products. The simulated teacher does not know these wordings, but sometimes writes an alternative
that is one of them: reinforcement learning has to find it.

The order of the draws from `rng` decides every text, and with them the weights of the base model.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import chain
from itertools import product as combinations
from random import Random

from qinglan.rows import Split
from qinglan.simulators.domains import all_but, load_facts, owner_of


@dataclass(frozen=True)
class Intent:
    """Something that users want to know about a product; for the fields see `facts.yaml`."""

    name: str
    topic: str
    kb_term: str
    """The knowledge base's title for it."""
    habit: str
    """The teacher's usual title for it."""
    alternatives: tuple[tuple[str, int], ...]
    """Titles that the teacher writes instead now and then, with weights."""
    phrasings: dict[Split, tuple[str, ...]]
    """Half of the dev and test rows use train's."""
    passage: str
    draws: tuple[tuple[int, tuple[str | int, ...]], ...] = ()
    """Numbers of values, and the values from which so many are drawn for the passage."""
    bridge: str = ""
    """A sentence in the teacher's wording that some passages carry; empty where the knowledge
    base's is the same."""
    synonyms: tuple[str, ...] = ()
    """Further words that a judge takes for this intent."""

    @property
    def accepted_words(self) -> frozenset[str]:
        """All words that name this intent, whoever uses them."""
        words = {*self.kb_term.split(), *self.habit.split(), *self.synonyms}
        for term, _ in self.alternatives:
            words.update(term.split())
        return frozenset(words)


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
PRODUCTS = _TABLES.products
PRODUCT_TYPOS = _TABLES.product_typos
NAME_MISMATCH = _TABLES.name_mismatch
WORD_TYPOS = _TABLES.word_typos
PREFIXES = _TABLES.prefixes
SUFFIXES = _TABLES.suffixes
REFERENCES = _TABLES.references
HISTORIES = _TABLES.histories
PLAIN_PROFILES = _TABLES.plain_profiles
INFORMATIVE_PROFILES = _TABLES.informative_profiles
INTENTS = _TABLES.intents
AMBIGUOUS = _TABLES.ambiguous
QUESTION_CUES = _TABLES.question_cues
PROFILE_CUES = _TABLES.profile_cues

P_FOLLOW_UP = 0.20
P_PROFILE_DECIDES = 0.25
"""Share of the questions with one of the intents in `INFORMATIVE_PROFILES`: about 6% of all."""
P_PLAIN_PROFILE = 0.12
P_MISLEADING_PROFILE = 0.02
P_UNRELATED_HISTORY = 0.04
P_PRODUCT_TYPO = 0.05
P_WORD_TYPO = 0.05
P_BRIDGE = 0.75
"""Share of the mismatched intents' passages that also carry the teacher's wording."""
P_TEST_PAIR = 0.3
P_DEV_PAIR = 0.1

_PAIR_SEED = 189
"""Chosen so that every intent, product and mismatched name occurs in the test split in
proportion."""
_DOCUMENTS_SEED = 5


@dataclass(frozen=True)
class RewriteQuestion:
    """A user's question, with what the product remembers of the user."""

    query: str
    profile: str = ""
    history: str = ""


def pair_split(product: str, intent: str) -> Split:
    """The split that owns a product × intent pair: no other one asks about it.

    Three in ten are test's, one is dev's.
    """
    digest = hashlib.sha256(f"{_PAIR_SEED}|{product}|{intent}".encode()).digest()
    fraction = int.from_bytes(digest[:4], "big") % 10 / 10
    return owner_of(fraction, P_TEST_PAIR, P_DEV_PAIR)


@cache
def pairs(split: Split) -> tuple[tuple[str, str], ...]:
    """The (product, intent) pairs that a split owns."""
    return tuple(pair for pair in combinations(PRODUCTS, INTENTS) if pair_split(*pair) == split)


def ask(rng: Random, product: str, intent: str, phrased: Split = "train") -> RewriteQuestion:
    """A colloquial question about a pair, in a phrasing of the split `phrased`."""
    # The profile comes first: where it decides, the phrasing leaves the intent open.
    profile = _draw_profile(rng, intent)
    profile_decides = profile != "" and profile in INFORMATIVE_PROFILES.get(intent, ())
    phrasings = AMBIGUOUS if profile_decides else INTENTS[intent].phrasings
    phrasing = _misspell(rng, rng.choice(phrasings[phrased]))
    name = _draw_name(rng, product)
    if rng.random() < P_FOLLOW_UP:
        # The product is named in the history alone.
        follow_up = phrasing.format(p=rng.choice(REFERENCES))
        query = "那" + follow_up + rng.choice(("", "", "？", "呢"))
        return RewriteQuestion(query, profile, rng.choice(HISTORIES).format(p=name))
    history = ""
    if rng.random() < P_UNRELATED_HISTORY:
        other_product = rng.choice(all_but(PRODUCTS, product))
        history = rng.choice(HISTORIES).format(p=rng.choice(PRODUCTS[other_product]))
    query = rng.choice(PREFIXES) + phrasing.format(p=name) + rng.choice(SUFFIXES)
    return RewriteQuestion(query, profile, history)


def _draw_name(rng: Random, product: str) -> str:
    """A name by which users call a product, now and then misspelt."""
    if product in PRODUCT_TYPOS and rng.random() < P_PRODUCT_TYPO:
        return rng.choice(PRODUCT_TYPOS[product])
    return rng.choice(PRODUCTS[product])


def _draw_profile(rng: Random, intent: str) -> str:
    """A profile that decides (only for the intents that have one), misleads, or doesn't matter."""
    if intent in INFORMATIVE_PROFILES and rng.random() < P_PROFILE_DECIDES:
        return rng.choice(INFORMATIVE_PROFILES[intent])
    draw = rng.random()
    if draw < P_MISLEADING_PROFILE and intent not in INFORMATIVE_PROFILES:
        # It speaks of another intent than the one that is asked about.
        return rng.choice(list(chain.from_iterable(INFORMATIVE_PROFILES.values())))
    if draw < P_MISLEADING_PROFILE + P_PLAIN_PROFILE:
        return rng.choice(PLAIN_PROFILES)
    return ""


def _misspell(rng: Random, phrasing: str) -> str:
    """The phrasing, now and then with a typo in its first word that has one."""
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
    """The knowledge base's title of a pair; as a query, the oracle."""
    return f"{product} {INTENTS[intent].kb_term}"


def passage(rng: Random, product: str, intent: str, bridge: bool = False) -> str:
    """A freshly drawn passage; `bridge` forces the sentence in the teacher's wording."""
    facts = INTENTS[intent]
    # A forced bridge draws nothing.
    has_bridge = bridge or rng.random() < P_BRIDGE
    other_product = ""
    if "{other}" in facts.passage:
        other_product = rng.choice(all_but(PRODUCTS, product))
    values: list[str | int] = []
    for count, choices in facts.draws:
        values += rng.sample(choices, count)
    text = facts.passage.format(*values, p=product, other=other_product)
    if has_bridge:
        text += facts.bridge
    return text


def documents() -> list[Document]:
    """The sample's knowledge base: one document per pair."""
    rng = Random(_DOCUMENTS_SEED)
    knowledge_base = []
    for product, intent in combinations(PRODUCTS, INTENTS):
        content = passage(rng, product, intent)
        document = Document(f"{product}-{intent}", title(product, intent), content)
        knowledge_base.append(document)
    return knowledge_base
