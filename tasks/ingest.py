"""The ingest stage: reads the workbook or the database into rows."""

from dataclasses import asdict
from pathlib import Path

from prefect.logging import get_run_logger

from qinglan.data.dataset.pools import assign
from qinglan.data.sources.database import query_database
from qinglan.data.sources.files import READERS, digest_of, list_files
from qinglan.data.workbook import read_rows
from qinglan.errors import StageError, WorkbookError
from qinglan.recipes import get_recipe, recipe_key
from qinglan.rows import RowCounts
from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

CODE = (
    __name__, "recipe", "qinglan.data.dataset.pools", "qinglan.data.sources", "qinglan.data.workbook",
    "qinglan.rows",
)  # fmt: skip

_SHOWN_PROBLEMS = 20


@stage_task("ingest")
def ingest_workbook(run: Run, workbook: Path) -> StageResult:
    """Read the workbook, a file or folder; bad rows are kept with their reason. With `data.sql` it is where the
    snapshot of the database's rows is kept."""
    data, tenant, recipe = run.profile.data, run.profile.tenant, get_recipe(run.profile.recipe)

    def work(stage: Stage) -> Outcome:
        counts, shown = RowCounts(), list[str]()

        def report(problem: str) -> None:
            if len(shown) < _SHOWN_PROBLEMS:
                shown.append(problem)
                stage.say(problem)

        read = read_rows(workbook, data, tenant, report, inputs=recipe.INPUTS)
        rows = counts.pass_through(assign(read, recipe, data.pool_shares))
        artifacts = {"rows": write_jsonl(stage.directory / "rows.jsonl", rows)}
        if digest_of(workbook) != digest:
            raise WorkbookError(f"{workbook}: was changed while it was read; run again")
        if not counts.ok:
            raise StageError(f"{workbook}: none of its {counts.total:,} rows can be used; first: {shown[0]}")
        if (more := counts.total - counts.ok - len(shown)) > 0:
            stage.say(f"... and {more:,} more; all are in rows.jsonl with their reason")
        stage.say(f"{counts.ok:,} of {counts.total:,} rows of {workbook.name} are usable")
        return Outcome(counts.total, counts.ok, dict(counts.reasons.most_common()), artifacts)

    if data.sql and not workbook.exists():
        taken = write_jsonl(workbook, query_database(data, recipe.INPUTS))
        get_run_logger().info("ingest: %s rows of the database are now in %s", f"{taken.rows:,}", workbook)
    digest = digest_of(workbook)
    for path in list_files(workbook).skipped:
        get_run_logger().warning("ingest: %s: skipped, its suffix is none of %s", path, ", ".join(READERS))
    depends_on = {
        "workbook_sha256": digest,
        "data": data.model_dump(mode="json"),
        "inputs": [asdict(each) for each in recipe.INPUTS],
        "recipe": recipe_key(run.profile.recipe),
        "tenant": tenant.model_dump(mode="json"),
    }
    return perform(run, "ingest", depends_on, work, code=CODE)
