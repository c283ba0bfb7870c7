"""The data stages that ask nobody: ingest, select, dataset. `tasks.asking` has those between them."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from qinglan.artifacts import StageResult, read_jsonl, sha256_of, write_jsonl
from qinglan.clients import scored_with
from qinglan.dataset import assign_splits, write_datasets
from qinglan.errors import StageError, WorkbookError
from qinglan.evaluation import count_by_split
from qinglan.recipes import identity
from qinglan.rows import Row
from qinglan.runs import Run
from qinglan.selection import select
from qinglan.workbook import problems, read_rows, write_rows
from tasks.stage import Outcome, Stage, outcome_of, perform

_SHOWN_PROBLEMS = 20


@task(name="ingest", task_run_name="ingest", cache_policy=NO_CACHE)
def ingest_workbook(run: Run, workbook: Path) -> StageResult:
    """Read the workbook; bad rows are kept with their reason."""
    data, tenant = run.profile.data, run.profile.tenant

    def work(stage: Stage) -> Outcome:
        rows = read_rows(workbook, data, tenant)
        lines = problems(rows)
        for line in lines[:_SHOWN_PROBLEMS]:
            stage.say(line)
        if len(lines) > _SHOWN_PROBLEMS:
            stage.say(f"... and {len(lines) - _SHOWN_PROBLEMS} more; all are in rows.jsonl with their reason")
        ok = sum(row.status == "ok" for row in rows)
        if not ok:
            raise StageError(f"{workbook}: none of its {len(rows)} rows can be used; first: {lines[0]}")
        stage.say(f"{ok:,} of {len(rows):,} rows of {workbook.name} are usable")
        return outcome_of(rows, rows, {"rows": write_jsonl(stage.directory / "rows.jsonl", rows)})

    if not workbook.is_file():
        raise WorkbookError(f"{workbook}: no such file; set data.workbook")
    depends_on = {
        "workbook_sha256": sha256_of(workbook),
        "data": data.model_dump(mode="json"),
        "tenant": tenant.model_dump(mode="json"),
    }
    return perform(run, "ingest", depends_on, work)


@task(name="select", task_run_name="select", cache_policy=NO_CACHE)
def select_rows(run: Run, validated: StageResult) -> StageResult:
    """Decide which rewrites may teach."""

    def work(stage: Stage) -> Outcome:
        before = list(read_jsonl(validated.path("rows"), Row))
        rows = select(before, run.profile.select)
        artifacts = {
            "rows": write_jsonl(stage.directory / "rows.jsonl", rows),
            "workbook": write_rows(stage.directory / "rows.xlsx", rows),
        }
        return outcome_of(before, rows, artifacts)

    depends_on = {
        "rows_sha256": validated.artifacts["rows"].sha256,
        "select": run.profile.select.model_dump(mode="json"),
    }
    return perform(run, "select", depends_on, work)


@task(name="dataset", task_run_name="dataset", cache_policy=NO_CACHE)
def build_dataset(run: Run, selected: StageResult) -> StageResult:
    """Split by near-duplicate group and write the training files."""
    profile = run.profile

    def work(stage: Stage) -> Outcome:
        before = list(read_jsonl(selected.path("rows"), Row))
        rows = assign_splits(before, profile.dataset, profile.dataset.seed)
        artifacts = write_datasets(stage.directory, rows, profile)
        outcome = outcome_of(before, rows, artifacts)
        outcome.metrics = {f"rows_{split}": float(n) for split, n in count_by_split(rows).items()}
        outcome.metrics |= {
            f"{name}_rows": float(a.rows) for name, a in artifacts.items() if a.rows is not None and name != "rows"
        }
        stage.say(", ".join(f"{name} {value:.0f}" for name, value in outcome.metrics.items()))
        outcome.details = {"scored_with": scored_with(run)}
        return outcome

    depends_on = {
        "rows_sha256": selected.artifacts["rows"].sha256,
        "dataset": profile.dataset.model_dump(mode="json"),
        "tenant": profile.tenant.model_dump(mode="json"),
        "recipe": identity(profile.recipe),
        "scored_with": scored_with(run),
    }
    return perform(run, "dataset", depends_on, work)
