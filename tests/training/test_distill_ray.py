"""Distillation on a local Ray: the same rows as in one process, each question paid once, errors in one line."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_service import FakeService, Script, completion

from qinglan.clients.roles import Services
from qinglan.config import Profile
from qinglan.errors import EngineError
from qinglan.rows import Row
from qinglan.runs.artifacts import read_jsonl
from qinglan.runs.launcher import JsonlTail, launch
from qinglan.runs.run import Run
from qinglan.training.engines.distill_ray import DistillJob, share_of

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]
ROWS = 60


@pytest.fixture
def job_of(tmp_path: Path, profile_of: Callable[..., Profile]) -> Callable[..., DistillJob]:
    def make(url: str, **teacher: Any) -> DistillJob:
        line = '{{"id": "{0}", "tenant": "t", "query": "虾青素{0}咋吃", "source": "q.csv:{0}"}}\n'
        (tmp_path / "rows.jsonl").write_text("".join(line.format(n) for n in range(ROWS)), encoding="utf-8")
        profile = profile_of(
            teacher={"model": "big", "base_url": url, "concurrency": 8, **teacher},
            distill={"engine": "ray", "batch_rows": 10, "ray": {"tasks": 2}},
        )
        return DistillJob(
            run=Run(id="r", flow="refresh", profile=profile, directory=tmp_path),
            services=Services(url, url, url),
            source=tmp_path / "rows.jsonl",
            usable_rows=ROWS,
            output=tmp_path / "out.jsonl",
            progress=tmp_path / "progress.jsonl",
            retry_delays_s=[0.0],
        )

    return make


def test_rows_come_back_in_order_and_each_is_paid_once(
    tmp_path: Path, job_of: Callable[..., DistillJob], serve: Callable[[Script], FakeService]
):
    asked: Counter[str] = Counter()

    def teacher(body: dict[str, Any]) -> Any:
        question = body["messages"][-1]["content"]
        asked[question] += 1
        return (503, {}) if "7" in question and asked[question] == 1 else (200, completion("改写 " + question))

    job = job_of(serve(teacher).url)
    launch(job.command(tmp_path / "job.json"), name="distill", log=tmp_path / "ray.log")
    rows = list(read_jsonl(job.output, Row))
    assert [row.id for row in rows] == [str(n) for n in range(ROWS)]
    assert all(row.answer == f"改写 虾青素{row.id}咋吃" for row in rows)
    assert asked.total() == ROWS + sum("7" in str(n) for n in range(ROWS))
    entries = list(JsonlTail(job.progress).new())
    assert [entry["done"] for entry in entries] == [10, 20, 30, 40, 50, 60, 60]
    launch(job.command(tmp_path / "job.json"), name="distill", log=tmp_path / "ray.log")
    assert list(JsonlTail(job.progress).new())[-1]["api"]["teacher"]["cached"] == ROWS


def test_a_refused_key_is_one_line(
    tmp_path: Path, job_of: Callable[..., DistillJob], serve: Callable[[Script], FakeService]
):
    job = job_of(serve(lambda _: (401, {})).url)
    with pytest.raises(EngineError):
        launch(job.command(tmp_path / "job.json"), name="distill", log=tmp_path / "ray.log")
    [entry] = JsonlTail(job.progress).new()
    assert entry == {"error": "teacher big: the service refuses the key; set teacher.api_key_env"}


def test_limits_are_shared_equally(job_of: Callable[..., DistillJob]):
    teacher = job_of("http://127.0.0.1:9/v1", requests_per_minute=100).run.profile.teacher
    part = share_of(teacher, 4)
    assert (part.concurrency, part.requests_per_minute, part.tokens_per_minute) == (2, 25, None)
