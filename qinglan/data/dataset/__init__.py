"""Builds the files that ms-swift and verl read, from a selected rows file of any length.

The first pass gives every row a split (`splits`), the last one writes all files, so that memory
does not grow with the rows' answers. SFT learns only from rows that passed the selection; RL also
takes prompts whose teacher's answer was too weak for SFT, where the recipe can use them
(`Recipe.may_ask_in_rl`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, get_args

from qinglan.config import NoiseKind, Profile
from qinglan.data.dataset.augment import NoisyCopies
from qinglan.data.dataset.files import open_files
from qinglan.data.dataset.pools import draw_rl_prompts, without_rows
from qinglan.data.dataset.rl_rows import rl_record, rl_schema
from qinglan.data.dataset.splits import is_leak, place_rows, was_question
from qinglan.data.dataset.thresholds import SelectedScores
from qinglan.data.workbook import read_rows
from qinglan.errors import StageError
from qinglan.recipes import Recipe, get_recipe
from qinglan.rows import Row, RowCounts, Split, normalise
from qinglan.runs.artifacts import Artifact, read_jsonl

_NAMES = (
    "sft_train.jsonl",
    "rl_train.parquet",
    "sft_dev.jsonl",
    "rl_dev.parquet",
    "test.jsonl",
    "rows.jsonl",
)


class BuiltDataset(NamedTuple):
    artifacts: dict[str, Artifact]
    """By the file names' stems: see `build`."""
    before: RowCounts
    after: RowCounts
    splits: dict[str, int]
    """Rows per split, failed ones included; `none` for those that were no questions."""
    augmented: dict[NoiseKind, dict[str, int]]
    """Questions with noise, by kind: `sft` and `rl`, those in the files, and `left_out`, those that
    nearly repeat a question of dev, test or evaluation."""
    warnings: tuple[str, ...] = ()
    """About pools: an empty split, a share that could not be filled."""


def build(
    rows_path: Path,
    directory: Path,
    profile: Profile,
    pinned: Mapping[str, Split] | None = None,
    red_team: Sequence[Row] = (),
) -> BuiltDataset:
    """Split the rows, and write the training files, the test split and the whole list of rows; all
    of them or none.

    `sft_train`, `sft_dev`: chat JSONL, ok rows only. `rl_train`, `rl_dev`: parquet, every row whose
    question RL may ask, in train those that are drawn. `test`: the test split as `Row`, also where
    the teacher failed. `rows`: every row.

    Args:
        rows_path: selected rows; read twice, and more often where `rl_shares` or `augment` are
            given.
        pinned: splits of row ids in earlier dataset versions (see `place_rows`).
        red_team: questions of the red team, which nothing learns from.
    """
    before, after = RowCounts(), RowCounts()
    directory.mkdir(parents=True, exist_ok=True)
    rows = before.pass_through(read_jsonl(rows_path, Row))
    placement = place_rows(
        rows, profile.dataset, pinned, _evaluation_questions(profile, red_team), directory
    )
    recipe = get_recipe(profile.recipe)

    def placed(*splits: Split) -> Iterator[Row]:
        rows = placement.apply(read_jsonl(rows_path, Row))
        return (
            row
            for row in rows
            if row.split in splits and was_question(row) and not is_leak(row.reason)
        )

    splits, kept, weak, pools = (
        Counter[str](),
        Counter[str](),
        Counter[str](),
        Counter[tuple[str, str]](),
    )
    prompts = draw_rl_prompts(filter(recipe.grader.may_ask_in_rl, placed("train")), profile.dataset)
    copies = NoisyCopies(profile)
    if profile.dataset.augment:
        held_out = chain(placed("dev", "test"), _evaluation_questions(profile, red_team))
        copies.leave_out_repeating(placed("train"), held_out, directory)
    with open_files(directory, _NAMES, rl_schema()) as files:
        for row in after.pass_through(placement.apply(read_jsonl(rows_path, Row))):
            splits[row.split or "none"] += 1
            line = row.model_dump_json()
            files.write("rows", line)
            if not was_question(row) or is_leak(row.reason):
                continue
            kept[str(row.split)] += 1
            weak[str(row.split)] += row.reason in ("below_threshold", "worse_than_original")
            if row.pool:
                pools[row.pool, str(row.split)] += 1
            if row.split == "test":
                files.write("test", line)
                continue
            teaches, name = row.status == "ok" and bool(row.target), f"rl_{row.split}"
            times = (
                (1 if row.split == "dev" else prompts.times(row))
                if recipe.grader.may_ask_in_rl(row)
                else 0
            )
            for kind, asked in ((None, row), *copies.of(row)) if teaches or times else ():
                if teaches:
                    files.write(f"sft_{row.split}", _sft_line(asked, recipe, profile, kind))
                asked_times = times if kind is None or profile.dataset.augment_rl else 0
                for _ in range(asked_times):
                    record = rl_record(row, recipe, profile.tenant, files.rows[name])
                    if kind:  # graded as the row itself: what noise adds must not count
                        record["prompt"] = recipe.student_messages(asked, profile.tenant)
                    files.write(name, record)
                if kind:
                    copies.counts[kind].update(sft=teaches, rl=asked_times)
        _require_every_split(kept, after)
        if empty := [split for split in ("train", "dev") if not files.rows[f"sft_{split}"]]:
            reasons = ", ".join(
                f"{reason} {count}" for reason, count in after.dropped_since(RowCounts()).items()
            )
            raise StageError(
                f"no usable rows for {' and '.join(f'SFT {split}' for split in empty)} (of {after.total} rows; failed: "
                f"{reasons or 'none'}); {_advice(rows_path, recipe, profile, weak=any(weak[each] for each in empty))}"
            )
    counts = {kind: dict(found) for kind, found in copies.counts.items()}
    return BuiltDataset(
        files.artifacts(),
        before,
        after,
        dict(splits),
        counts,
        (*without_rows(pools), *prompts.warnings),
    )


def _evaluation_questions(profile: Profile, red_team: Sequence[Row]) -> Iterator[Row]:
    """Every question of `dataset.decontaminate_against`, also those that would be too long to ask,
    and the red team's.

    Questions are compared by their words and context, so a file needs none of the recipe's inputs.
    """
    columns = profile.data.columns.model_copy(update={"inputs": {}, "dialogue": ""})
    data = profile.data.model_copy(
        update={"limit": None, "sheet": None, "sql": None, "columns": columns}
    )
    paths = (Path(path) for path in profile.dataset.decontaminate_against)
    rows = chain.from_iterable(read_rows(path, data, profile.tenant) for path in paths)
    return (row for row in chain(rows, red_team) if normalise(row.query))


def _require_every_split(kept: Mapping[str, int], rows: RowCounts) -> None:
    if all(kept.get(split) for split in get_args(Split)):
        return
    listed = ", ".join(f"{split} {kept.get(split, 0)}" for split in get_args(Split))
    dropped = sum(count for reason, count in rows.reasons.items() if is_leak(reason))
    raise StageError(
        f"a split is empty ({listed}; {dropped} near-duplicates dropped, "
        f"{rows.total - sum(kept.values()) - dropped} unusable rows); "
        "add questions, mark some in the workbook's split column, or change dataset.train_share and dataset.dev_share"
    )


def _advice(rows_path: Path, recipe: Recipe, profile: Profile, *, weak: bool) -> str:
    """What to do; `weak`: rows failed for what the setting to change decides."""
    if weak and recipe.grader.retrieves:
        setting = SelectedScores(read_jsonl(rows_path, Row), recipe, profile.select).setting()
        if setting:
            return f"run again with --set {setting}; known answers cost nothing"
    return recipe.grader.too_few_rows_hint


def _sft_line(
    row: Row, recipe: Recipe, profile: Profile, noise: NoiseKind | None
) -> dict[str, Any]:
    origin = {
        "row_id": row.id,
        "tenant": row.tenant,
        "gold_id": row.gold_id,
        "source": row.source,
        "split": row.split,
    }
    origin["noise"] = noise
    answer = {"role": "assistant", "content": row.target}
    return {"messages": [*recipe.student_messages(row, profile.tenant), answer], "metadata": origin}
