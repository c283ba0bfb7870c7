"""The base model's corpus says nothing about what the test split asks."""

from random import Random

import pytest

from qinglan.recipes.query_rewrite import user_text
from qinglan.simulators.domains.query_rewrite import corpus
from qinglan.simulators.domains.query_rewrite import facts as domain

DOCUMENTS = list(corpus.documents(seed=3, count=3000))


def test_no_document_leaks():
    assert [leak for text in DOCUMENTS if (leak := corpus.leak(text))] == []


def test_no_phrasing_of_the_test_split_only():
    # Independent of `leak`: the phrasings after a plain name, which is how nearly all questions are built.
    names = [name for names in domain.PRODUCTS.values() for name in names]
    unseen = [phrasing for intent in domain.INTENTS.values() for phrasing in intent.test_phrasings]
    questions = [phrasing.format(p=name) for phrasing in unseen if phrasing.startswith("{p}") for name in names]
    text = "\n".join(line.partition("：")[2] for text in DOCUMENTS for line in text.splitlines())
    starts = {line[:30] for line in text.splitlines()}
    assert not [q for q in questions if any(line.startswith(q) for line in starts)]


@pytest.mark.parametrize("unseen", [False, True])
def test_every_test_question_would_be_found(unseen):
    rng = Random(1)
    for product, intent in domain.pairs("test") * 3:
        asked = domain.ask(rng, product, intent, unseen)
        assert corpus.leak(user_text(asked.query, asked.profile, asked.history))


@pytest.mark.parametrize("pair", domain.pairs("test")[::20])
def test_every_test_passage_would_be_found(pair):
    assert corpus.leak(domain.title(*pair))
    assert corpus.leak(domain.passage(Random(0), *pair))


def test_topics_give_no_rewrite_away():
    terms = {word for intent in domain.INTENTS.values() for word in intent.accepted_words}
    assert not terms & {intent.topic for intent in domain.INTENTS.values()}


def test_no_answer_is_a_rewrite():
    terms = [term for i in domain.INTENTS.values() for term in (i.habit, i.kb_term, *(t for t, _ in i.alternatives))]
    answers = {
        turn.partition("<|im_end|>")[0] for text in DOCUMENTS for turn in text.split("<|im_start|>assistant\n")[1:]
    }
    assert not [a for a in answers if any(a == f"{p} {term}" for p in domain.PRODUCTS for term in terms)]


def test_the_train_pairs_are_known():
    titles = {text.partition("\n")[0] for text in corpus.documents(5, 20_000)}
    known = [domain.title(*pair) in titles for pair in domain.pairs("train")]
    assert sum(known) > 0.98 * len(known)
