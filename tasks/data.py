"""The data stages that ask nobody: ingest, select, dataset. `qinglan.tasks.asking` has those between them."""

from dataclasses import asdict
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from qinglan.data.dataset import build
from qinglan.data.dataset.pools import assign
from qinglan.data.review import load_reviews
from qinglan.data.sources.database import take_snapshot
from qinglan.data.sources.files import READERS, digest_of, list_files
from qinglan.data.versions import pinned_splits
from qinglan.data.workbook import read_rows
from qinglan.data.workbook_writer import write_rows
from qinglan.errors import StageError, WorkbookError
from qinglan.recipes import get_recipe, identity
from qinglan.recipes.kinds.grading import grading_of
from qinglan.recipes.scoring.identity import scored_with
from qinglan.rows import Row, RowCounts
from qinglan.runs.artifacts import StageResult, hash_of, read_jsonl, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform

_SHOWN_PROBLEMS = 20
_WORKBOOK_ROWS = 100_000


@task(name="ingest", task_run_name="ingest", cache_policy=NO_CACHE)
def ingest_workbook(run: Run, workbook: Path) -> StageResult:
    """Read the workbook; bad rows are kept with their reason.

    Args:
        workbook: a file or folder; with `data.sql`, where the snapshot of the database's rows is kept.
    """
    data, tenant, recipe = run.profile.data, run.profile.tenant, get_recipe(run.profile.recipe)

    def work(stage: Stage) -> Outcome:
        counts, shown = RowCounts(), list[str]()

        def tell(problem: str) -> None:
            if len(shown) < _SHOWN_PROBLEMS:
                shown.append(problem)
                stage.say(problem)

        read = read_rows(workbook, data, tenant, tell, inputs=recipe.INPUTS)
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
        taken = take_snapshot(data, workbook, recipe.INPUTS)
        get_run_logger().info("ingest: %s rows of the database are now in %s", f"{taken.rows:,}", workbook)
    digest = digest_of(workbook)
    for path in list_files(workbook).skipped:
        get_run_logger().warning("ingest: %s: skipped, its suffix is none of %s", path, ", ".join(READERS))
    depends_on = {
        "workbook_sha256": digest,
        "data": data.model_dump(mode="json"),
        "inputs": [asdict(each) for each in recipe.INPUTS],
        "recipe": identity(run.profile.recipe),
        "tenant": tenant.model_dump(mode="json"),
    }
    return perform(run, "ingest", depends_on, work)


@task(name="select", task_run_name="select", cache_policy=NO_CACHE)
def select_rows(run: Run, validated: StageResult) -> StageResult:
    """Decide which answers may teach; what people said of them outranks the rules."""
    reviews, grading = load_reviews(run.profile), grading_of(get_recipe(run.profile.recipe))

    def work(stage: Stage) -> Outcome:
        before, after = RowCounts(), RowCounts()
        rows = reviews.apply(before.pass_through(read_jsonl(validated.path("rows"), Row)))
        selected = after.pass_through(grading.select(rows, run.profile.select))
        artifacts = {"rows": write_jsonl(stage.directory / "rows.jsonl", selected)}
        if after.total <= _WORKBOOK_ROWS:
            again = read_jsonl(artifacts["rows"].path, Row)
            artifacts["workbook"] = write_rows(stage.directory / "rows.xlsx", again, get_recipe(run.profile.recipe))
        else:
            stage.say(f"no rows.xlsx: {after.total:,} rows are more than people open in Excel; see rows.jsonl")
        return Outcome(before.ok, after.ok, after.dropped_since(before), artifacts)

    depends_on = {
        "rows_sha256": validated.artifacts["rows"].sha256,
        "select": run.profile.select.model_dump(mode="json"),
        "recipe": identity(run.profile.recipe),
        "reviews": reviews.digest,
    }
    return perform(run, "select", depends_on, work)


@task(name="dataset", task_run_name="dataset", cache_policy=NO_CACHE)
def build_dataset(run: Run, selected: StageResult) -> StageResult:
    """Split by near-duplicate group and write the training files; what was a test row last night is one tonight."""
    profile = run.profile
    depends_on = {
        "rows_sha256": selected.artifacts["rows"].sha256,
        "dataset": profile.dataset.model_dump(mode="json"),
        "evaluation_sha256": [digest_of(Path(workbook)) for workbook in profile.dataset.decontaminate_against],
        "tenant": profile.tenant.model_dump(mode="json"),
        "recipe": identity(profile.recipe),
        "scored_with": scored_with(run),
    }
    inputs = hash_of(depends_on)
    pins, splits = pinned_splits(profile, inputs)

    def work(stage: Stage) -> Outcome:
        built = build(selected.path("rows"), stage.directory, profile, splits)
        outcome = Outcome(built.before.ok, built.after.ok, built.after.dropped_since(built.before), built.artifacts)
        outcome.metrics = {f"rows_{split}": float(n) for split, n in built.splits.items()}
        outcome.metrics |= {
            f"{name}_rows": float(a.rows)
            for name, a in built.artifacts.items()
            if a.rows is not None and name != "rows"
        }
        stage.say(", ".join(f"{name} {value:.0f}" for name, value in outcome.metrics.items()))
        for warning in built.warnings:
            get_run_logger().warning("dataset: %s", warning)
        outcome.details = {"scored_with": scored_with(run), "inputs": inputs, "pins": pins}
        outcome.details["warnings"] = list(built.warnings)
        return outcome

    return perform(run, "dataset", depends_on | {"pins": pins}, work)
