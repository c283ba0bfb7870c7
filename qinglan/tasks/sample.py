"""The sample stage: draws the questions that every compared teacher is asked."""

from qinglan.evaluation.teacher_comparison import draw
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, read_jsonl, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task


@stage_task("sample")
def draw_questions(run: Run, ingested: StageResult) -> StageResult:
    """Draw the questions that every teacher is asked."""
    row_count = run.profile.compare.rows

    def work(stage: Stage) -> Outcome:
        rows = draw(read_jsonl(ingested.path("rows"), Row), row_count)
        if len(rows) < row_count:
            stage.say(f"compare.rows asks for {row_count:,} questions, and there are {len(rows):,}")
        artifacts = {"rows": write_jsonl(stage.directory / "rows.jsonl", rows)}
        return Outcome(rows_in=len(rows), rows_out=len(rows), artifacts=artifacts)

    depends_on = {"rows_sha256": ingested.artifacts["rows"].sha256, "rows": row_count}
    return perform(run, "sample", depends_on, work)
