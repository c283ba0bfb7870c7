"""Pools of questions.

A row's pool, the pools that lack a split, and RL's prompts by the pools' shares.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from typing import NamedTuple, get_args

from qinglan.config import Dataset
from qinglan.recipes import Recipe
from qinglan.rows import Row, Split, hash_fraction

REST = "train"
"""Rows of no pool, and of pools without a share of their own."""


def assign(rows: Iterable[Row], recipe: Recipe, shares: Mapping[str, float]) -> Iterator[Row]:
    """Give rows without a pool in the workbook the recipe's pool, or one of `shares`.

    The shares draw by a hash of a row's id.
    """
    for row in rows:
        pool = row.pool or recipe.pool_of(row) or _drawn_pool(row, shares)
        yield row if pool == row.pool else row.with_pool(pool)


def _drawn_pool(row: Row, shares: Mapping[str, float]) -> str | None:
    """The pool whose part of [0, 1) has the row's hash; None beyond the last one."""
    place = hash_fraction(f"pool:{row.id}")
    end = 0.0
    for pool, share in shares.items():
        end += share
        if place < end:
            return pool
    return None


def without_rows(counts: Mapping[tuple[str, str], int]) -> list[str]:
    """A line for each pool that has no row in some split.

    Args:
        counts: usable rows by pool and split.
    """
    lines: list[str] = []
    for pool in sorted({pool for pool, _ in counts}):
        rows = {split: counts.get((pool, split), 0) for split in get_args(Split)}
        empty_splits = [split for split, count in rows.items() if not count]
        if empty_splits:
            listed = ", ".join(f"{split} {count:,}" for split, count in rows.items())
            lines.append(
                f"pool {pool} has no row in {' and '.join(empty_splits)} ({listed}); "
                "add questions, or mark some"
            )
    return lines


class RlPrompts(NamedTuple):
    """The training rows whose questions are RL's prompts."""

    repeats: Mapping[str, int] | None = None
    """Times that a question is in the file, by row id; None for all of them once."""
    warnings: tuple[str, ...] = ()

    def times(self, row: Row) -> int:
        """Count how often the row's question is in the file."""
        return 1 if self.repeats is None else self.repeats.get(row.id, 0)


def draw_rl_prompts(rows: Iterable[Row], config: Dataset) -> RlPrompts:
    """Draw RL's prompts so that each pool has its share of `rl_shares`, and the rest what is left.

    All of the rest is taken, and as many rows of each pool as its share needs. The rows of a pool
    that has too few are repeated up to `rl_repeats` times; if that is not enough there is a
    warning. Where the shares leave nothing for the rest, or there is none, the scarcest pool
    decides the number of rows.

    Args:
        rows: those of the training split whose questions RL may ask.
    """
    if not config.rl_shares:
        return RlPrompts()
    share_of_rest = 1 - sum(share for pool, share in config.rl_shares.items() if pool != REST)
    # Rounded, because of sums like 0.7 + 0.2 + 0.1 a little more than nothing is left.
    shares = config.rl_shares | {REST: max(0.0, round(share_of_rest, 9))}

    ids: dict[str, list[str]] = {pool: [] for pool in shares}
    for row in rows:
        pool = row.pool if row.pool in shares else REST
        ids[pool].append(row.id)
    total = _total(ids, shares)
    drawn: dict[str, list[str]] = {}
    for pool, pool_ids in ids.items():
        # By a hash, so that a row keeps its turn when others come.
        in_random_order = sorted(pool_ids, key=lambda row_id: _rl_order(row_id, config.seed))
        rows_needed = round(shares[pool] * total)
        most_rows = len(pool_ids) * config.rl_repeats
        drawn[pool] = list(islice(cycle(in_random_order), min(rows_needed, most_rows)))
    repeats = Counter(chain.from_iterable(drawn.values()))
    return RlPrompts(repeats, tuple(_shortages(drawn, shares)))


def _total(ids: Mapping[str, Sequence[str]], shares: Mapping[str, float]) -> float:
    """Number of prompts in all, which the rows of the rest decide, otherwise the scarcest pool."""
    if shares[REST] and ids[REST]:
        return len(ids[REST]) / shares[REST]
    totals: list[float] = []
    for pool, share in shares.items():
        if share and ids[pool]:
            totals.append(len(ids[pool]) / share)
    return min(totals, default=0)


def _rl_order(row_id: str, seed: int) -> float:
    return hash_fraction(f"rl:{seed}:{row_id}")


def _shortages(drawn: Mapping[str, Sequence[str]], shares: Mapping[str, float]) -> Iterator[str]:
    """A line for each pool whose part of the prompts is smaller than its share.

    A difference of less than a row does not count.
    """
    total = sum(map(len, drawn.values()))
    for pool, share in shares.items():
        prompts = len(drawn[pool])
        is_empty = share and not prompts
        if prompts >= share * total - 1 and not is_empty:
            continue
        rows = len(set(drawn[pool]))
        repeats = f", each asked {prompts // rows} times" if rows < prompts else ""
        yield (
            f"dataset.rl_shares: pool {pool} has {rows:,} training rows for RL{repeats}, "
            f"{prompts / max(total, 1):.0%} of the prompts and not {share:.0%}; "
            "add questions to it"
        )
