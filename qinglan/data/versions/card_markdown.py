"""A data card as markdown.

Texts from cells and answers are quoted as data: a pipe, a backtick or a line break in them can't leave its table cell.
"""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from qinglan.data.versions.card import FEW_ROWS, QUANTILES, Card
from qinglan.data.versions.drift import Drift
from qinglan.rows import Split
from qinglan.text import NONE, count, number

_SHOWN_CHARS = 120
_MARKDOWN = re.compile(r"([\\`|*_\[\]~#])")


def card_markdown(card: Card) -> str:
    """The card for people."""
    origin = card.origin
    facts = {
        "Tenant": quoted(origin.tenant),
        "Parent": f"`{origin.parent}`" if origin.parent else "none, the first",
        "Made": f"{origin.created} by run `{origin.run_id}`, profile {quoted(origin.profile)}",
        "Recipe": f"{quoted(origin.recipe)}, version {quoted(origin.recipe_version)}",
        "Teacher, judge": f"{quoted(origin.teacher)}, {quoted(origin.judge)}",
        "Rows": f"{count(card.rows)}, of which {count(card.ok)} ok",
        "With profile, with history": f"{count(card.with_profile)}, {count(card.with_history)}",
        "Left out as near-duplicates": f"{count(card.near_duplicates)} of a stricter split, "
        f"{count(card.decontaminated)} of an evaluation workbook",
        "Reviewed": ", ".join(f"{verdict} {count(n)}" for verdict, n in card.reviews.items()) or "none",
    }
    parts = [f"# Dataset {origin.id}", _table(("", ""), list(facts.items()))]
    if card.drift:
        parts += ["## Since the version before", card.drift.sentence, _drift_table(card.drift)]
    parts += ["## Splits", _table(("Split", "Questions", "ok"), _lines_of(card.splits))]
    parts += ["## Why rows fell", _counts("Reason", card.reasons)] if card.reasons else []
    parts += ["## Question length, characters", _counts("Length", card.lengths)]
    parts += (
        ["## Top-1 score, quantiles", _table(("", *(f"{q:.0%}" for q in QUANTILES)), _score_lines(card))]
        if card.scores
        else []
    )
    if card.intents:
        parts += [f"## Gold documents: {count(card.intent_count)} over {count(card.labelled)} questions"]
        parts += [_counts("The most frequent", card.intents)] if max(card.intents.values()) > 1 else []
    if card.pools:
        parts += ["## Pools", _table(("Pool", "Questions", "ok", *get_args(Split)), list(_pool_lines(card)))]
        parts += [f"**No usable row**: {empty}." for empty in [_empty(card)] if empty]
    if card.parts:
        grades = [(quoted(name), number(mean)) for name, mean in card.parts.items()]
        grades += [("judge's score (0–5)", number(card.judge_mean, 2))] if card.judge_mean is not None else []
        parts += ["## Answers, graded: means", _table(("Part", "Mean"), grades)]
    if card.term_count:
        parts += _words(card)
    parts += [
        "## Examples",
        _table(("Source", "Question", "Answer", "Verdict", "Score", "Row", "Ledger"), _example_lines(card)),
        "## Files",
        _table(("File", "Rows", "SHA-256"), [(n, count(f.rows), f"`{f.sha256}`") for n, f in card.files.items()]),
    ]
    if len(card.tenants) > 1:
        parts += ["## Tenants", _counts("Tenant", card.tenants)]
    return "\n\n".join(parts) + "\n"


def quoted(text: str | None) -> str:
    """Untrusted text for one markdown table cell: one line, no markup, not too long."""
    line = " ".join((text or "").split())
    if len(line) > _SHOWN_CHARS:
        line = line[: _SHOWN_CHARS - 1] + "…"
    return _MARKDOWN.sub(r"\\\1", html.escape(line, quote=False))


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    marks = ["---", *("---" for _ in heads[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, marks, *lines))


def _counts(head: str, counts: Mapping[str, int]) -> str:
    return _table((head, "Rows"), [(quoted(name), count(n)) for name, n in counts.items()])


def _lines_of(counted: Mapping[str, Mapping[str, int]]) -> list[tuple[str, ...]]:
    return [(quoted(name), count(counts["rows"]), count(counts["ok"])) for name, counts in counted.items()]


def _pool_lines(card: Card) -> Iterator[tuple[str, ...]]:
    for name, counts in card.pools.items():
        yield quoted(name), *(count(counts.get(key, 0)) for key in ("rows", "ok", *get_args(Split)))


def _empty(card: Card) -> str:
    """The pools that lack rows in a split."""
    lacking = (
        f"{quoted(name)} in {split}"
        for name, counts in card.pools.items()
        for split in get_args(Split)
        if not counts.get(split)
    )
    return ", ".join(lacking)


def _words(card: Card) -> list[str]:
    return [
        f"## Words of the rewrites: {count(card.term_count)}, of which {count(card.rare_terms)} are rare",
        f"A word is rare where fewer than {FEW_ROWS} SFT training rows have it: RL hardly finds it.",
        _counts("The most frequent", card.terms),
    ]


def _score_lines(card: Card) -> list[tuple[str, ...]]:
    return [(name, *(number(value) for value in quantiles.values())) for name, quantiles in card.scores.items()]


def _example_lines(card: Card) -> list[tuple[str, ...]]:
    return [
        (
            quoted(e.source),
            quoted(e.query),
            quoted(e.answer) or NONE,
            quoted(e.reason) if e.status == "failed" else f"ok, {e.split}",
            f"{number(e.original_score)} → {number(e.rewrite_score)}",
            f"`{e.row_id}`",
            f"`{e.ledger[:12]}`" if e.ledger else NONE,
        )
        for e in card.examples
    ]


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
    return _table(("Jensen–Shannon distance", "Seen", "By chance", "Beyond chance", "p"), lines)
