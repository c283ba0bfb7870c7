"""The base model's corpus says nothing about what the test split asks."""

from random import Random

import pytest

from qinglan.recipes.query_rewrite import user_text
from qinglan.simulators.domains.query_rewrite import corpus
from qinglan.simulators.domains.query_rewrite import facts as domain

DOCUMENTS = list(corpus.documents(seed=3, count=3000))


def test_no_document_leaks():
    assert [leak for text in DOCUMENTS if (leak := corpus.leak(text))] == []


@pytest.mark.parametrize("unseen", [False, True])
def test_every_test_question_would_be_found(unseen):
    rng = Random(1)
    for product, intent in domain.pairs("test") * 3:
        asked = domain.ask(rng, product, intent, unseen)
        assert corpus.leak(user_text(asked.query, asked.profile, asked.history))


def test_no_answer_is_a_rewrite():
    terms = [term for i in domain.INTENTS.values() for term in (i.habit, i.kb_term, *(t for t, _ in i.alternatives))]
    answers = {
        turn.partition("<|im_end|>")[0] for text in DOCUMENTS for turn in text.split("<|im_start|>assistant\n")[1:]
    }
    assert not [a for a in answers if any(a == f"{p} {term}" for p in domain.PRODUCTS for term in terms)]
