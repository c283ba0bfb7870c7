"""Pools of questions: a row's pool, the pools that lack a split, and RL's prompts by the pools'
shares."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, cycle, islice
from typing import NamedTuple, get_args

from qinglan.config import Dataset
from qinglan.recipes import Recipe
from qinglan.rows import Row, Split, hash_fraction

REST = "train"
"""Rows of no pool, and of pools without a share of their own."""


def assign(rows: Iterable[Row], recipe: Recipe, shares: Mapping[str, float]) -> Iterator[Row]:
    """Give rows without a pool in the workbook the recipe's pool, or one of `shares` by a hash of
    their id."""
    for row in rows:
        place = hash_fraction(f"pool:{row.id}")
        drawn = (
            pool
            for pool, end in zip(shares, accumulate(shares.values()), strict=True)
            if place < end
        )
        pool = row.pool or recipe.pool_of(row) or next(drawn, None)
        yield row if pool == row.pool else row.model_copy(update={"pool": pool})


def without_rows(counts: Mapping[tuple[str, str], int]) -> list[str]:
    """A line for each pool that has no row in some split; usable rows are counted by pool and
    split."""
    lines = []
    for pool in sorted({pool for pool, _ in counts}):
        rows = {split: counts.get((pool, split), 0) for split in get_args(Split)}
        if empty := [split for split, n in rows.items() if not n]:
            listed = ", ".join(f"{split} {n:,}" for split, n in rows.items())
            lines.append(
                f"pool {pool} has no row in {' and '.join(empty)} ({listed}); add questions, or mark some"
            )
    return lines


class RlPrompts(NamedTuple):
    """The training rows whose questions are RL's prompts."""

    repeats: Mapping[str, int] | None = None
    """By row id, how often its question is in the file; None for all of them once."""
    warnings: tuple[str, ...] = ()

    def times(self, row: Row) -> int:
        return 1 if self.repeats is None else self.repeats.get(row.id, 0)


def draw_rl_prompts(rows: Iterable[Row], config: Dataset) -> RlPrompts:
    """Draw RL's prompts so that each pool has the share of them that `rl_shares` says; the rest has
    what is left.

    All of the rest is taken, and as many rows of each pool as its share needs. The rows of a pool
    that has too few are repeated up to `rl_repeats` times; if that is not enough there is a
    warning. Where the shares leave nothing for the rest, or there is none, the scarcest pool
    decides the number of rows. `rows` are those of the training split whose questions RL may ask.
    """
    if not config.rl_shares:
        return RlPrompts()
    left = 1 - sum(share for pool, share in config.rl_shares.items() if pool != REST)
    shares = config.rl_shares | {
        REST: max(0.0, round(left, 9))
    }  # of sums like 0.7 + 0.2 + 0.1 nothing is left
    ids: dict[str, list[str]] = {pool: [] for pool in shares}
    for row in rows:
        ids[row.pool if row.pool in shares else REST].append(row.id)
    if shares[REST] and ids[REST]:
        total = len(ids[REST]) / shares[REST]
    else:
        total = min(
            (len(ids[pool]) / share for pool, share in shares.items() if share and ids[pool]),
            default=0,
        )
    chosen: dict[str, list[str]] = {}
    for pool, each in ids.items():
        drawn = sorted(each, key=lambda row_id: hash_fraction(f"rl:{config.seed}:{row_id}"))
        wanted = min(round(shares[pool] * total), len(each) * config.rl_repeats)
        chosen[pool] = list(islice(cycle(drawn), wanted))
    return RlPrompts(Counter(chain.from_iterable(chosen.values())), tuple(_short(chosen, shares)))


def _short(chosen: Mapping[str, Sequence[str]], shares: Mapping[str, float]) -> Iterator[str]:
    """A line for each pool whose share of the prompts is less than was asked for, beyond a row's
    worth."""
    count = sum(map(len, chosen.values()))
    for pool, share in shares.items():
        if len(chosen[pool]) < share * count - 1 or (share and not chosen[pool]):
            rows = len(set(chosen[pool]))
            often = (
                f", each asked {len(chosen[pool]) // rows} times"
                if rows < len(chosen[pool])
                else ""
            )
            yield (
                f"dataset.rl_shares: pool {pool} has {rows:,} training rows for RL{often}, "
                f"{len(chosen[pool]) / max(count, 1):.0%} of the prompts and not {share:.0%}; add questions to it"
            )
