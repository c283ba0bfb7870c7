"""Builds the files that ms-swift and verl read, from a selected rows file of any length.

The first pass gives every row a split (`splits`), the last one writes all files, so that memory
does not grow with the rows' answers. SFT learns only from rows that passed the selection; RL also
takes prompts whose teacher's answer was too weak for SFT, where the recipe can use them
(`Grader.may_ask_in_rl`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, get_args

from qinglan.config import NoiseKind, Profile
from qinglan.data.dataset.augment import NoisyCopies
from qinglan.data.dataset.files import DatasetFiles, open_files
from qinglan.data.dataset.pools import RlPrompts, draw_rl_prompts, without_rows
from qinglan.data.dataset.rl_rows import rl_record, rl_schema
from qinglan.data.dataset.splits import is_leak, place_rows
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
    """The files of a dataset, and what was counted while they were made."""

    artifacts: dict[str, Artifact]
    """Files by the stems of their names: see `build`."""
    before: RowCounts
    after: RowCounts
    splits: dict[str, int]
    """Rows per split, failed ones included; `none` for those that were no questions."""
    augmented: dict[NoiseKind, dict[str, int]]
    """Questions with noise, by kind: `sft` and `rl`, those in the files, and `left_out`, those that
    nearly repeat a question of dev, test or evaluation."""
    warnings: tuple[str, ...] = ()
    """Lines about pools: an empty split, a share that could not be filled."""


def build(
    rows_path: Path,
    directory: Path,
    profile: Profile,
    pinned: Mapping[str, Split] | None = None,
    red_team: Sequence[Row] = (),
) -> BuiltDataset:
    """Split the rows, and write all files of the dataset or none.

    `sft_train`, `sft_dev`: chat JSONL, ok rows only. `rl_train`, `rl_dev`: parquet, every row whose
    question RL may ask, in train those that are drawn. `test`: the test split as `Row`, also where
    the teacher failed. `rows`: every row.

    Args:
        rows_path: selected rows; read twice, and more often where `rl_shares` or `augment` are
            given.
        pinned: splits of row ids in earlier dataset versions (see `place_rows`).
        red_team: questions of the red team, which nothing learns from.
    """
    recipe = get_recipe(profile.recipe)
    before = RowCounts()
    after = RowCounts()
    directory.mkdir(parents=True, exist_ok=True)
    selected = before.pass_through(read_jsonl(rows_path, Row))
    evaluation = _evaluation_questions(profile, red_team)
    placement = place_rows(selected, profile.dataset, pinned, evaluation, directory)

    def placed_rows(*splits: Split) -> Iterator[Row]:
        """The usable rows of these splits; each call reads the file again."""
        for row in placement.apply(read_jsonl(rows_path, Row)):
            if row.split in splits and _is_usable(row):
                yield row

    rl_candidates = filter(recipe.grader.may_ask_in_rl, placed_rows("train"))
    prompts = draw_rl_prompts(rl_candidates, profile.dataset)
    copies = NoisyCopies(profile)
    if profile.dataset.augment:
        evaluation = _evaluation_questions(profile, red_team)
        held_out = chain(placed_rows("dev", "test"), evaluation)
        copies.leave_out_repeating(placed_rows("train"), held_out, directory)

    counts = _Counts()
    # A check that fails before the end of the block leaves none of the files.
    with open_files(directory, _NAMES, rl_schema()) as files:
        training = _TrainingFiles(files, recipe, profile, prompts, copies)
        for row in after.pass_through(placement.apply(read_jsonl(rows_path, Row))):
            counts.add(row)
            line = row.model_dump_json()
            files.write("rows", line)
            if not _is_usable(row):
                continue
            if row.split == "test":
                files.write("test", line)
            else:
                training.write(row)
        _require_every_split(counts.usable, after)
        _require_sft_rows(rows_path, files, counts, after, recipe, profile)
    return BuiltDataset(
        artifacts=files.artifacts(),
        before=before,
        after=after,
        splits=dict(counts.splits),
        augmented={kind: dict(copy_counts) for kind, copy_counts in copies.counts.items()},
        warnings=(*without_rows(counts.pools), *prompts.warnings),
    )


def _is_usable(row: Row) -> bool:
    """Tell whether the row is a question that its split may have; its teacher may have failed."""
    return row.was_question and not is_leak(row.reason)


class _Counts:
    """Rows of the dataset, counted by what they are."""

    def __init__(self) -> None:
        self.splits: Counter[str] = Counter()
        self.usable: Counter[str] = Counter()
        """Usable rows by split."""
        self.weak: Counter[str] = Counter()
        """Usable rows by split whose rewrite only scored too low."""
        self.pools: Counter[tuple[str, str]] = Counter()
        """Usable rows by pool and split."""

    def add(self, row: Row) -> None:
        split = row.split or "none"
        self.splits[split] += 1
        if not _is_usable(row):
            return
        self.usable[split] += 1
        if row.reason in ("below_threshold", "worse_than_original"):
            self.weak[split] += 1
        if row.pool:
            self.pools[row.pool, split] += 1


class _TrainingFiles:
    """Writes rows of train and dev, and the noisy copies of rows, for SFT and RL."""

    def __init__(
        self,
        files: DatasetFiles,
        recipe: Recipe,
        profile: Profile,
        prompts: RlPrompts,
        copies: NoisyCopies,
    ) -> None:
        self._files = files
        self._recipe = recipe
        self._profile = profile
        self._prompts = prompts
        self._copies = copies

    def write(self, row: Row) -> None:
        """Write a usable row of train or dev, as often as SFT and RL are to see it."""
        teaches = row.status == "ok" and bool(row.target)
        times_in_rl = self._times_in_rl(row)
        if not teaches and not times_in_rl:
            return
        # All copies are drawn first, before one is written.
        copies = list(self._copies.of(row))
        if teaches:
            self._write_sft(row, noise=None)
        self._write_rl(row, times_in_rl)
        times_of_copy = times_in_rl if self._profile.dataset.augment_rl else 0
        for kind, copy in copies:
            if teaches:
                self._write_sft(copy, noise=kind)
            self._write_rl(row, times_of_copy, copy)
            self._copies.counts[kind].update(sft=int(teaches), rl=times_of_copy)

    def _times_in_rl(self, row: Row) -> int:
        if not self._recipe.grader.may_ask_in_rl(row):
            return 0
        return 1 if row.split == "dev" else self._prompts.times(row)

    def _write_sft(self, row: Row, noise: NoiseKind | None) -> None:
        """Write a chat that ends with the answer to learn, and the row's origin."""
        name = f"sft_{row.split}"
        messages = self._recipe.student_messages(row, self._profile.tenant)
        answer = {"role": "assistant", "content": row.target}
        origin = {
            "row_id": row.id,
            "tenant": row.tenant,
            "gold_id": row.gold_id,
            "source": row.source,
            "split": row.split,
            "noise": noise,
        }
        self._files.write(name, {"messages": [*messages, answer], "metadata": origin})

    def _write_rl(self, row: Row, times: int, copy: Row | None = None) -> None:
        """Write the row's prompt, or its copy's, so many times."""
        name = f"rl_{row.split}"
        tenant = self._profile.tenant
        for _ in range(times):
            record = rl_record(row, self._recipe, tenant, self._files.rows[name])
            if copy is not None:
                # Graded as the row itself: what noise adds must not count.
                record["prompt"] = self._recipe.student_messages(copy, tenant)
            self._files.write(name, record)


def _evaluation_questions(profile: Profile, red_team: Sequence[Row]) -> Iterator[Row]:
    """Every question of `dataset.decontaminate_against`, and the red team's.

    Those that would be too long to ask are among them. Questions are compared by their words and
    context, so a file needs none of the recipe's inputs.
    """
    columns = profile.data.columns.model_copy(update={"inputs": {}, "dialogue": ""})
    data = profile.data.model_copy(
        update={"limit": None, "sheet": None, "sql": None, "columns": columns}
    )
    files = map(Path, profile.dataset.decontaminate_against)
    rows = chain.from_iterable(read_rows(file, data, profile.tenant) for file in files)
    for row in chain(rows, red_team):
        if normalise(row.query):
            yield row


def _require_every_split(usable: Mapping[str, int], rows: RowCounts) -> None:
    """Raise StageError where a split has no usable row."""
    counts = {split: usable.get(split, 0) for split in get_args(Split)}
    if all(counts.values()):
        return
    listed = ", ".join(f"{split} {count}" for split, count in counts.items())
    leaks = 0
    for reason, count in rows.reasons.items():
        if is_leak(reason):
            leaks += count
    unusable = rows.total - sum(usable.values()) - leaks
    raise StageError(
        f"a split is empty ({listed}; {leaks} near-duplicates dropped, {unusable} unusable rows); "
        "add questions, mark some in the workbook's split column, "
        "or change dataset.train_share and dataset.dev_share"
    )


def _require_sft_rows(
    rows_path: Path,
    files: DatasetFiles,
    counts: _Counts,
    rows: RowCounts,
    recipe: Recipe,
    profile: Profile,
) -> None:
    """Raise StageError where SFT would have nothing to learn from, or to be measured with."""
    empty_splits = [split for split in ("train", "dev") if not files.rows[f"sft_{split}"]]
    if not empty_splits:
        return
    dropped = rows.dropped_since(RowCounts())
    reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
    sft_splits = " and ".join(f"SFT {split}" for split in empty_splits)
    has_weak_rows = any(counts.weak[split] for split in empty_splits)
    advice = _advice(rows_path, recipe, profile, weak=has_weak_rows)
    raise StageError(
        f"no usable rows for {sft_splits} (of {rows.total} rows; failed: "
        f"{reasons or 'none'}); {advice}"
    )


def _advice(rows_path: Path, recipe: Recipe, profile: Profile, *, weak: bool) -> str:
    """A hint on what to do.

    Args:
        weak: whether rows failed for what the setting to change decides.
    """
    if weak:
        setting = SelectedScores(read_jsonl(rows_path, Row), recipe, profile.select).setting()
        if setting:
            return f"run again with --set {setting}; known answers cost nothing"
    return recipe.grader.wording.too_few_rows_hint
