"""Splits without leaks, and the files that ms-swift and verl read.

Near-duplicates (same question in other words or punctuation) stay in one split. Rows without a split are placed by
a hash of their group, not by their position, so the test set of last night is the test set of tonight. SFT learns
only from rows that passed the selection; RL also takes prompts whose teacher rewrite was too weak to teach, because
there the teacher can be beaten.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from qinglan.artifacts import Artifact, write_jsonl
from qinglan.config import Dataset, Profile
from qinglan.errors import StageError
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import Row, Split, normalise
from qinglan.selection import count_reasons
from qinglan.workbook import INPUT_REASONS

NOT_JUDGED = -1.0
"""`teacher_judge` in the RL files where the judge was not asked: a null would turn the column into NaN on the way."""

RL_REASONS = frozenset({None, "below_threshold", "worse_than_original", "rewrite_too_long"})
"""A row with one of these has a valid teacher baseline: teacher and RAG both answered."""

_STRENGTH: dict[Split | None, int] = {None: 0, "train": 1, "dev": 2, "test": 3}
_PERMUTATIONS = 128
_CANDIDATE_RECALL = 0.999

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


# Splits


def assign_splits(rows: Iterable[Row], config: Dataset, seed: int) -> list[Row]:
    """Give every row that was a question a split; no group of near-duplicates straddles two.

    A split from the workbook is kept, but a row that resembles one of a stricter split (test before dev before
    train) is failed as ``near_duplicate_of_test`` or ``near_duplicate_of_dev``, whatever it failed for before. A row
    without a split joins its group's given split, or the whole group is placed by a seeded hash of its smallest id.

    Raises:
        StageError: train, dev or test is left without rows.
    """
    rows = list(rows)
    groups = near_duplicate_groups((row for row in rows if _was_question(row)), config.near_duplicate_jaccard)
    given: dict[str, Split | None] = {}
    for row in rows:
        if _was_question(row):
            group = groups[row.id]
            given[group] = max(given.get(group), row.split, key=_STRENGTH.__getitem__)
    placed = [_place(row, groups, given, config, seed) if _was_question(row) else row for row in rows]
    _require_every_split(placed)
    return placed


def near_duplicate_groups(rows: Iterable[Row], jaccard: float) -> dict[str, str]:
    """Row id → smallest row id of its group.

    Two questions are the same when the character trigrams both of their queries and of query, history and profile
    together reach the Jaccard similarity: a long shared profile does not make different questions the same, and a
    bare "how much is it?" is not the same under different histories.
    """
    from datasketch import MinHash, MinHashLSH  # brings SciPy: 0.8 s that only this stage should pay

    texts = {row.id: (normalise(row.query), normalise(row.history + row.profile)) for row in rows}
    ids = sorted(texts)
    parent = {key: key for key in ids}
    index = MinHashLSH(num_perm=_PERMUTATIONS, params=_bands(jaccard))
    shingles = ([gram.encode() for gram in _trigrams("".join(texts[key]))] for key in ids)
    for key, signature in zip(ids, MinHash.generator(shingles, num_perm=_PERMUTATIONS, seed=1), strict=True):
        for other in sorted(index.query(signature)):
            if _root(parent, key) != _root(parent, other) and _same(texts[key], texts[other], jaccard):
                low, high = sorted((_root(parent, key), _root(parent, other)))
                parent[high] = low
        index.insert(key, signature)
    return {key: _root(parent, key) for key in ids}


def _was_question(row: Row) -> bool:
    return row.reason not in INPUT_REASONS


def _place(row: Row, groups: Mapping[str, str], given: Mapping[str, Split | None], config: Dataset, seed: int) -> Row:
    group = groups[row.id]
    strictest = given[group]
    if row.split is None:
        return row.model_copy(update={"split": strictest or _split_of(group, config, seed)})
    if _STRENGTH[strictest] > _STRENGTH[row.split]:
        return row.failed(f"near_duplicate_of_{strictest}")
    return row


def _split_of(group: str, config: Dataset, seed: int) -> Split:
    digest = hashlib.sha256(f"{seed}:{group}".encode()).hexdigest()
    place = int(digest[:13], 16) / 16**13
    if place < config.train_share:
        return "train"
    return "dev" if place < config.train_share + config.dev_share else "test"


def _require_every_split(rows: Sequence[Row]) -> None:
    kept = [row for row in rows if _was_question(row) and not _leaks(row)]
    counts = Counter(row.split for row in kept)
    if all(counts[split] for split in get_args(Split)):
        return
    listed = ", ".join(f"{split} {counts[split]}" for split in get_args(Split))
    leaks = sum(_leaks(row) for row in rows)
    raise StageError(
        f"a split is empty ({listed}; {leaks} near-duplicates dropped, {len(rows) - len(kept) - leaks} unusable rows); "
        "add questions, mark some in the workbook's split column, or change dataset.train_share and dataset.dev_share"
    )


def _leaks(row: Row) -> bool:
    return (row.reason or "").startswith("near_duplicate_of_")


def _trigrams(text: str) -> set[str]:
    return {text[i : i + 3] for i in range(max(1, len(text) - 2))}


def _same(a: tuple[str, str], b: tuple[str, str], jaccard: float) -> bool:
    return _similarity(a[0], b[0]) >= jaccard and _similarity("".join(a), "".join(b)) >= jaccard


def _similarity(a: str, b: str) -> float:
    left, right = _trigrams(a), _trigrams(b)
    return len(left & right) / len(left | right)


def _bands(jaccard: float) -> tuple[int, int]:
    """Bands and rows of the LSH: the most selective that still finds a pair at the threshold 999 times in 1,000."""
    options = [(_PERMUTATIONS // rows, rows) for rows in range(_PERMUTATIONS // 2, 0, -1)]
    return next((o for o in options if 1 - (1 - jaccard ** o[1]) ** o[0] >= _CANDIDATE_RECALL), options[-1])


def _root(parent: dict[str, str], key: str) -> str:
    while parent[key] != key:
        parent[key] = parent[parent[key]]
        key = parent[key]
    return key


# Files


def write_datasets(directory: Path, rows: Sequence[Row], profile: Profile) -> dict[str, Artifact]:
    """Write the training files, the test split and the whole list of rows; keys are the file names' stems.

    `sft_train`, `sft_dev`: chat JSONL, ok rows only. `rl_train`, `rl_dev`: parquet of `RL_SCHEMA`, every row with a
    valid teacher baseline. `test`: the test split as `Row`, also where the teacher failed. `rows`: every row.

    Raises:
        StageError: one of the files would be empty.
    """
    recipe = get_recipe(profile.recipe)
    questions = [row for row in rows if _was_question(row) and not _leaks(row)]
    by_split = {split: [row for row in questions if row.split == split] for split in get_args(Split)}
    sft = {split: [row for row in by_split[split] if _teaches(row)] for split in ("train", "dev")}
    rl = {split: [row for row in by_split[split] if _has_baseline(row)] for split in ("train", "dev")}
    _require_rows({"SFT train": sft["train"], "SFT dev": sft["dev"], "test": by_split["test"]}, rows)
    artifacts = {}
    for split in ("train", "dev"):
        lines = (_sft_line(row, recipe, profile) for row in sft[split])
        artifacts[f"sft_{split}"] = write_jsonl(directory / f"sft_{split}.jsonl", lines)
        records = (_rl_record(row, recipe, profile) for row in rl[split])
        artifacts[f"rl_{split}"] = _write_parquet(directory / f"rl_{split}.parquet", records)
    artifacts["test"] = write_jsonl(directory / "test.jsonl", by_split["test"])
    artifacts["rows"] = write_jsonl(directory / "rows.jsonl", rows)
    return artifacts


def _teaches(row: Row) -> bool:
    return row.status == "ok" and bool(row.target)


def _has_baseline(row: Row) -> bool:
    return bool(row.rewrite) and row.rewrite_retrieved is not None and row.reason in RL_REASONS


def _require_rows(files: Mapping[str, Sequence[Row]], rows: Sequence[Row]) -> None:
    empty = [name for name, members in files.items() if not members]
    if empty:
        reasons = ", ".join(f"{reason} {count}" for reason, count in count_reasons(rows).items())
        raise StageError(
            f"no usable rows for {' and '.join(empty)} (of {len(rows)} rows; failed: {reasons or 'none'}); "
            "lower select.min_top1_score or add questions"
        )


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
    found, gold = row.rewrite_retrieved, row.gold_id or ""
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
            "teacher_rewrite": row.rewrite,
            "teacher_quality": found.quality,
            "teacher_top1_score": found.top1_score,
            "teacher_gold_rank": found.rank(row.gold_id),
            "teacher_judge": NOT_JUDGED if row.judge_score is None else row.judge_score,
        },
    }


def _write_parquet(path: Path, records: Iterator[dict[str, Any]]) -> Artifact:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    table = pa.Table.from_pylist(list(records), schema=RL_SCHEMA)
    pq.write_table(table, partial)
    partial.replace(path)
    return Artifact.of(path, table.num_rows)
