"""The tiny base model's pretraining corpus, which replaces a real base model's general knowledge.

Passages, and short dialogues about names and topics; never a question with its rewrite. Products
and intents are the sample's, but no document is about a product × intent pair of the test split, or
uses a phrasing that only the test split has. `leak` finds either in any text.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from qinglan.config import Tenant
from qinglan.recipes.query_rewrite import STUDENT_SYSTEM, user_text
from qinglan.rows import Split
from qinglan.simulators.domains import all_but, chat, parts_in, pattern_of_any
from qinglan.simulators.domains.query_rewrite import facts
from qinglan.simulators.domains.query_rewrite.facts import INTENTS, PRODUCTS, RewriteQuestion

NAME_TASK = "标准名"
TOPIC_TASK = "主题"
PARAPHRASE_TASK = "换个说法"
HELD_OUT: tuple[Split, ...] = ("dev", "test")

P_PASSAGE = 0.14
P_NAMES = 0.08
P_PARAPHRASE = 0.2
P_TWO_PHRASINGS = 0.15
P_LOST_CHARACTERS = 0.2
P_OTHER_HISTORY = 0.1
"""Share of self-contained questions that come with a history about something else."""
_PASSAGES_PER_PAIR = 3
"""Number of passages from which the characters of a pair's passages are collected."""


def documents(seed: int, count: int) -> Iterator[str]:
    rng = Random(seed)
    for _ in range(count):
        yield draw_until_safe(document, rng)


def draw_until_safe(draw: Callable[[Random], str], rng: Random) -> str:
    """A text that reveals nothing of dev or test.

    Noise and mixed phrasings can make something that only those have.
    """
    while True:
        text = draw(rng)
        if leak(text) is None:
            return text


def characters() -> list[str]:
    rng = Random(0)
    texts = [*words(), *_texts()]
    for _ in range(_PASSAGES_PER_PAIR):
        for product, intent in facts.pairs("train"):
            texts.append(facts.passage(rng, product, intent, bridge=True))
    return sorted(set("".join(texts)))


def words() -> list[str]:
    intent_words: list[str] = []
    for intent in INTENTS.values():
        intent_words += sorted(intent.accepted_words)
    prompts = [STUDENT_SYSTEM.format(domain=Tenant().domain), user_text("问题", "画像", "历史")]
    return [
        "system",
        "user",
        "assistant",
        *prompts,
        NAME_TASK,
        TOPIC_TASK,
        PARAPHRASE_TASK,
        *PRODUCTS,
        *intent_words,
    ]


def _texts() -> Iterator[str]:
    """The texts that questions of the training split are made of."""
    for names in PRODUCTS.values():
        yield from names
    for typos in facts.PRODUCT_TYPOS.values():
        yield from typos
    for profiles in facts.INFORMATIVE_PROFILES.values():
        yield from profiles
    for intent in INTENTS.values():
        yield from intent.phrasings["train"]
        yield intent.topic
    yield from facts.AMBIGUOUS["train"]
    yield from facts.PREFIXES
    yield from facts.SUFFIXES
    yield from facts.REFERENCES
    yield from facts.HISTORIES
    yield from facts.PLAIN_PROFILES
    yield from facts.WORD_TYPOS.values()
    yield "的学名的俗名0123456789，。：；？\n "


def document(rng: Random) -> str:
    """A passage, a dialogue about a name, or an exercise in reading a question."""
    product, intent = rng.choice(facts.pairs("train"))
    draw = rng.random()
    if draw < P_PASSAGE:
        return f"{facts.title(product, intent)}\n{facts.passage(rng, product, intent)}\n"
    if draw < P_PASSAGE + P_NAMES:
        return _naming(rng, product)
    return _reading(rng, product, intent)


def _naming(rng: Random, product: str) -> str:
    name = rng.choice(PRODUCTS[product])
    if rng.random() < 0.5:
        return chat(f"{name}的学名", product)
    return chat(f"{product}的俗名", name)


def _reading(rng: Random, product: str, intent: str) -> str:
    """A question, and what it is about; now and then the same question in other words."""
    asked_question = question(rng, product, intent)
    prompt = user_text(asked_question.query, asked_question.profile, asked_question.history)
    # In any order, so that neither the name nor the topic is learnt by its place.
    tasks = [(NAME_TASK, product), (TOPIC_TASK, INTENTS[intent].topic)]
    rng.shuffle(tasks)
    if rng.random() < P_PARAPHRASE:
        phrasing = rng.choice(INTENTS[intent].phrasings["train"])
        paraphrase = phrasing.format(p=rng.choice(PRODUCTS[product]))
        tasks.insert(rng.randrange(3), (PARAPHRASE_TASK, paraphrase))
    (first_task, first_answer), *further_tasks = tasks
    turns = [f"{first_task}：{prompt}", first_answer]
    for task, answer in further_tasks:
        turns += [task, answer]
    return chat(*turns)


def question(rng: Random, product: str, intent: str) -> RewriteQuestion:
    """A question as the sample has them, but now and then doubled, damaged, or out of context."""
    asked_question = facts.ask(rng, product, intent)
    query = asked_question.query
    draw = rng.random()
    if draw < P_TWO_PHRASINGS:
        phrasing = rng.choice(INTENTS[intent].phrasings["train"])
        query += "，" + phrasing.format(p=rng.choice(facts.REFERENCES))
    elif draw < P_TWO_PHRASINGS + P_LOST_CHARACTERS:
        # At least one character stays.
        for _ in range(min(rng.randint(1, 2), len(query) - 1)):
            place = rng.randrange(len(query))
            query = query[:place] + query[place + 1 :]
    history = asked_question.history
    if not history and rng.random() < P_OTHER_HISTORY:
        history_frame = rng.choice(facts.HISTORIES)
        any_product = rng.choice(list(PRODUCTS))
        history = history_frame.format(p=rng.choice(PRODUCTS[any_product]))
    return replace(asked_question, query=query, history=history)


# ---- what a text reveals of dev and test ----


def _owners_of_names() -> dict[str, str]:
    """Every name of a product, and every typo of it → the product."""
    owners = {}
    for product, names in PRODUCTS.items():
        for name in (product, *names, *facts.PRODUCT_TYPOS.get(product, ())):
            owners[name] = product
    return owners


def _intents_of_phrasings() -> dict[str, str]:
    """Every phrasing of the training split → its intent."""
    intents = {}
    for name, intent in INTENTS.items():
        for phrasing in intent.phrasings["train"]:
            intents[phrasing] = name
    return intents


def _held_out_phrasings() -> set[str]:
    phrasings: set[str] = set()
    for split in HELD_OUT:
        phrasings.update(facts.AMBIGUOUS[split])
        for intent in INTENTS.values():
            phrasings.update(intent.phrasings[split])
    return phrasings


def _held_out_titles() -> dict[str, tuple[str, str]]:
    """Titles of held-out pairs, and the beginnings of their passages → the pair."""
    pair_of = {}
    for split in HELD_OUT:
        for product, intent in facts.pairs(split):
            beginning = product + INTENTS[intent].kb_term.split()[0]
            for text in (facts.title(product, intent), beginning):
                pair_of[text] = (product, intent)
    return pair_of


def _longest_fixed_part(phrasing: str) -> str:
    """The longest part of a phrasing that doesn't depend on the product."""
    return max(phrasing.split("{p}"), key=len)


_PRODUCT_OF_NAME = _owners_of_names()
_NAME = re.compile(f"({pattern_of_any(_PRODUCT_OF_NAME)})")
_INTENT_OF_PHRASING = _intents_of_phrasings()
_UNSEEN = _held_out_phrasings()
_ALL_PHRASINGS = (*_INTENT_OF_PHRASING, *facts.AMBIGUOUS["train"], *_UNSEEN)
_FIXED_PARTS = {phrasing: _longest_fixed_part(phrasing) for phrasing in _ALL_PHRASINGS}
"""Phrasing → its longest part that doesn't depend on the product, which is quick to look for."""
_PAIR_OF_TITLE = _held_out_titles()


def leak(text: str) -> str | None:
    """What the text reveals of dev and test, in words; None where it reveals nothing."""
    for right, wrong in facts.WORD_TYPOS.items():
        text = text.replace(wrong, right)
    for product, phrasing in _questions_in(text):
        if phrasing in _UNSEEN:
            return f"held-out phrasing {phrasing}"
        # The profile decides an ambiguous question.
        intent = _INTENT_OF_PHRASING.get(phrasing) or _intent_of_profile(text)
        if product and intent and facts.pair_split(product, intent) != "train":
            return f"held-out pair {product} × {intent}: {phrasing}"
    for title, pair in _PAIR_OF_TITLE.items():
        if title in text:
            return f"passage of held-out pair {pair}: {title}"
    return None


def _intent_of_profile(text: str) -> str | None:
    """The first intent of which the text holds a profile."""
    for intent, profiles in facts.INFORMATIVE_PROFILES.items():
        if parts_in(text, profiles):
            return intent
    return None


def _questions_in(text: str) -> Iterator[tuple[str, str]]:
    """(product, phrasing) for every question in the text.

    A follow-up may be about any product that the text names; about "" where it names none.
    """
    candidates = [phrasing for phrasing, part in _FIXED_PARTS.items() if part in text]
    if not candidates:
        return
    # The pattern has a group, so every second part is a name.
    parts = _NAME.split(text)
    names = sorted(set(parts[1::2]))
    for name in names:
        marked_text = "".join("{p}" if part == name else part for part in parts)
        for phrasing in _longest(parts_in(marked_text, candidates)):
            yield _PRODUCT_OF_NAME[name], phrasing
    products = [_PRODUCT_OF_NAME[name] for name in names] or [""]
    for reference in facts.REFERENCES:
        follow_ups = [p for p in candidates if _is_follow_up(p, reference, text)]
        for phrasing in _longest(follow_ups):
            for product in products:
                yield product, phrasing


def _is_follow_up(phrasing: str, reference: str, text: str) -> bool:
    follow_up = phrasing.format(p=reference)
    if reference:
        return follow_up in text
    # Without a reference the phrasing alone says too little; follow-ups begin with 那, second
    # questions with a comma.
    return f"那{follow_up}" in text or f"，{follow_up}" in text


def _longest(phrasings: list[str]) -> list[str]:
    """The phrasings that are not a part of another one."""
    return [phrasing for phrasing in phrasings if not _is_part_of_any(phrasing, phrasings)]


def _is_part_of_any(phrasing: str, phrasings: list[str]) -> bool:
    return any(phrasing in longer for longer in all_but(phrasings, phrasing))
