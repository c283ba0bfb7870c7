"""The tiny base model's pretraining corpus, which replaces a real base model's general knowledge.

Passages, and short dialogues about names and topics; never a question with its rewrite. Products
and intents are the sample's, but no document is about a product × intent pair of the test split, or
uses a phrasing that only the test split has. `leak` finds either in any text.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random

from qinglan.config import Tenant
from qinglan.recipes.query_rewrite import STUDENT_SYSTEM, user_text
from qinglan.rows import Split
from qinglan.simulators.domains import chat
from qinglan.simulators.domains.query_rewrite import facts as domain
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


def documents(seed: int, count: int) -> Iterator[str]:
    rng = Random(seed)
    return (draw_until_safe(document, rng) for _ in range(count))


def draw_until_safe(draw: Callable[[Random], str], rng: Random) -> str:
    """A text that reveals nothing: noise and mixed phrasings can make something that only dev or
    test has."""
    while leak(text := draw(rng)):
        pass
    return text


def characters() -> list[str]:
    rng = Random(0)
    passages = (
        domain.passage(rng, p, i, bridge=True) for _ in range(3) for p, i in domain.pairs("train")
    )
    return sorted(set("".join((*passages, *words(), *_texts()))))


def words() -> list[str]:
    named = [
        *PRODUCTS,
        *(word for known in INTENTS.values() for word in sorted(known.accepted_words)),
    ]
    prompts = [STUDENT_SYSTEM.format(domain=Tenant().domain), user_text("问题", "画像", "历史")]
    return ["system", "user", "assistant", *prompts, NAME_TASK, TOPIC_TASK, PARAPHRASE_TASK, *named]


def _texts() -> Iterator[str]:
    for names in (
        *PRODUCTS.values(),
        *domain.PRODUCT_TYPOS.values(),
        *domain.INFORMATIVE_PROFILES.values(),
    ):
        yield from names
    for known in INTENTS.values():
        yield from (*known.phrasings["train"], known.topic)
    yield from (*domain.AMBIGUOUS["train"], *domain.PREFIXES, *domain.SUFFIXES, *domain.REFERENCES)
    yield from (*domain.HISTORIES, *domain.PLAIN_PROFILES, *domain.WORD_TYPOS.values())
    yield "的学名的俗名0123456789，。：；？\n "


def document(rng: Random) -> str:
    product, intent = rng.choice(domain.pairs("train"))
    draw = rng.random()
    if draw < P_PASSAGE:
        return f"{domain.title(product, intent)}\n{domain.passage(rng, product, intent)}\n"
    if draw < P_PASSAGE + P_NAMES:
        name = rng.choice(PRODUCTS[product])
        return (
            chat(f"{name}的学名", product) if rng.random() < 0.5 else chat(f"{product}的俗名", name)
        )
    asked = question(rng, product, intent)
    prompt = user_text(asked.query, asked.profile, asked.history)
    tasks = [(NAME_TASK, product), (TOPIC_TASK, INTENTS[intent].topic)]
    rng.shuffle(tasks)
    if rng.random() < P_PARAPHRASE:
        other = rng.choice(INTENTS[intent].phrasings["train"]).format(
            p=rng.choice(PRODUCTS[product])
        )
        tasks.insert(rng.randrange(3), (PARAPHRASE_TASK, other))
    (first, answer), *more = tasks
    turns = [f"{first}：{prompt}", answer]
    for task, next_answer in more:
        turns += [task, next_answer]
    return chat(*turns)


def question(rng: Random, product: str, intent: str) -> RewriteQuestion:
    asked = domain.ask(rng, product, intent)
    query, draw = asked.query, rng.random()
    if draw < P_TWO_PHRASINGS:
        query += "，" + rng.choice(INTENTS[intent].phrasings["train"]).format(
            p=rng.choice(domain.REFERENCES)
        )
    elif draw < P_TWO_PHRASINGS + P_LOST_CHARACTERS:
        for _ in range(min(rng.randint(1, 2), len(query) - 1)):
            place = rng.randrange(len(query))
            query = query[:place] + query[place + 1 :]
    history = asked.history
    if not history and rng.random() < P_OTHER_HISTORY:
        history = rng.choice(domain.HISTORIES).format(
            p=rng.choice(PRODUCTS[rng.choice(list(PRODUCTS))])
        )
    return replace(asked, query=query, history=history)


_OWNER = {
    name: product
    for product, names in PRODUCTS.items()
    for name in (product, *names, *domain.PRODUCT_TYPOS.get(product, ()))
}
_NAME = re.compile(f"({'|'.join(sorted(map(re.escape, _OWNER), key=len, reverse=True))})")
_SEEN = {
    phrasing: intent for intent, known in INTENTS.items() for phrasing in known.phrasings["train"]
}
_UNSEEN: set[str] = {
    phrasing
    for split in HELD_OUT
    for known in (domain.AMBIGUOUS, *(intent.phrasings for intent in INTENTS.values()))
    for phrasing in known[split]
}
_CORES = {p: max(p.split("{p}"), key=len) for p in (*_SEEN, *domain.AMBIGUOUS["train"], *_UNSEEN)}
"""Phrasing → its longest part that doesn't depend on the product."""
_FILED = {
    text: (product, intent)
    for split in HELD_OUT
    for product, intent in domain.pairs(split)
    for text in (domain.title(product, intent), product + INTENTS[intent].kb_term.split()[0])
}
"""The titles of their pairs in the knowledge base, and the beginnings of their passages."""


def leak(text: str) -> str | None:
    """What the text reveals of dev and test; None where it reveals nothing."""
    for right, wrong in domain.WORD_TYPOS.items():
        text = text.replace(wrong, right)
    for product, phrasing in _asked(text):
        if phrasing in _UNSEEN:
            return f"held-out phrasing {phrasing}"
        intent = _SEEN.get(phrasing) or next(  # the profile decides an ambiguous question
            (
                intent
                for intent, texts in domain.INFORMATIVE_PROFILES.items()
                if any(p in text for p in texts)
            ),
            None,
        )
        if product and intent and domain.pair_split(product, intent) != "train":
            return f"held-out pair {product} × {intent}: {phrasing}"
    return next(
        (
            f"passage of held-out pair {pair}: {filed}"
            for filed, pair in _FILED.items()
            if filed in text
        ),
        None,
    )


def _asked(text: str) -> Iterator[tuple[str, str]]:
    """(product, phrasing) for every question in the text; a follow-up may be about any product
    named."""
    candidates = [phrasing for phrasing, core in _CORES.items() if core in text]
    if not candidates:
        return
    parts = _NAME.split(text)  # every other one is a name
    names = sorted(set(parts[1::2]))
    for name in names:
        marked = "".join("{p}" if part == name else part for part in parts)
        yield from (
            (_OWNER[name], phrasing) for phrasing in _longest(p for p in candidates if p in marked)
        )
    for reference in domain.REFERENCES:
        follow_ups = _longest(p for p in candidates if _is_follow_up(p, reference, text))
        yield from (
            (_OWNER.get(name, ""), phrasing) for phrasing in follow_ups for name in names or [""]
        )


def _is_follow_up(phrasing: str, reference: str, text: str) -> bool:
    # Without a reference the phrasing alone says too little; follow-ups begin with 那, second
    # questions with a comma.
    question = phrasing.format(p=reference)
    return question in text if reference else any(opening + question in text for opening in "那，")


def _longest(phrasings: Iterable[str]) -> list[str]:
    """Of two phrasings, one inside the other, only the longer."""
    found = list(phrasings)
    return [p for p in found if not any(p != longer and p in longer for longer in found)]
