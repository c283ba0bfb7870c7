"""Nothing that is paid for is bought twice: not while a batch holds it, nor after eight kill -9."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asking_worker
import pytest
from batch_api_simulator import SimulatedBatchStore, app_with_batches, running_app
from counting_teacher import CountingTeacher
from doubles import KilledError, raising
from fake_service import PRICE, SIMULATED
from fixture_types import ProfileOf, Serve
from run_stages import stage_result

from qinglan.clients.roles import Addresses
from qinglan.errors import StageError
from qinglan.rows import DIALOGUE, Row
from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.tasks.distill import ask_by_batch, register_prompts, require_no_open_batches

MODEL = "simulated-rewriter"
CAPITALS = str(Path(__file__).parents[1] / "support" / "capitals_recipe.py")
ROWS = 1000
CONCURRENCY = 8
TRIALS = 8
IN_FLIGHT = CONCURRENCY + 8
"""On the wire, or answered and being committed."""


def test_questions_in_an_open_batch_are_not_asked_row_by_row(profile_of: ProfileOf, tmp_path: Path):
    with running_app(app_with_batches(SimulatedBatchStore(batch_s=60.0))) as url:
        profile = profile_of(
            teacher={"model": MODEL, "base_url": f"{url}/v1"},
            prices=dict.fromkeys((MODEL, "small"), PRICE),
        )
        stage: Any = SimpleNamespace(
            run=SimpleNamespace(id="r", profile=profile), progress=raising(KilledError())
        )

        def questions(*texts: str) -> StageResult:
            rows = [Row(id=text, tenant="t", query=text, source="s") for text in texts]
            artifacts = {"rows": write_jsonl(tmp_path / "rows.jsonl", rows)}
            return stage_result("ingest", artifacts=artifacts)

        addresses = Addresses(f"{url}/v1", "", "")
        with pytest.raises(KilledError):
            ask_by_batch(stage, lambda: addresses, questions("虾青素咋吃", "鱼油咋吃"))
    with pytest.raises(
        StageError, match=r"distill: batch batch_\w+ of an earlier run still holds .*mode=batch_api"
    ):
        require_no_open_batches(stage, questions("鱼油咋吃"))
    require_no_open_batches(stage, questions("钙片咋吃"))


@pytest.mark.parametrize(
    ("recipe", "roles"),
    [
        (CAPITALS, []),  # its prompt is the question alone
        ("medical", ["judge", "student", "teacher"]),
        ("answer_judge", ["answerer", "student", "teacher"]),
        ("query_rewrite", ["extract", "judge", "panel", "relevance", "student", "teacher"]),
    ],
)
def test_the_instructions_of_every_role_are_registered_and_no_question(
    profile_of: ProfileOf, tmp_path: Path, recipe: str, roles: list[str]
):
    instructions: dict[str, str] = {}

    def register_prompt(name: str, text: str, _tags: dict[str, str]) -> None:
        role = name.rpartition(".")[2]
        instructions[role] = text

    tracker = SimpleNamespace(register_prompt=register_prompt)
    run = SimpleNamespace(profile=profile_of(recipe=recipe, **SIMULATED))
    stage: Any = SimpleNamespace(name="extract", run=run, tracker=tracker)
    # With all inputs of its own, nobody is asked about the first question.
    all_inputs = dict.fromkeys(("answer", "given", "candidate", "hint"), "随餐")
    with_dialogue = {"hint": "随餐", DIALOGUE: "用户：鱼油咋吃"}
    rows = [
        Row(id="0", tenant="t", query="鱼油0咋吃", source="s", inputs=all_inputs),
        Row(id="1", tenant="t", query="鱼油1咋吃", source="s", inputs=with_dialogue),
    ]
    artifacts = {"rows": write_jsonl(tmp_path / "rows.jsonl", rows)}
    register_prompts(stage, stage_result("ingest", artifacts=artifacts))
    assert sorted(instructions) == roles
    assert "鱼油" not in "".join(instructions.values())


def start(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, asking_worker.__file__, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asking\n"
    return process


@pytest.mark.slow
@pytest.mark.extended
def test_no_paid_answer_is_lost_and_none_is_bought_twice(
    tmp_path: Path, profile_of: ProfileOf, serve: Serve
):
    teacher = CountingTeacher(failing_share=0.05)
    service = serve(teacher)
    profile = profile_of(
        teacher={"model": "big", "base_url": service.url, "concurrency": CONCURRENCY}
    )
    asking_worker.write_questions(tmp_path, profile, ROWS)
    moments = random.Random(11)
    for trial in range(1, TRIALS + 1):
        process = start(tmp_path)
        time.sleep(moments.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        # The service finishes what it was asked.
        time.sleep(0.1)
        lost = teacher.answered.total() - asking_worker.paid(profile)
        assert lost <= IN_FLIGHT * trial
    process = start(tmp_path)
    process.communicate(timeout=900)
    assert process.returncode == 0
    assert len(teacher.answered) == ROWS
    bought_twice = teacher.answered.total() - ROWS
    assert bought_twice <= IN_FLIGHT * TRIALS
    assert asking_worker.paid(profile) == ROWS, "none is there twice"
