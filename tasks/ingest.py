"""The ingest stage: reads the workbook or the database into rows."""

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
from qinglan.rows import LEFT_FOR_LATER, RowCounts
from qinglan.runs.artifacts import MANIFEST, StageResult, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

_SHOWN_PROBLEMS = 20
_KNOWN = "known_version"


@stage_task("ingest")
def ingest_workbook(run: Run, workbook: Path) -> StageResult:
    """Read the workbook, a file or folder; bad rows are kept with their reason. With `data.sql` it
    is where the snapshot of the database's rows is kept."""
    data, tenant, recipe = run.profile.data, run.profile.tenant, get_recipe(run.profile.recipe)
    forgotten = Tombstones.read(run.profile.paths.state)

    def work(stage: Stage) -> Outcome:
        counts, shown = RowCounts(), list[str]()

        def report(problem: str) -> None:
            if len(shown) < _SHOWN_PROBLEMS:
                shown.append(problem)
                stage.say(problem)

        read = partial(read_rows, workbook, data, tenant, inputs=recipe.INPUTS, forgotten=forgotten)
        taken = (
            read(report)
            if known is None
            else take_new_rows(read(), read(report), run.profile, known)
        )
        rows = counts.pass_through(assign(taken, recipe, data.pool_shares))
        artifacts = {"rows": write_jsonl(stage.directory / "rows.jsonl", rows)}
        if digest_of(workbook) != digest:
            raise WorkbookError(f"{workbook}: was changed while it was read; run again")
        if not counts.ok:
            raise StageError(
                f"{workbook}: none of its {counts.total:,} rows can be used; first: {shown[0]}"
            )
        if (more := counts.total - counts.ok - len(shown)) > 0:
            stage.say(f"... and {more:,} more; all are in rows.jsonl with their reason")
        stage.say(f"{counts.ok:,} of {counts.total:,} rows of {workbook.name} are usable")
        if later := counts.reasons[LEFT_FOR_LATER]:
            stage.say(
                f"{later:,} new questions are left for later runs (data.max_new_rows: {data.max_new_rows:,})"
            )
        return Outcome(
            counts.total,
            counts.ok,
            dict(counts.reasons.most_common()),
            artifacts,
            details={_KNOWN: known},
        )

    if data.sql and not workbook.exists():
        asked = query_database(data, recipe.INPUTS)
        taken = write_jsonl(
            workbook, without_forgotten(asked, data, tenant, recipe.INPUTS, forgotten)
        )
        get_run_logger().info(
            "ingest: %s rows of the database are now in %s", f"{taken.rows:,}", workbook
        )
    digest = digest_of(workbook)
    for path in list_files(workbook).skipped:
        get_run_logger().warning(
            "ingest: %s: skipped, its suffix is none of %s", path, ", ".join(READERS)
        )
    known = _known_version(run) if run.profile.reads_request_log else None
    depends_on = {
        "workbook_sha256": digest,
        _KNOWN: known,
        "data": data.model_dump(mode="json"),
        "inputs": [asdict(each) for each in recipe.INPUTS],
        "recipe": recipe_key(run.profile.recipe),
        "tenant": tenant.model_dump(mode="json"),
        **({"forgotten": forgotten.digest} if forgotten.lines else {}),
    }
    return perform(run, "ingest", depends_on, work)


def _known_version(run: Run) -> str:
    """The dataset version that says which rows are new: the latest, or where this run goes on, that
    of its beginning, as it may have published another one since."""
    manifest = run.directory / "ingest" / MANIFEST
    if (
        manifest.exists()
        and (begun_with := StageResult.read(manifest).details.get(_KNOWN)) is not None
    ):
        return str(begun_with)
    latest = latest_version(run.profile)
    return latest.id if latest else ""
