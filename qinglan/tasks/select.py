"""The select stage: decides which answers may teach."""

from qinglan.data.review import load_reviews
from qinglan.data.workbook_writer import write_rows
from qinglan.recipes import get_recipe, recipe_key
from qinglan.recipes.selection import select
from qinglan.rows import Row, RowCounts
from qinglan.runs.artifacts import StageResult, read_jsonl, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

_MOST_WORKBOOK_ROWS = 100_000


@stage_task("select")
def select_rows(run: Run, validated: StageResult) -> StageResult:
    """Decide which answers may teach; a reviewer's verdict outranks the rules."""
    reviews = load_reviews(run.profile)
    recipe = get_recipe(run.profile.recipe)

    def work(stage: Stage) -> Outcome:
        before = RowCounts()
        after = RowCounts()
        validated_rows = before.pass_through(read_jsonl(validated.path("rows"), Row))
        reviewed_rows = reviews.apply(validated_rows)
        selected_rows = select(reviewed_rows, recipe.grader, run.profile.select)
        rows_file = stage.directory / "rows.jsonl"
        artifacts = {"rows": write_jsonl(rows_file, after.pass_through(selected_rows))}
        if after.total <= _MOST_WORKBOOK_ROWS:
            rows = read_jsonl(artifacts["rows"].path, Row)
            artifacts["workbook"] = write_rows(stage.directory / "rows.xlsx", rows, recipe)
        else:
            stage.say(
                f"no rows.xlsx: {after.total:,} rows are more than people open in Excel; "
                "see rows.jsonl"
            )
        return Outcome(before.ok, after.ok, after.dropped_since(before), artifacts)

    depends_on = {
        "rows_sha256": validated.artifacts["rows"].sha256,
        "select": run.profile.select.model_dump(mode="json"),
        "recipe": recipe_key(run.profile.recipe),
        "reviews": reviews.digest,
    }
    return perform(run, "select", depends_on, work)
