"""Which rewrites may teach. The first reason that applies is given, from "no rewrite" to "judged and too weak"."""

import re
from collections.abc import Iterable, Iterator, Sequence

from qinglan.config import Select
from qinglan.recipes.kinds.selection import boilerplate_patterns, decide, is_refusal
from qinglan.rows import Row, normalise


def select(rows: Iterable[Row], config: Select) -> Iterator[Row]:
    """Fail the rows whose rewrite must not become an SFT target; earlier failures stay, unless a person decided."""
    boilerplate = boilerplate_patterns(config.boilerplate)
    return decide(rows, lambda row: _weakness(row, config, boilerplate))


def _weakness(row: Row, config: Select, boilerplate: Sequence[re.Pattern[str]]) -> str | None:
    assert row.answer is not None
    return _no_rewrite(row.answer.strip(), config, boilerplate) or _too_weak(row, row.answer, config)


def _no_rewrite(rewrite: str, config: Select, boilerplate: Sequence[re.Pattern[str]]) -> str | None:
    if is_refusal(rewrite):
        return "refusal_text"
    if any(pattern.search(rewrite) for pattern in boilerplate):
        return "boilerplate"
    return "rewrite_too_short" if len(normalise(rewrite)) < config.min_rewrite_chars else None


def _too_weak(row: Row, rewrite: str, config: Select) -> str | None:
    found, original = row.answer_retrieved, row.original_retrieved
    if found is None or (original is None and config.not_worse_than_original):
        return "not_validated"
    if not found.scores:
        return "nothing_recalled"
    if len(rewrite) > config.max_rewrite_chars:
        return "rewrite_too_long"
    if found.top1_score < config.min_top1_score:
        return "below_threshold"
    if config.not_worse_than_original and original is not None and found.quality < original.quality:
        return "worse_than_original"
    return None
