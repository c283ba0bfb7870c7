"""The sample stage: draws the questions that every compared teacher is asked."""

from qinglan.evaluation.teacher_comparison import draw
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, read_jsonl, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task


@stage_task("sample")
def draw_questions(run: Run, ingested: StageResult) -> StageResult:
    """The questions that every teacher is asked."""
    wanted = run.profile.compare.rows

    def work(stage: Stage) -> Outcome:
        rows = draw(read_jsonl(ingested.path("rows"), Row), wanted)
        if len(rows) < wanted:
            stage.say(f"compare.rows asks for {wanted:,} questions, and there are {len(rows):,}")
        return Outcome(
            len(rows), len(rows), {}, {"rows": write_jsonl(stage.directory / "rows.jsonl", rows)}
        )

    return perform(
        run,
        "sample",
        {"rows_sha256": ingested.artifacts["rows"].sha256, "rows": wanted},
        work,
    )
