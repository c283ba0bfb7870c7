"""Results of stages for runs that a test makes up."""

from typing import Any

from qinglan.runs.artifacts import StageResult


def stage_result(stage: str, run_id: str = "r", **fields: Any) -> StageResult:
    return StageResult(stage=stage, run_id=run_id, **{"key": "k", "seconds": 1.0} | fields)
