"""The answer judge: reference answers, a weak model that answers, and a strong one that judges.

The sample is a workbook of questions with references. A share of the training questions has an
answer and a reviewer's verdict (pool `labelled`); for the others the weak model is asked. All
questions of dev and test have verdicts, and are about product × slot pairs that no other split
shows.
"""

from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from qinglan.config import Columns, Embedded
from qinglan.recipes.answer_judge import RECIPE, Verdict
from qinglan.rows import Split
from qinglan.simulators.domains import (
    Domain,
    Pretraining,
    SamplePaths,
    draw_rows,
    draw_splits,
    rounds,
    write_workbook,
)
from qinglan.simulators.domains.answer_judge import corpus, models
from qinglan.simulators.domains.answer_judge.facts import (
    PRODUCTS,
    SLOTS,
    facts_of,
    in_reference_words,
    judge,
    pairs,
)
from qinglan.simulators.domains.answer_judge.models import compose, weak_answer

LABELLED = "labelled"
P_LABELLED = 0.35
"""Share of the training rows with a verdict."""


class JudgeSampleRow(NamedTuple):
    """A workbook row; most training rows have no answer yet, and so no verdict."""

    split: Split
    query: str
    reference: str
    candidate: str = ""
    truth: Verdict | None = None
    reworded: str = ""
    subject: str = ""
    """Product and slot: questions about the same count as one in the intervals."""


def build_rows(config: Embedded) -> list[JudgeSampleRow]:
    """Train, then dev, then test; ConfigError where there are not so many different ones."""
    return draw_splits(config, partial(_draw, set()))


def _draw(
    drawn: set[tuple[str, str]], split: Split, count: int, rng: Random
) -> list[JudgeSampleRow]:
    """Draw the rows of a split.

    `drawn` has question and answer of all rows so far, of whatever split.
    """
    pairs_in_turn = rounds(pairs(split), rng)

    def draw(_: int) -> JudgeSampleRow | None:
        row = _draw_row(rng, split, *next(pairs_in_turn))
        # In training no question comes twice; elsewhere it may, with another answer.
        identity = (row.query, "" if split == "train" else row.candidate)
        if identity in drawn:
            return None
        drawn.add(identity)
        return row

    return draw_rows(split, count, draw)


def _draw_row(rng: Random, split: Split, product: str, slot: str) -> JudgeSampleRow:
    name = rng.choice((product, *PRODUCTS[product]))
    query = rng.choice(SLOTS[slot].questions).format(p=name) + "？"
    facts = facts_of(product, slot)
    reference = f"{in_reference_words(facts)}。"
    subject = f"{product}-{slot}"
    if split == "train" and rng.random() >= P_LABELLED:
        return JudgeSampleRow(split, query, reference, subject=subject)
    weak = weak_answer(rng, product, slot)
    truth = judge(facts, weak.facts)
    reworded = ""
    if split == "test":
        # An answer of empty phrases needs one to say the same in other words.
        empty_phrases = 1 if truth.flaw == "含糊" else 0
        reworded = compose(rng, weak.facts, empty_phrases)
    return JudgeSampleRow(split, query, reference, weak.text, truth, reworded, subject)


def write_sample(directory: Path, config: Embedded) -> SamplePaths:
    """Write `questions.xlsx`, the same bytes for the same config; there is nothing to retrieve.

    An answer's flaw is its row's intent too, so that evaluation shows each flaw by itself.
    """
    columns = Columns()
    input_columns = [recipe_input.column for recipe_input in RECIPE.INPUTS]
    header = [
        columns.query,
        columns.gold,
        columns.split,
        columns.intent,
        columns.pool,
        *input_columns,
    ]
    path = directory / "questions.xlsx"
    write_workbook(path, "问题", header, map(_cells, build_rows(config)))
    return SamplePaths(path)


def _cells(row: JudgeSampleRow) -> list[str]:
    """The row's cells, in the order of the header."""
    verdict, flaw = row.truth or ("", "")
    inputs = {
        "reference": row.reference,
        "candidate": row.candidate,
        "verdict": verdict,
        "flaw": flaw,
        "reworded": row.reworded,
    }
    pool = LABELLED if row.split == "train" and row.truth else ""
    input_cells = [inputs[recipe_input.name] for recipe_input in RECIPE.INPUTS]
    return [row.query, row.subject, row.split, flaw, pool, *input_cells]


DOMAIN = Domain(
    name="answer_judge",
    models={"simulated-answerer": models.answer, "simulated-reasoner": models.reason},
    write_sample=write_sample,
    documents=corpus.documents,
    words=corpus.words,
    characters=corpus.characters,
    pretraining=Pretraining(
        steps=600, layers=3, context_tokens=512, tokens_per_step=2048, documents_per_step=44
    ),
)
