"""The ingest stage: reads the workbook or the database into rows."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from prefect.logging import get_run_logger

from qinglan.data.dataset.pools import assign
from qinglan.data.forgotten import Tombstones
from qinglan.data.new_rows import take_new_rows
from qinglan.data.sources.database import query_database
from qinglan.data.sources.files import READERS, digest_of, list_files
from qinglan.data.versions import latest_version
from qinglan.data.workbook import read_rows, without_forgotten
from qinglan.errors import StageError, WorkbookError
from qinglan.recipes import get_recipe, recipe_key
from qinglan.rows import LEFT_FOR_LATER, Row, RowCounts
from qinglan.runs.artifacts import MANIFEST, StageResult, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

_SHOWN_PROBLEMS = 20
_KNOWN = "known_version"
"""Key of the dataset version whose questions are not new, in the stage's key and its details."""


@stage_task("ingest")
def ingest_workbook(run: Run, workbook: Path) -> StageResult:
    """Read the workbook, a file or folder; bad rows are kept with their reason.

    With `data.sql`, the workbook is the snapshot of the database's rows, which is made here unless
    an earlier attempt did so.
    """
    profile = run.profile
    recipe = get_recipe(profile.recipe)
    forgotten = Tombstones.read(profile.paths.state)
    # A run that is continued reads the same rows, whatever the database holds by now.
    if profile.data.sql and not workbook.exists():
        _query_into(workbook, run, forgotten)
    digest = digest_of(workbook)
    _warn_of_skipped_files(workbook)
    known_version = None
    if profile.reads_request_log:
        known_version = _known_version(run)

    def work(stage: Stage) -> Outcome:
        problems = _Problems(stage)
        counts = RowCounts()
        read = _read(run, workbook, forgotten, known_version, problems.report)
        rows = counts.pass_through(assign(read, recipe, profile.data.pool_shares))
        artifacts = {"rows": write_jsonl(stage.directory / "rows.jsonl", rows)}
        # The stage's key holds the digest, so these must be the rows of the same content.
        if digest_of(workbook) != digest:
            raise WorkbookError(f"{workbook}: was changed while it was read; run again")
        if not counts.ok:
            raise StageError(
                f"{workbook}: none of its {counts.total:,} rows can be used; "
                f"first: {problems.shown[0]}"
            )
        _say_counts(stage, workbook, counts, shown_problems=len(problems.shown))
        return Outcome(
            rows_in=counts.total,
            rows_out=counts.ok,
            dropped=dict(counts.reasons.most_common()),
            artifacts=artifacts,
            details={_KNOWN: known_version},
        )

    depends_on = {
        "workbook_sha256": digest,
        _KNOWN: known_version,
        "data": profile.data.model_dump(mode="json"),
        "inputs": [asdict(column) for column in recipe.INPUTS],
        "recipe": recipe_key(profile.recipe),
        "tenant": profile.tenant.model_dump(mode="json"),
    }
    # Left out where there are none, so that a site without tombstones keeps its keys.
    if forgotten.lines:
        depends_on["forgotten"] = forgotten.digest
    return perform(run, "ingest", depends_on, work)


class _Problems:
    """Says what is wrong with the first rows that can't be used."""

    def __init__(self, stage: Stage) -> None:
        self.shown: list[str] = []
        self._stage = stage

    def report(self, problem: str) -> None:
        if len(self.shown) < _SHOWN_PROBLEMS:
            self.shown.append(problem)
            self._stage.say(problem)


def _query_into(workbook: Path, run: Run, forgotten: Tombstones) -> None:
    """Write what the database's query returns, without the rows that are to be forgotten."""
    data = run.profile.data
    inputs = get_recipe(run.profile.recipe).INPUTS
    records = query_database(data, inputs)
    records_to_keep = without_forgotten(records, data, run.profile.tenant, inputs, forgotten)
    snapshot = write_jsonl(workbook, records_to_keep)
    get_run_logger().info(
        "ingest: %s rows of the database are now in %s", f"{snapshot.rows:,}", workbook
    )


def _warn_of_skipped_files(workbook: Path) -> None:
    for path in list_files(workbook).skipped:
        get_run_logger().warning(
            "ingest: %s: skipped, its suffix is none of %s", path, ", ".join(READERS)
        )


def _read(
    run: Run,
    workbook: Path,
    forgotten: Tombstones,
    known_version: str | None,
    report: Callable[[str], None],
) -> Iterator[Row]:
    """The workbook's rows; of a request log, new ones beyond `data.max_new_rows` fail."""
    profile = run.profile
    inputs = get_recipe(profile.recipe).INPUTS
    read = partial(
        read_rows, workbook, profile.data, profile.tenant, inputs=inputs, forgotten=forgotten
    )
    if known_version is None:
        return read(report)
    # It reads the rows twice, but their problems are reported once.
    return take_new_rows(read(), read(report), profile, known_version)


def _say_counts(stage: Stage, workbook: Path, counts: RowCounts, shown_problems: int) -> None:
    unshown_problems = counts.total - counts.ok - shown_problems
    if unshown_problems > 0:
        stage.say(f"... and {unshown_problems:,} more; all are in rows.jsonl with their reason")
    stage.say(f"{counts.ok:,} of {counts.total:,} rows of {workbook.name} are usable")
    left_for_later = counts.reasons[LEFT_FOR_LATER]
    if left_for_later:
        max_new_rows = stage.run.profile.data.max_new_rows
        stage.say(
            f"{left_for_later:,} new questions are left for later runs "
            f"(data.max_new_rows: {max_new_rows:,})"
        )


def _known_version(run: Run) -> str:
    """The dataset version that says which rows are new; empty where there is none.

    It is the latest. Where this run goes on, it is the one of its beginning, as the run may have
    published another one since.
    """
    manifest = run.directory / "ingest" / MANIFEST
    if manifest.exists():
        version_before = StageResult.read(manifest).details.get(_KNOWN)
        if version_before is not None:
            return str(version_before)
    latest = latest_version(run.profile)
    return latest.id if latest else ""
