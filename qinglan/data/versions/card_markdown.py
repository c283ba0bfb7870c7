"""Renders a data card as Markdown.

Texts from rows are escaped, so that they can't leave their table cells.
"""

from collections.abc import Mapping, Sequence
from typing import get_args

from qinglan.data.versions.card import FEW_ROWS, QUANTILES, Card, CardExample
from qinglan.data.versions.drift import Drift
from qinglan.rows import Split
from qinglan.text import NONE, count, markdown_cell, markdown_table, number

_SPLITS = get_args(Split)
_CELL_CHARS = 120


def card_markdown(card: Card) -> str:
    """The card as a page: blocks with an empty line between them."""
    blocks = [
        f"# Dataset {card.origin.id}",
        _facts(card),
        *_drift(card),
        *_splits(card),
        *_reasons(card),
        "## Question length, characters",
        _counts("Length", card.lengths),
        *_scores(card),
        *_gold_documents(card),
        *_pools(card),
        *_augmented(card),
        *_grades(card),
        *_terms(card),
        *_examples(card),
        *_files(card),
        *_tenants(card),
    ]
    return "\n\n".join(blocks) + "\n"


def _facts(card: Card) -> str:
    """A table of what the version is and where it comes from."""
    origin = card.origin
    rows = f"{count(card.rows)}, of which {count(card.ok)} ok"
    if origin.forgotten:
        rows += f"; {count(origin.forgotten)} forgotten since it was made"
    reviews = [f"{verdict} {count(rows)}" for verdict, rows in card.reviews.items()]
    facts = {
        "Tenant": _cell(origin.tenant),
        "Parent": f"`{origin.parent}`" if origin.parent else "none, the first",
        "Made": f"{origin.created} by run `{origin.run_id}`, profile {_cell(origin.profile)}",
        "Recipe": f"{_cell(origin.recipe)}, version {_cell(origin.recipe_version)}",
        "Teacher, judge": f"{_cell(origin.teacher)}, {_cell(origin.judge)}",
        "Rows": rows,
        "With profile, with history": f"{count(card.with_profile)}, {count(card.with_history)}",
        "Left out as near-duplicates": (
            f"{count(card.near_duplicates)} of a stricter split, "
            f"{count(card.decontaminated)} of an evaluation workbook"
        ),
        "Reviewed": ", ".join(reviews) or "none",
    }
    return markdown_table(("", ""), list(facts.items()))


def _drift(card: Card) -> Sequence[str]:
    if card.drift is None:
        return ()
    return ("## Since the version before", card.drift.sentence, _drift_table(card.drift))


def _drift_table(drift: Drift) -> str:
    """A line for each distance, first those of the new rows."""
    lines: list[Sequence[str]] = []
    for rows, side in drift.sides:
        for name, distance in side.distances.items():
            excess = number(distance.excess)
            if f"{name} of {rows}" in drift.warnings:
                excess += " **drift**"
            lines.append(
                (
                    f"{name}, {rows}",
                    number(distance.distance),
                    number(distance.expected),
                    excess,
                    number(distance.p_value),
                )
            )
    heads = ("Jensen–Shannon distance", "Seen", "By chance", "Beyond chance", "p")
    return markdown_table(heads, lines)


def _splits(card: Card) -> Sequence[str]:
    lines: list[Sequence[str]] = []
    for name, counts in card.splits.items():
        lines.append((_cell(name), count(counts["rows"]), count(counts["ok"])))
    return ("## Splits", markdown_table(("Split", "Questions", "ok"), lines))


def _reasons(card: Card) -> Sequence[str]:
    if not card.reasons:
        return ()
    return ("## Why rows were dropped", _counts("Reason", card.reasons))


def _scores(card: Card) -> Sequence[str]:
    if not card.scores:
        return ()
    heads = ["", *(f"{share:.0%}" for share in QUANTILES)]
    lines = [(name, *map(number, quantiles.values())) for name, quantiles in card.scores.items()]
    return ("## Top-1 score, quantiles", markdown_table(heads, lines))


def _gold_documents(card: Card) -> Sequence[str]:
    if not card.intents:
        return ()
    documents = count(card.intent_count)
    title = f"## Gold documents: {documents} over {count(card.labelled)} questions"
    # Where each has one question, a list of the most frequent ones says nothing.
    if max(card.intents.values()) <= 1:
        return (title,)
    return (title, _counts("The most frequent", card.intents))


def _pools(card: Card) -> Sequence[str]:
    """A table of the pools, and a warning about those that have no usable row in some split."""
    if not card.pools:
        return ()
    lines: list[Sequence[str]] = []
    for name, counts in card.pools.items():
        numbers = (count(counts.get(key, 0)) for key in ("rows", "ok", *_SPLITS))
        lines.append((_cell(name), *numbers))
    blocks = ["## Pools", markdown_table(("Pool", "Questions", "ok", *_SPLITS), lines)]
    empty: list[str] = []
    for name, counts in card.pools.items():
        for split in _SPLITS:
            if not counts.get(split):
                empty.append(f"{_cell(name)} in {split}")
    if empty:
        blocks.append(f"**No usable row**: {', '.join(empty)}.")
    return blocks


def _augmented(card: Card) -> Sequence[str]:
    if not card.augmented:
        return ()
    lines: list[Sequence[str]] = []
    for kind, counts in card.augmented.items():
        numbers = (count(counts[key]) for key in ("sft", "rl", "left_out"))
        lines.append((_cell(kind), *numbers))
    return (
        "## Training questions with noise",
        "They come beside the rows that they are made from, and count in no other table "
        "but that of the files. "
        "Left out are those that nearly repeat a question of dev, test or evaluation.",
        markdown_table(("Noise", "SFT", "RL", "Left out"), lines),
    )


def _grades(card: Card) -> Sequence[str]:
    if not card.parts:
        return ()
    lines = [(_cell(name), number(mean)) for name, mean in card.parts.items()]
    if card.judge_mean is not None:
        lines.append(("judge's score (0–5)", number(card.judge_mean, 2)))
    return ("## Answers, graded: means", markdown_table(("Part", "Mean"), lines))


def _terms(card: Card) -> Sequence[str]:
    if not card.term_count:
        return ()
    terms = count(card.term_count)
    return (
        f"## Words of the rewrites: {terms}, of which {count(card.rare_terms)} are rare",
        f"A word is rare where fewer than {FEW_ROWS} SFT training rows have it: "
        "RL hardly finds it.",
        _counts("The most frequent", card.terms),
    )


def _examples(card: Card) -> Sequence[str]:
    if not card.examples:
        return ()
    heads = ("Source", "Question", "Answer", "Verdict", "Score", "Row", "Ledger")
    return ("## Examples", markdown_table(heads, map(_example_line, card.examples)))


def _example_line(example: CardExample) -> Sequence[str]:
    verdict = f"ok, {example.split}"
    if example.status == "failed":
        verdict = _cell(example.reason)
    return (
        _cell(example.source),
        _cell(example.query),
        _cell(example.answer) or NONE,
        verdict,
        f"{number(example.original_score)} → {number(example.rewrite_score)}",
        f"`{example.row_id}`",
        f"`{example.ledger[:12]}`" if example.ledger else NONE,
    )


def _files(card: Card) -> Sequence[str]:
    lines: list[Sequence[str]] = []
    for name, file in card.files.items():
        lines.append((name, count(file.rows), f"`{file.sha256}`"))
    return ("## Files", markdown_table(("File", "Rows", "SHA-256"), lines))


def _tenants(card: Card) -> Sequence[str]:
    if len(card.tenants) <= 1:
        return ()
    return ("## Tenants", _counts("Tenant", card.tenants))


def _cell(text: str | None) -> str:
    """Untrusted text for a table cell, shortened."""
    line = " ".join((text or "").split())
    if len(line) > _CELL_CHARS:
        line = line[: _CELL_CHARS - 1] + "…"
    return markdown_cell(line)


def _counts(head: str, counts: Mapping[str, int]) -> str:
    """A table of names and their numbers of rows."""
    lines = [(_cell(name), count(rows)) for name, rows in counts.items()]
    return markdown_table((head, "Rows"), lines)
