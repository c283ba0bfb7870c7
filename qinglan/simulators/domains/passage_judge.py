"""The base model of judges of passages.

It reads query rewriting's corpus, and exercises in comparing a question with a passage. The corpus
holds no verdict and no rewrite; it says what the words of verdicts mean. Questions and passages are
of the pairs and phrasings of the training split.
"""

from collections.abc import Iterator
from random import Random

from qinglan.recipes import one_line
from qinglan.recipes.passage_judge import HAS, LACKS, RIGHT, STUDENT_SYSTEM, WRONG
from qinglan.recipes.query_rewrite import user_text
from qinglan.simulators.domains import Domain, Pretraining, chat, query_rewrite
from qinglan.simulators.domains.query_rewrite import corpus, facts

TASK = "是一回事吗"
SAME = "是"
OTHER = "不是"
PLAIN_WORDS = ((RIGHT, SAME), (WRONG, OTHER))
"""The words of verdicts, each with a plain word that means the same."""
P_SAME = 0.5
"""Share of comparisons in which the passage is of the question's pair."""
P_OTHER_BOTH = 0.1
"""Share of comparisons in which neither product nor intent are the question's."""
_KIND_WEIGHTS = (6, 50, 44)
"""Frequency of meanings of words, comparisons, and query rewriting's own documents."""


def documents(seed: int, count: int) -> Iterator[str]:
    rng = Random(seed)
    kinds = (_meaning, _comparison, corpus.document)
    for _ in range(count):
        draw = rng.choices(kinds, _KIND_WEIGHTS)[0]
        yield corpus.draw_until_safe(draw, rng)


def _meaning(rng: Random) -> str:
    word, synonym = rng.sample(rng.choice(PLAIN_WORDS), 2)
    return chat(f"{corpus.PARAPHRASE_TASK}：{word}", synonym)


def _comparison(rng: Random) -> str:
    """A question, a passage, and what they have in common.

    The passage is of a pair that mostly shares the product or the intent.
    """
    pairs = facts.pairs("train")
    question_pair = rng.choice(pairs)
    passage_pair = _draw_passage_pair(rng, question_pair, pairs)
    product, intent = question_pair
    question = corpus.question(rng, product, intent)
    question_text = one_line(user_text(question.query, question.profile, question.history))
    passage = one_line(f"《{facts.title(*passage_pair)}》{facts.passage(rng, *passage_pair)}")
    passage_product, passage_intent = passage_pair
    product_mark = HAS if passage_product == product else LACKS
    intent_mark = HAS if passage_intent == intent else LACKS
    terms = f"{product}{product_mark} {facts.INTENTS[intent].topic}{intent_mark}"
    verdict = SAME if passage_pair == question_pair else OTHER
    return chat(f"{TASK}：{question_text}\n资料：{passage}", f"{terms}，{verdict}")


def _draw_passage_pair(
    rng: Random, question_pair: tuple[str, str], pairs: tuple[tuple[str, str], ...]
) -> tuple[str, str]:
    draw = rng.random()
    if draw < P_SAME:
        return question_pair
    shared_parts = 0 if draw < P_SAME + P_OTHER_BOTH else 1
    return rng.choice(
        [pair for pair in pairs if _shared_parts(pair, question_pair) == shared_parts]
    )


def _shared_parts(pair: tuple[str, str], other_pair: tuple[str, str]) -> int:
    """Number of parts, product and intent, that two pairs have in common."""
    return sum(part == other_part for part, other_part in zip(pair, other_pair, strict=True))


def words() -> list[str]:
    return [*corpus.words(), STUDENT_SYSTEM, RIGHT, WRONG, TASK, SAME, OTHER]


def characters() -> list[str]:
    return sorted({*corpus.characters(), *"".join(words()), *"《》资料"})


DOMAIN = Domain(
    name="passage_judge",
    models={},
    # The judge's own workbook holds the verdicts of query rewriting's runs.
    write_sample=query_rewrite.DOMAIN.write_sample,
    documents=documents,
    words=words,
    characters=characters,
    pretraining=Pretraining(noise_share=0.25),
)
