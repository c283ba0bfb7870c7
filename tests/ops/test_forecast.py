"""The expected course of a training, and what the profile should change before anything is paid."""

from typing import Any

import pytest
from fixture_types import ProfileOf
from report_fixture import comparison, report
from run_stages import end_stage

from qinglan.config import Profile
from qinglan.ops.estimate.counting import QuestionCounts
from qinglan.ops.forecast import find_problems, forecast
from qinglan.runs.artifacts import Artifact, write_json
from qinglan.runs.run import finish_run, open_run
from qinglan.runs.schema_version import dump_record

PLAN = QuestionCounts(questions=800, train=640, test=80, rl_prompts=640)


@pytest.fixture
def profile(profile_of: ProfileOf) -> Profile:
    return profile_of(
        sft={"gradient_accumulation_steps": 1},
        rl={"train_batch_size": 64, "epochs": 10},
        targets={"rows": {"validate": [0.9, 1.0], "select": [0.4, 0.6]}, "gain": 0.2},
        student={"gpu_hour_usd": 2.0},
        gate={"max_quality_loss": 0.5},
        trainer={"step_s": {"sft": 36, "rl": 72}},
    )


def test_rows_steps_and_hours_before_the_first_run(profile: Profile):
    expected = forecast(profile, PLAN)
    assert (expected.sft_rows, expected.rl_prompts, expected.test_rows) == (320, 608, 76)
    assert (expected.sft_steps, expected.rl_steps) == (480, 95)
    assert expected.rl_passes == pytest.approx(10)
    assert expected.gpu_hours == pytest.approx({"sft": 4.8, "rl": 1.9})
    assert expected.detectable_gain == pytest.approx(2.8 * (0.2 / 76) ** 0.5)
    assert expected.detectable_loss == pytest.approx(2.8 / 76**0.5)
    assert list(find_problems(profile, expected)) == []


def test_an_earlier_run_says_how_many_rows_stay_and_how_long_a_step_takes(profile: Profile):
    with open_run(profile, "pipeline") as run:
        rows = {"sft_train": 100, "rl_train": 300, "test": 40}
        file = run.directory / "rows.jsonl"
        file.write_text("{}\n")
        dataset = {name: Artifact.of(file, rows=count) for name, count in rows.items()}
        split = {"splits": {"train": 320, "dev": 40, "test": 40}}
        end_stage(run, "ingest", rows_out=400)
        end_stage(run, "dataset", artifacts=dataset, details=split)
        end_stage(run, "sft", seconds=1000.0, details={"summary": {"steps": 100}})
        end_stage(run, "evaluate", rows_in=320)
        gain = comparison(
            "rl", "teacher", 0.1, (0.0, 0.2), n=40, detectable_diff=0.08
        )  # the others have no label
        quality = gain.model_copy(update={"metric": "quality", "detectable_diff": 0.3})
        write_json(run.directory / "report.json", dump_record(report(comparisons=[gain, quality])))
        end_stage(
            run, "rl", seconds=300.0, details={"summary": {"steps": 4}}
        )  # its start, most of all
        finish_run(run)
    with open_run(profile, "refresh") as run:  # trains nothing
        for name, rows_out, artifacts in (("ingest", 400, {}), ("dataset", 300, dataset)):
            end_stage(run, name, rows_out=rows_out, artifacts=artifacts, details=split)
    expected = forecast(profile, PLAN)
    assert (expected.sft_rows, expected.rl_prompts, expected.test_rows) == (200, 600, 80)
    assert expected.rows_from == f"run {run.id}"
    assert expected.detectable_gain == pytest.approx(0.08 * 2)
    assert expected.detectable_loss == pytest.approx(0.3 * 2)
    assert expected.gpu_hours == pytest.approx({"sft": 300 * 10 / 3600, "rl": 94 * 72 / 3600})


@pytest.mark.parametrize(
    ("section", "changes", "setting"),
    [
        ("sft", {"gradient_accumulation_steps": 32}, "sft.gradient_accumulation_steps (32)"),
        ("sft", {"eval_steps": 500, "save_steps": 500}, "sft.eval_steps (500)"),
        ("rl", {"total_steps": 400}, "rl.epochs to 10"),
        ("rl", {"train_batch_size": 640}, "rl.train_batch_size (640)"),
        ("rl", {"test_freq": 100, "save_freq": 100}, "rl.test_freq (100)"),
        ("rl", {"test_freq": 10, "save_freq": 100}, "rl.save_freq (100)"),
        (
            "targets",
            {"gain": 0.03},
            "76 test questions can show a gain of 0.144, not of 0.03 (targets.gain)",
        ),
        (
            "gate",
            {"min_gain": 0.1},
            "76 test questions can show a gain of 0.244, not of 0.2 (targets.gain)",
        ),
        (
            "gate",
            {"max_quality_loss": 0.2},
            "a loss of 0.32 in the judge's score, not of 0.2 (gate.max_quality_loss)",
        ),
        ("gate", {"min_gain": 0.3}, "targets.gain (0.2) is not above gate.min_gain (0.3)"),
        ("student", {"gpu_hour_usd": None}, "student.gpu_hour_usd"),
    ],
)
def test_what_can_not_work_is_named_with_the_setting_to_change(
    profile: Profile, section: str, changes: dict[str, Any], setting: str
):
    changed = profile.model_copy(
        update={section: getattr(profile, section).model_copy(update=changes)}
    )
    (problem,) = find_problems(changed, forecast(changed, PLAN))
    assert setting in problem
