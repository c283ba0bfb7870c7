"""Selection: which of the teacher's rewrites may teach.

Pure: rows in, the same rows out, in the same order. A row that fails here keeps everything that was paid for; it is
out of SFT, while RL may still use its prompt (`qinglan.dataset`). The first reason that applies is the one given,
from "there is nothing to judge" to "it is judged and too weak".
"""

from collections import Counter
from collections.abc import Iterable

from qinglan.config import Select
from qinglan.rows import Row


def select(rows: Iterable[Row], config: Select) -> list[Row]:
    """Fail the rows whose rewrite must not become an SFT target; earlier failures stay as they are."""
    return [_judge(row, config) for row in rows]


def count_reasons(rows: Iterable[Row]) -> dict[str, int]:
    """How many rows failed, by reason, the most frequent first."""
    counts = Counter(row.reason or "unknown" for row in rows if row.status == "failed")
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _judge(row: Row, config: Select) -> Row:
    reason = _weakness(row, config) if row.status == "ok" else None
    return row.failed(reason) if reason else row


def _weakness(row: Row, config: Select) -> str | None:
    if not row.rewrite or not row.rewrite.strip():
        return "empty_rewrite"
    found, original = row.rewrite_retrieved, row.original_retrieved
    if found is None or (original is None and config.not_worse_than_original):
        return "not_validated"
    if not found.scores:
        return "nothing_recalled"
    if len(row.rewrite) > config.max_rewrite_chars:
        return "rewrite_too_long"
    if found.top1_score < config.min_top1_score:
        return "below_threshold"
    if config.not_worse_than_original and original is not None and found.quality < original.quality:
        return "worse_than_original"
    return None
