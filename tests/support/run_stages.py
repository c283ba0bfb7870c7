"""Results of stages for runs that a test makes up."""

from collections.abc import Iterable
from typing import Any

from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.runs.run import Run, save_stage


def stage_result(stage: str, run_id: str = "r", **fields: Any) -> StageResult:
    return StageResult(stage=stage, run_id=run_id, **{"key": "k", "seconds": 1.0} | fields)


def end_stage(run: Run, stage: str, **fields: Any) -> StageResult:
    return save_stage(run, stage_result(stage, run.id, **fields))


def end_stage_with(run: Run, stage: str, rows: Iterable[Any], **fields: Any) -> StageResult:
    """A stage whose artifact is these rows."""
    artifact = write_jsonl(run.stage_directory(stage) / "rows.jsonl", rows)
    return end_stage(run, stage, artifacts={"rows": artifact}, **fields)
