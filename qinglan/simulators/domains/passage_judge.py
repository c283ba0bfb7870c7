"""The base model of judges of passages: query rewriting's corpus, and exercises in comparing a
question with a passage.

The corpus holds no verdict and no rewrite; it says what the words of verdicts mean. Questions and
passages are of the pairs and phrasings of the training split.
"""

from collections.abc import Iterator
from random import Random

from qinglan.recipes import one_line
from qinglan.recipes.passage_judge import HAS, LACKS, RIGHT, STUDENT_SYSTEM, WRONG
from qinglan.recipes.query_rewrite import user_text
from qinglan.simulators.domains import Domain, Pretraining, chat, query_rewrite
from qinglan.simulators.domains.query_rewrite import corpus, facts

TASK, SAME, OTHER = "是一回事吗", "是", "不是"
PLAIN_WORDS = (RIGHT, SAME), (WRONG, OTHER)
P_SAME, P_OTHER_BOTH = 0.5, 0.1


def documents(seed: int, count: int) -> Iterator[str]:
    rng, kinds = Random(seed), (_meaning, _comparison, corpus.document)
    return (corpus.draw_until_safe(rng.choices(kinds, (6, 50, 44))[0], rng) for _ in range(count))


def _meaning(rng: Random) -> str:
    one, other = rng.sample(rng.choice(PLAIN_WORDS), 2)
    return chat(f"{corpus.PARAPHRASE_TASK}：{one}", other)


def _comparison(rng: Random) -> str:
    """A question, a passage of a pair that mostly shares the product or the intent, and what they
    have in common."""
    pairs = facts.pairs("train")
    asked = product, intent = rng.choice(pairs)
    draw, found = rng.random(), asked
    if draw >= P_SAME:
        alike = draw >= P_SAME + P_OTHER_BOTH
        found = rng.choice(
            [
                (p, i)
                for p, i in pairs
                if ((p == product) != (i == intent)) == alike and (p, i) != asked
            ]
        )
    question = corpus.question(rng, product, intent)
    text = one_line(user_text(question.query, question.profile, question.history))
    passage = one_line(f"《{facts.title(*found)}》{facts.passage(rng, *found)}")
    marks = [HAS if one == other else LACKS for one, other in zip(asked, found, strict=True)]
    terms = f"{product}{marks[0]} {facts.INTENTS[intent].topic}{marks[1]}"
    return chat(f"{TASK}：{text}\n资料：{passage}", f"{terms}，{SAME if found == asked else OTHER}")


def words() -> list[str]:
    return [*corpus.words(), STUDENT_SYSTEM, RIGHT, WRONG, TASK, SAME, OTHER]


def characters() -> list[str]:
    return sorted({*corpus.characters(), *"".join(words()), *"《》资料"})


DOMAIN = Domain(
    name="passage_judge",
    models={},
    write_sample=query_rewrite.DOMAIN.write_sample,  # its runs' verdicts are the judge's workbook
    documents=documents,
    words=words,
    characters=characters,
    pretraining=Pretraining(noise_share=0.25),
)
