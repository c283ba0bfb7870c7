"""Pools: which rows RL asks, and which warnings there are about small pools."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fake_service import SIMULATED
from letters import __file__ as letters_path
from question_rows import random_rows

from qinglan.config import Dataset, Profile
from qinglan.data.dataset import build
from qinglan.data.dataset.pools import RlPrompts, draw_rl_prompts, without_rows
from qinglan.rows import Row
from qinglan.runs.artifacts import write_jsonl


def pool(name: str | None, count: int, seed: int = 0, **fields: Any) -> list[Row]:
    answer = {"answer": "aaa", "parts": {"format": 1.0}}
    return [
        row.model_copy(update={"pool": name} | answer | fields) for row in random_rows(count, seed)
    ]


def counted(drawn: RlPrompts, rows: list[Row]) -> Counter[str | None]:
    return sum((Counter({row.pool: drawn.times(row)}) for row in rows), Counter())


ROWS = [*pool("red", 60, 1), *pool("gold", 60, 2), *pool("other", 20, 3), *pool(None, 30, 4)]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({}, {"red": 60, "gold": 60, "other": 20, None: 30}),
        ({"red": 0.3, "gold": 0.2}, {"red": 30, "gold": 20, "other": 20, None: 30}),
        ({"red": 0.3, "gold": 0.2, "train": 0.5}, {"red": 30, "gold": 20, "other": 20, None: 30}),
        ({"gold": 0.0}, {"red": 60, "other": 20, None: 30}),
        # The scarcest pool decides.
        ({"red": 0.7, "gold": 0.2, "other": 0.1}, {"red": 60, "gold": 17, "other": 9}),
    ],
)
def test_pools_have_their_shares_and_the_rest_what_is_left(
    shares: dict[str, float], expected: dict[str | None, int]
):
    drawn = draw_rl_prompts(ROWS, Dataset(rl_shares=shares))
    assert (counted(drawn, ROWS), drawn.warnings) == (expected, ())


def test_what_is_drawn_depends_on_the_seed_and_not_on_the_order():
    config = Dataset(rl_shares={"red": 0.3})
    assert draw_rl_prompts(ROWS, config) == draw_rl_prompts(ROWS[::-1], config)
    assert draw_rl_prompts(ROWS, config) != draw_rl_prompts(
        ROWS, config.model_copy(update={"seed": 2})
    )


def test_a_small_pool_is_asked_again_up_to_a_limit_and_an_empty_split_of_one_gives_a_warning():
    assert without_rows({("red", "train"): 3, ("red", "test"): 1}) == [
        "pool red has no row in dev (train 3, dev 0, test 1); add questions, or mark some"
    ]
    rows = [*pool("red", 5), *pool(None, 50, 1)]
    enough = draw_rl_prompts(rows, Dataset(rl_shares={"red": 0.25}))
    assert counted(enough, rows) == {"red": 17, None: 50}
    assert (max((enough.repeats or {}).values()), enough.warnings) == (4, ())
    (warning,) = draw_rl_prompts(rows, Dataset(rl_shares={"gold": 0.25})).warnings
    assert "pool gold has 0 training rows for RL, 0% of the prompts and not 25%" in warning
    limited = draw_rl_prompts(rows, Dataset(rl_shares={"red": 0.5}))
    assert counted(limited, rows) == {"red": 40, None: 50}
    (warning,) = limited.warnings
    assert (
        "pool red has 5 training rows for RL, each asked 8 times, 44% of the prompts and not 50%"
        in warning
    )


def test_only_training_rows_that_passed_are_drawn(tmp_path: Path):
    rows = [
        *pool("red", 20, 1, split="train"),
        *pool("red", 5, 2, split="dev"),
        *pool("red", 5, 3, split="test"),
    ]
    rows += pool(None, 10, 4, split="train")
    rows += (row.failed("bad_format") for row in pool("red", 5, 5, split="train"))
    write_jsonl(tmp_path / "in.jsonl", rows)
    sections = {"name": "t", "recipe": letters_path, "dataset": {"rl_shares": {"red": 0.5}}}
    profile = Profile.model_validate(SIMULATED | sections)
    built = build(tmp_path / "in.jsonl", tmp_path / "out", profile)
    records = pq.read_table(built.artifacts["rl_train"].path).to_pylist()
    drawn = [Row.model_validate_json(record["extra_info"]["row"]) for record in records]
    counts = Counter((row.pool, row.split, row.status) for row in drawn)
    assert counts == {("red", "train", "ok"): 10, (None, "train", "ok"): 10}
    assert (built.artifacts["rl_dev"].rows, built.artifacts["sft_train"].rows) == (5, 30)
    assert built.warnings == ()
