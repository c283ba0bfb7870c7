"""What the training stages see of their engines: curves over a resume, and rows that an engine leaves out."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from qinglan.config import Profile
from qinglan.errors import ConfigError, StageError
from qinglan.runs.artifacts import Artifact, StageResult
from qinglan.runs.run import open_run
from qinglan.tasks.engine import Follower, LeftOut
from qinglan.tasks.sft import _swift_line, require_enough_rows
from qinglan.tasks.stage import Stage
from qinglan.training.engines import swift, verl


class FakeStage:
    """A stage and its tracker."""

    def __init__(self) -> None:
        self.name, self.mlflow_run_id, self.tracker = "sft", "", self
        self.sent: list[tuple[int, Mapping[str, float]]] = []
        self.said: list[str] = []

    def log_steps(self, _: str, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        self.sent += steps

    def progress(self, *_: Any) -> None:
        """Nobody looks."""

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize("rows", [63, 64])
def test_rows_that_fill_no_batch_are_told_of_before_training(profile_of: Callable[..., Profile], rows: int):
    files = {"rl_train": Artifact(path=Path("rl.parquet"), sha256="0" * 64, rows=rows)}
    dataset = StageResult(stage="dataset", key="k", run_id="r", seconds=1, artifacts=files)
    with open_run(profile_of(), "train") as run:
        if rows < run.profile.rl.train_batch_size == 64:
            with pytest.raises(ConfigError, match=r"train_batch_size \(64\) is more than the 63 RL training rows"):
                require_enough_rows(run, dataset)
        else:
            require_enough_rows(run, dataset)


@pytest.fixture
def stage() -> FakeStage:
    return FakeStage()


def log_steps(path: Path, *steps: tuple[int, str, float]) -> None:
    with path.open("a") as stream:
        for step, name, value in steps:
            stream.write(json.dumps({name: value, "global_step/max_steps": f"{step}/9"}) + "\n")


def test_a_step_that_was_trained_twice_counts_once(stage: FakeStage, tmp_path: Path):
    log = tmp_path / swift.LOGGING_FILE
    log_steps(log, (1, "loss", 9.0), (2, "loss", 8.0), (2, "eval_loss", 7.0), (3, "loss", 99.0))
    follow = Follower(cast(Stage, stage), log, _swift_line)
    follow()
    log_steps(log, (2, "loss", 6.0), (3, "loss", 5.0))
    follow()
    assert follow.curve("loss") == [(1, 9.0), (2, 6.0), (3, 5.0)]
    assert follow.curve("eval_loss") == [(2, 7.0)]
    assert follow.last_step == 3
    assert [step for step, _ in stage.sent] == [1, 2, 3], "sent once, after both were read"


def swift_filtered(before: int, after: int) -> str:
    return f"[INFO:swift] Dataset filtered, origin length: {before}, filtered dataset length: {after}\n"


def left_out_of(stage: FakeStage, log: Path) -> LeftOut:
    return LeftOut(cast(Stage, stage), log, 100, partial(swift.left_out, 100), "sft.max_length = 64")


def test_rows_that_are_left_out_are_counted_once_over_all_attempts(stage: FakeStage, tmp_path: Path):
    log = tmp_path / "sft.log"
    log.write_text("noise\n" * 3 + swift_filtered(100, 80) + swift_filtered(10, 2))
    watch = left_out_of(stage, log)
    assert watch.dropped == {}
    watch()
    with log.open("a") as stream:
        stream.write(swift_filtered(100, 80) + swift_filtered(10, 2))
    watch()
    assert (watch.count, watch.dropped) == (20, {"prompt_too_long": 20})
    assert stage.said == ["20 of 100 training rows are longer than sft.max_length = 64 tokens and left out"]


def test_too_many_rows_left_out_stop_the_stage(stage: FakeStage, tmp_path: Path):
    watch = left_out_of(stage, tmp_path / "sft.log")
    (tmp_path / "sft.log").write_text(swift_filtered(100, 79))
    with pytest.raises(StageError, match=r"sft: 21 of 100 .* sft.max_length = 64 tokens, more than 20%; raise it"):
        watch()


def test_verls_two_lines_may_come_apart(stage: FakeStage, tmp_path: Path):
    log = tmp_path / "rl.log"
    watch = LeftOut(cast(Stage, stage), log, 1998, verl.left_out, "rl.max_prompt_length = 256")
    for text, count in (("dataset len: 1998\n", 0), ("(TaskRunner pid=7) filter dataset len: 1990\n", 8)):
        with log.open("a") as stream:
            stream.write(text)
        watch()
        assert watch.count == count
