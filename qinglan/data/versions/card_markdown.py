"""Renders a data card as Markdown; texts from rows are escaped, so that they can't leave their
table cells."""

from collections.abc import Mapping
from typing import get_args

from qinglan.data.versions.card import FEW_ROWS, QUANTILES, Card
from qinglan.data.versions.drift import Drift
from qinglan.rows import Split
from qinglan.text import NONE, count, markdown_cell, markdown_table, number


def card_markdown(card: Card) -> str:
    origin = card.origin
    facts = {
        "Tenant": _cell(origin.tenant),
        "Parent": f"`{origin.parent}`" if origin.parent else "none, the first",
        "Made": f"{origin.created} by run `{origin.run_id}`, profile {_cell(origin.profile)}",
        "Recipe": f"{_cell(origin.recipe)}, version {_cell(origin.recipe_version)}",
        "Teacher, judge": f"{_cell(origin.teacher)}, {_cell(origin.judge)}",
        "Rows": f"{count(card.rows)}, of which {count(card.ok)} ok"
        + (f"; {count(origin.forgotten)} forgotten since it was made" if origin.forgotten else ""),
        "With profile, with history": f"{count(card.with_profile)}, {count(card.with_history)}",
        "Left out as near-duplicates": f"{count(card.near_duplicates)} of a stricter split, "
        f"{count(card.decontaminated)} of an evaluation workbook",
        "Reviewed": ", ".join(f"{verdict} {count(n)}" for verdict, n in card.reviews.items())
        or "none",
    }
    parts = [f"# Dataset {origin.id}", markdown_table(("", ""), list(facts.items()))]
    if card.drift:
        parts += ["## Since the version before", card.drift.sentence, _drift_table(card.drift)]
    splits = [(_cell(name), count(n["rows"]), count(n["ok"])) for name, n in card.splits.items()]
    parts += ["## Splits", markdown_table(("Split", "Questions", "ok"), splits)]
    parts += ["## Why rows were dropped", _counts("Reason", card.reasons)] if card.reasons else []
    parts += ["## Question length, characters", _counts("Length", card.lengths)]
    if card.scores:
        scores = [
            (name, *(number(value) for value in quantiles.values()))
            for name, quantiles in card.scores.items()
        ]
        parts += [
            "## Top-1 score, quantiles",
            markdown_table(("", *(f"{q:.0%}" for q in QUANTILES)), scores),
        ]
    if card.intents:
        parts += [
            f"## Gold documents: {count(card.intent_count)} over {count(card.labelled)} questions"
        ]
        parts += (
            [_counts("The most frequent", card.intents)] if max(card.intents.values()) > 1 else []
        )
    if card.pools:
        keys = ("rows", "ok", *get_args(Split))
        lines = [
            (_cell(name), *(count(counts.get(key, 0)) for key in keys))
            for name, counts in card.pools.items()
        ]
        parts += ["## Pools", markdown_table(("Pool", "Questions", "ok", *get_args(Split)), lines)]
        pairs = (
            (name, counts, split)
            for name, counts in card.pools.items()
            for split in get_args(Split)
        )
        empty = [
            f"{_cell(name)} in {split}" for name, counts, split in pairs if not counts.get(split)
        ]
        parts += [f"**No usable row**: {', '.join(empty)}."] if empty else []
    if card.augmented:
        keys = ("sft", "rl", "left_out")
        lines = [
            (_cell(kind), *(count(counts[key]) for key in keys))
            for kind, counts in card.augmented.items()
        ]
        parts += [
            "## Training questions with noise",
            "They come beside the rows that they are made from, and count in no other table but that of the files. "
            "Left out are those that nearly repeat a question of dev, test or evaluation.",
            markdown_table(("Noise", "SFT", "RL", "Left out"), lines),
        ]
    if card.parts:
        grades = [(_cell(name), number(mean)) for name, mean in card.parts.items()]
        grades += (
            [("judge's score (0–5)", number(card.judge_mean, 2))]
            if card.judge_mean is not None
            else []
        )
        parts += ["## Answers, graded: means", markdown_table(("Part", "Mean"), grades)]
    if card.term_count:
        parts += [
            f"## Words of the rewrites: {count(card.term_count)}, of which {count(card.rare_terms)} are rare",
            f"A word is rare where fewer than {FEW_ROWS} SFT training rows have it: RL hardly finds it.",
            _counts("The most frequent", card.terms),
        ]
    examples = [
        (
            _cell(e.source),
            _cell(e.query),
            _cell(e.answer) or NONE,
            _cell(e.reason) if e.status == "failed" else f"ok, {e.split}",
            f"{number(e.original_score)} → {number(e.rewrite_score)}",
            f"`{e.row_id}`",
            f"`{e.ledger[:12]}`" if e.ledger else NONE,
        )
        for e in card.examples
    ]
    files = [(name, count(file.rows), f"`{file.sha256}`") for name, file in card.files.items()]
    heads = ("Source", "Question", "Answer", "Verdict", "Score", "Row", "Ledger")
    parts += ["## Examples", markdown_table(heads, examples)] if examples else []
    parts += ["## Files", markdown_table(("File", "Rows", "SHA-256"), files)]
    parts += ["## Tenants", _counts("Tenant", card.tenants)] if len(card.tenants) > 1 else []
    return "\n\n".join(parts) + "\n"


def _cell(text: str | None) -> str:
    """Untrusted text for a table cell, shortened."""
    line = " ".join((text or "").split())
    return markdown_cell(line if len(line) <= 120 else line[:119] + "…")


def _counts(head: str, counts: Mapping[str, int]) -> str:
    return markdown_table((head, "Rows"), [(_cell(name), count(n)) for name, n in counts.items()])


def _drift_table(drift: Drift) -> str:
    lines = [
        (
            f"{name}, {rows}",
            number(found.distance),
            number(found.expected),
            number(found.excess) + (" **drift**" if f"{name} of {rows}" in drift.warnings else ""),
            number(found.p_value),
        )
        for rows, side in (("the new rows", drift.arrivals), ("all rows", drift.whole))
        for name, found in side.distances.items()
    ]
    return markdown_table(
        ("Jensen–Shannon distance", "Seen", "By chance", "Beyond chance", "p"), lines
    )
