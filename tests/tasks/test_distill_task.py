"""Batches of an earlier run: what they still hold is not bought a second time row by row."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batch_api_simulator import SimulatedBatchStore, app_with_batches, running_app
from fake_service import PRICE

from qinglan.clients.roles import Addresses
from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.tasks.distill import ask_by_batch, require_no_open_batches

MODEL = "simulated-rewriter"


class KilledError(Exception):
    """The process ends while its batch is under way."""


def test_questions_in_an_open_batch_are_not_asked_row_by_row(profile_of: Callable[..., Profile], tmp_path: Path):
    def killed(*_: object) -> None:
        raise KilledError

    with running_app(app_with_batches(SimulatedBatchStore(batch_s=60.0))) as url:
        profile = profile_of(
            teacher={"model": MODEL, "base_url": f"{url}/v1"}, prices=dict.fromkeys((MODEL, "small"), PRICE)
        )
        stage: Any = SimpleNamespace(run=SimpleNamespace(id="r", profile=profile), progress=killed)

        def questions(*texts: str) -> StageResult:
            rows = [Row(id=text, tenant="t", query=text, source="s") for text in texts]
            artifact = write_jsonl(tmp_path / "rows.jsonl", rows)
            return StageResult(stage="ingest", key="k", run_id="r", seconds=0, artifacts={"rows": artifact})

        addresses = Addresses(f"{url}/v1", "", "")
        with pytest.raises(KilledError):
            asyncio.run(ask_by_batch(stage, lambda: addresses, questions("虾青素咋吃", "鱼油咋吃")))
    with pytest.raises(StageError, match=r"distill: batch batch_\w+ of an earlier run still holds .*mode=batch_api"):
        require_no_open_batches(stage, questions("鱼油咋吃"))
    require_no_open_batches(stage, questions("钙片咋吃"))
