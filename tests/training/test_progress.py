"""The record of a training run: metrics, checkpoints, dev values, early stopping; the same after a
resume."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_rl import trainer_settings

from qinglan.errors import ArtifactError
from qinglan.training.alarms import CLIP_FRACTION, Alarm, read_alarms
from qinglan.training.engines import progress
from qinglan.training.engines.progress import (
    DEV_HIGH,
    DEV_LOW,
    DEV_VALUE,
    TrainingProgress,
    best_checkpoint,
    next_metrics_path,
)


def training(folder: Path, resumed_at: int = 0, **options: Any) -> TrainingProgress:
    return TrainingProgress(trainer_settings(folder, **options), resumed_at)


def validated(watched: TrainingProgress, *values: float) -> None:
    for step, value in enumerate(values):
        watched.validated(10 * step, {"row": value}, {"row": "a"})


def write_steps(folder: Path, steps: Mapping[int, Mapping[str, float | None]]) -> None:
    """One attempt."""
    lines = [json.dumps({"step": step, "data": data}) for step, data in steps.items()]
    next_metrics_path(folder).write_text("\n".join(lines) + "\n")


def write_dev(folder: Path, steps: dict[int, float]) -> None:
    write_steps(
        folder, {step: {DEV_VALUE: value, "unknown": None} for step, value in steps.items()}
    )


def write_checkpoints(folder: Path, *steps: int, tracker: str) -> Path:
    for step in steps:
        (folder / f"global_step_{step}").mkdir()
    path = folder / "latest_checkpointed_iteration.txt"
    path.write_text(tracker)
    return path


def test_the_interval_is_of_groups(tmp_path: Path):
    values = dict(zip("abcdef", (1.0, 1.0, 1.0, 1.0, 0.0, 0.0), strict=True))
    alone = training(tmp_path).validated(0, values, dict(zip(values, "abcdef", strict=True)))
    grouped = training(tmp_path).validated(0, values, dict(zip(values, "aaaabb", strict=True)))
    assert alone[DEV_VALUE] == pytest.approx(4 / 6)
    assert grouped[DEV_VALUE] == alone[DEV_VALUE]
    assert grouped[DEV_LOW] < alone[DEV_LOW] < alone[DEV_VALUE]
    assert alone[DEV_VALUE] < alone[DEV_HIGH] <= grouped[DEV_HIGH]
    assert training(tmp_path).validated(0, {}, {}) == {}


def test_early_stopping(tmp_path: Path):
    watched = training(tmp_path, patience=2)
    validated(watched, 0.5, 0.6, 0.6)
    assert watched.early_stopping_reason() is None
    validated(watched, 0.5, 0.6, 0.6, 0.55)
    assert "2 validations since step 10 (0.600)" in str(watched.early_stopping_reason()), (
        "a tie is nothing better"
    )


def test_the_newest_and_the_best_are_kept(tmp_path: Path):
    write_checkpoints(tmp_path, 10, 20, 30, 40, tracker="40")
    watched = training(tmp_path, keep_checkpoints=1)
    validated(watched, 0.9, 0.2, 0.5, 0.3, 0.4)
    watched.prune(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_20",
        "global_step_40",
    ]


def test_a_resumed_run_knows_what_was_measured_up_to_its_checkpoint(tmp_path: Path):
    write_steps(
        tmp_path,
        {0: {DEV_VALUE: 0.5, "kl": 0.1}, 10: {DEV_VALUE: 0.7}, 20: {DEV_VALUE: 0.9, "kl": 0.4}},
    )
    resumed = training(tmp_path, resumed_at=10, patience=0)
    assert "since step 10 (0.700)" in (resumed.early_stopping_reason() or "")
    assert resumed.last_known("kl") == 0.1
    assert resumed.last_known("none") is None


def test_an_alarm_of_the_checkpoint_s_own_step_is_still_to_be_answered(tmp_path: Path):
    clip_fractions = [0.1] * 3 + [0.9] * 5
    steps = {step: {CLIP_FRACTION: value} for step, value in enumerate(clip_fractions, 1)}
    write_steps(tmp_path, steps)
    sounded = next(step for step in steps if training(tmp_path, resumed_at=step).not_in_checkpoint)
    (alarm,) = training(tmp_path, resumed_at=sounded).not_in_checkpoint
    assert (alarm.name, alarm.step) == ("clip_fraction", sounded)
    assert training(tmp_path, resumed_at=sounded + 1).not_in_checkpoint == [], (
        "that checkpoint knows of it"
    )


def test_what_a_resume_discards_is_gone_and_half_lines_too(tmp_path: Path):
    fields: dict[str, Any] = {
        "name": "reward_down",
        "action": "warn",
        "code": "alarm_reward_down",
    }
    lines = [Alarm(step=step, **fields).model_dump_json() for step in (10, 20, 22, 31)]
    (tmp_path / progress.ALARMS_FILE).write_text("\n".join(lines) + "\n")
    dev_file = tmp_path / progress.DEV_FILE
    dev_file.write_text('{"step": 10}\n{"step": 22}\n{"step": 2')
    training(tmp_path, resumed_at=20).validated(20, {"row": 1.0}, {"row": "a"})
    assert [json.loads(line)["step"] for line in dev_file.read_text().splitlines()] == [10, 20]
    assert [alarm.step for alarm in read_alarms(tmp_path / progress.ALARMS_FILE)] == [10, 20]


def dev(right: int, rows: int = 200) -> dict[str, float]:
    return {str(row): float(row < right) for row in range(rows)}


@pytest.mark.parametrize(
    ("right", "chosen"),
    [
        # A question less of 200 is no reason to train less.
        ({10: 150, 20: 156, 30: 155}, 30),
        ({10: 150, 20: 170, 30: 130}, 20),
        ({10: 150, 20: 170, 30: 130, 40: 168}, 40),
        # Training brought nothing.
        ({0: 171, 10: 150, 20: 170}, 0),
        # A tie is no reason to change the model.
        ({0: 150, 10: 150}, 0),
    ],
)
def test_the_most_trained_model_not_worse_than_the_best_goes_on(
    tmp_path: Path, right: dict[int, int], chosen: int
):
    write_checkpoints(tmp_path, *(step for step in right if step), tracker=f"{max(right)}")
    watched = training(tmp_path)
    groups = {row: row for row in dev(0)}
    steps = {step: watched.validated(step, dev(count), groups) for step, count in right.items()}
    write_steps(tmp_path, steps)
    folder = tmp_path / f"global_step_{chosen}" if chosen else None
    assert best_checkpoint(tmp_path, tmp_path) == (chosen, folder)


def test_a_dev_row_without_a_score_counts_as_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qinglan.training.engines.ppo_trainer import dev_values

    row_ids = [str(row) for row in range(200)]
    infos = []
    for row, row_id in enumerate(row_ids):
        document = f"d{row % 50}"
        infos.append({"row_id": row_id, "gold_id": document, "unit": document})
    unscored: tuple[float | None, bool] = (None, True)
    silent = dict.fromkeys(row_ids[:190], (1.0, False)) | dict.fromkeys(row_ids[190:], unscored)
    complete = dict.fromkeys(row_ids[:191], (1.0, False)) | dict.fromkeys(
        row_ids[191:], (0.0, False)
    )
    worse, _ = dev_values(infos, silent, "gold_top1", row_ids)
    better, _ = dev_values(infos, complete, "gold_top1", row_ids)
    assert (len(worse), sum(worse.values())) == (200, 190)
    assert (len(better), sum(better.values())) == (200, 191)
    dropped_by_verl, _ = dev_values(infos, {}, "gold_top1", row_ids)
    assert dropped_by_verl == dict.fromkeys(row_ids, 0.0)
    unlabelled = [{"row_id": "1", "gold_id": "", "unit": "0"}]
    assert dev_values(unlabelled, {}, "gold_top1", ())[0] == {}, "no answer to it could be right"
    assert dev_values(unlabelled, {}, "score", "1") == ({"1": -1.0}, {"1": "0"})


def test_prompts_that_are_solved_do_not_count_among_those_that_teach_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qinglan.training.engines.ppo_trainer import zero_variance_share

    keys = [f"{prompt}_{rollout}_0" for prompt in range(3) for rollout in range(2)]
    assert zero_variance_share(keys, torch.tensor([1, 1, 1, 1, 1, 1])) is None
    assert zero_variance_share(keys, torch.tensor([1, 1, 0.2, 0.2, 0.2, 1])) == 0.5
    assert zero_variance_share(keys, torch.tensor([-1, -1, -1, -1, -1, -1])) == 1.0
    assert zero_variance_share(["a_0_0", "b_0_0"], torch.tensor([0.5, 0.5])) is None, (
        "each is alone"
    )


def test_metrics_of_a_resumed_run_are_joined(tmp_path: Path) -> None:
    write_dev(tmp_path, {0: 0.1, 10: 0.2, 20: 0.3})
    write_dev(tmp_path, {10: 0.25, 30: 0.4})
    assert next_metrics_path(tmp_path).name == "metrics.3.jsonl"
    metrics = progress.read_metrics(tmp_path)
    # What was measured at 20 was of a policy that is lost.
    assert {step: values["dev/value"] for step, values in metrics.items()} == {
        0: 0.1,
        10: 0.25,
        30: 0.4,
    }


def test_an_incomplete_checkpoint_is_ignored_and_deleted(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, 10, 20, 30, tracker="20")
    write_dev(tmp_path, {10: 0.5, 20: 0.4, 30: 0.9})
    assert list(progress.checkpoints(tmp_path)) == [10, 20]
    assert best_checkpoint(tmp_path, tmp_path) == (10, tmp_path / "global_step_10")
    assert progress.last_checkpoint(tmp_path) == (20, tmp_path / "global_step_20")
    progress.repair_checkpoints(tmp_path)
    assert not (tmp_path / "global_step_30").exists(), (
        "it would look complete once a later one is saved"
    )


def test_an_empty_tracker_is_repaired(tmp_path: Path) -> None:
    tracker = write_checkpoints(tmp_path, 10, 20, tracker="")
    (tmp_path / "global_step_10" / "data.pt").touch()
    assert list(progress.checkpoints(tmp_path)) == [10]
    progress.repair_checkpoints(tmp_path)
    assert tracker.read_text() == "10"
    assert list(tmp_path.glob("global_step_*")) == [tmp_path / "global_step_10"]


def test_a_run_without_checkpoints_has_neither_a_best_nor_a_last_one(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing was validated"):
        best_checkpoint(tmp_path, tmp_path)
    with pytest.raises(ArtifactError, match="no checkpoint under"):
        progress.last_checkpoint(tmp_path)
