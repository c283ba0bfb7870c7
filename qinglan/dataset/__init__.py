"""The files that ms-swift and verl read, from a selected rows file of any length.

Two passes: the first places every row (`splits`), the second writes all files at once, so that memory does not grow
with the rows' answers. SFT learns only from rows that passed the selection; RL also takes prompts whose teacher rewrite
was too weak to teach, because there the teacher can be beaten.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from qinglan.artifacts import Artifact, read_jsonl
from qinglan.config import Profile
from qinglan.dataset.files import Files
from qinglan.dataset.splits import is_leak, place_rows, was_question
from qinglan.errors import StageError
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import Row, Split, normalise
from qinglan.tally import Tally, by_frequency
from qinglan.workbook import read_rows

NOT_JUDGED = -1.0
"""`teacher_judge` in the RL files where the judge was not asked: a null would turn the column into NaN on the way."""

RL_REASONS = frozenset({None, "below_threshold", "worse_than_original", "rewrite_too_long", "rewrite_too_short"})
"""A row with one of these has a valid teacher baseline: teacher and RAG both answered. Refusals, boilerplate and
rewrites that a person rejected or corrected are none: the reward's guard takes its anchors from the baseline."""

_TEXT = pa.string()
RL_SCHEMA = pa.schema(
    {
        "data_source": _TEXT,
        "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
        "ability": _TEXT,
        "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TEXT}),
        "extra_info": pa.struct(
            {
                "row_id": _TEXT,
                "tenant": _TEXT,
                "question": _TEXT,
                "gold_id": _TEXT,
                "teacher_rewrite": _TEXT,
                "teacher_quality": pa.float64(),
                "teacher_top1_score": pa.float64(),
                "teacher_gold_rank": pa.int64(),
                "teacher_judge": pa.float64(),
            }
        ),
    }
)
_NAMES = ("sft_train.jsonl", "rl_train.parquet", "sft_dev.jsonl", "rl_dev.parquet", "test.jsonl", "rows.jsonl")


@dataclass(frozen=True)
class Built:
    """A dataset's files, and what became of the rows."""

    artifacts: dict[str, Artifact]
    """By the file names' stems: see `build`."""
    before: Tally
    after: Tally
    splits: dict[str, int]
    """Rows per split, failed ones included; `none` are those that were no questions."""


def build(rows_path: Path, directory: Path, profile: Profile, pinned: Mapping[str, Split] | None = None) -> Built:
    """Split the rows, and write the training files, the test split and the whole list of rows; all of them or none.

    `sft_train`, `sft_dev`: chat JSONL, ok rows only. `rl_train`, `rl_dev`: parquet of `RL_SCHEMA`, every row with a
    valid teacher baseline. `test`: the test split as `Row`, also where the teacher failed. `rows`: every row.

    Args:
        rows_path: selected rows; read twice.
        pinned: splits of row ids in earlier dataset versions (see `place_rows`).

    Raises:
        StageError: a split, or the SFT file of train or dev, would be empty.
        WorkbookError: an evaluation workbook can't be read.
    """
    before, after = Tally(), Tally()
    directory.mkdir(parents=True, exist_ok=True)
    rows = before.pass_through(read_jsonl(rows_path, Row))
    placement = place_rows(rows, profile.dataset, pinned, _evaluation_questions(profile), directory)
    recipe = get_recipe(profile.recipe)
    splits: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    with Files(directory, _NAMES, RL_SCHEMA) as files:
        for row in after.pass_through(placement.apply(read_jsonl(rows_path, Row))):
            splits[row.split or "none"] += 1
            line = row.model_dump_json()
            files.write("rows", line)
            if not was_question(row) or is_leak(row.reason):
                continue
            kept[str(row.split)] += 1
            if row.split == "test":
                files.write("test", line)
                continue
            if _teaches(row):
                files.write(f"sft_{row.split}", _sft_line(row, recipe, profile))
            if _has_baseline(row):
                files.write(f"rl_{row.split}", _rl_record(row, recipe, profile))
        _require_every_split(kept, after)
        _require_rows({"SFT train": files.rows["sft_train"], "SFT dev": files.rows["sft_dev"]}, after)
    return Built(files.artifacts(), before, after, dict(splits))


def _evaluation_questions(profile: Profile) -> Iterator[Row]:
    """Every question of `dataset.decontaminate_against`, also those that would be too long to ask."""
    data = profile.data.model_copy(update={"limit": None, "sheet": None, "sql": None})
    paths = (Path(path) for path in profile.dataset.decontaminate_against)
    rows = chain.from_iterable(read_rows(path, data, profile.tenant) for path in paths)
    return (row for row in rows if normalise(row.query))


def _require_every_split(kept: Mapping[str, int], rows: Tally) -> None:
    if all(kept.get(split) for split in get_args(Split)):
        return
    listed = ", ".join(f"{split} {kept.get(split, 0)}" for split in get_args(Split))
    dropped = sum(count for reason, count in rows.reasons.items() if is_leak(reason))
    raise StageError(
        f"a split is empty ({listed}; {dropped} near-duplicates dropped, "
        f"{rows.total - sum(kept.values()) - dropped} unusable rows); "
        "add questions, mark some in the workbook's split column, or change dataset.train_share and dataset.dev_share"
    )


def _require_rows(files: Mapping[str, int], rows: Tally) -> None:
    empty = [name for name, count in files.items() if not count]
    if empty:
        reasons = ", ".join(f"{reason} {count}" for reason, count in by_frequency(rows.reasons).items())
        raise StageError(
            f"no usable rows for {' and '.join(empty)} (of {rows.total} rows; failed: {reasons or 'none'}); "
            "lower select.min_top1_score or add questions"
        )


def _teaches(row: Row) -> bool:
    return row.status == "ok" and bool(row.target)


def _has_baseline(row: Row) -> bool:
    found = row.answer_retrieved
    answered = bool(row.answer) and found is not None and bool(found.scores)
    return answered and row.reason in RL_REASONS and row.review != "correct"


def _sft_line(row: Row, recipe: Recipe, profile: Profile) -> dict[str, Any]:
    return {
        "messages": [
            *recipe.student_messages(row, profile.tenant),
            {"role": "assistant", "content": row.target},
        ],
        "metadata": {
            "row_id": row.id,
            "tenant": row.tenant,
            "gold_id": row.gold_id,
            "source": row.source,
            "split": row.split,
        },
    }


def data_source(recipe: str) -> str:
    """How verl names these rows in its metrics."""
    return f"qinglan/{recipe}"


def _rl_record(row: Row, recipe: Recipe, profile: Profile) -> dict[str, Any]:
    found, gold = row.answer_retrieved, row.gold_id or ""
    assert found is not None, "only rows with a baseline get here"
    return {
        "data_source": data_source(recipe.NAME),
        "prompt": recipe.student_messages(row, profile.tenant),
        "ability": recipe.NAME,
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {
            "row_id": row.id,
            "tenant": row.tenant,
            "question": recipe.user_text(row.query, row.profile, row.history),
            "gold_id": gold,
            "teacher_rewrite": row.answer,
            "teacher_quality": found.quality,
            "teacher_top1_score": found.top1_score,
            "teacher_gold_rank": found.rank(row.gold_id),
            "teacher_judge": NOT_JUDGED if row.judge_score is None else row.judge_score,
        },
    }
