"""The SFT stage: its key, its merge, and the rows that RL will need."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fixture_types import ProfileOf
from question_rows import random_rows
from run_stages import stage_result

from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.runs.artifacts import Artifact, StageResult, write_jsonl
from qinglan.runs.run import open_run
from qinglan.tasks import sft

MODEL = "Qwen/Qwen3-8B"


def trained(profile: Profile, folder: Path) -> Any:
    """The stage's outcome, or its key, for a few rows."""
    rows = write_jsonl(folder / "rows.jsonl", random_rows(2))
    with open_run(profile, "train", fresh=True) as run:
        files = dict.fromkeys(("sft_train", "sft_dev", "rl_train"), rows)
        dataset = stage_result("dataset", run.id, artifacts=files)
        base = stage_result("base_model", run.id, details={"model": MODEL})
        return sft.train_sft.fn(run, dataset, base)


def test_another_revision_of_a_hubs_model_is_another_key(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "perform", lambda _run, _name, depends_on, *_, **__: depends_on)

    def key(revision: str | None) -> Any:
        return trained(profile_of(student={"base_model": MODEL, "revision": revision}), tmp_path)

    assert key(None) == key(None)
    assert key(None) != key("a")
    assert key("a") != key("b")


def test_a_merge_that_was_interrupted_is_made_anew(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ms-swift leaves a folder that it finds as it is, and ends well."""
    half = tmp_path / "merged"
    half.mkdir()
    (half / "model-00001-of-00002.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints").mkdir()
    stage: Any = SimpleNamespace(
        directory=tmp_path, say=lambda _: None, tracker=Mock(), mlflow_run_id="m"
    )
    monkeypatch.setattr(sft, "perform", lambda _run, _name, _key, work, **_: work(stage))
    monkeypatch.setattr(sft, "require_disk_space", lambda *_: None)
    monkeypatch.setattr(sft.swift, "best_checkpoint", lambda folder: folder)

    def run_engine(
        _stage: Any, _command: Any, *, name: str, progress: Any = None, **_: Any
    ) -> None:
        if name == "ms-swift merge":
            assert not half.exists()
            half.mkdir()
        else:
            assert name == "ms-swift SFT"
            assert progress, "without it a training that stalls or dies is not restarted"

    monkeypatch.setattr(sft, "run_engine", run_engine)
    outcome = trained(profile_of(), tmp_path)
    assert outcome.artifacts["model"].path == half


def test_rows_that_fill_no_batch_are_told_of_before_training(profile_of: ProfileOf) -> None:
    def dataset(rows: int) -> StageResult:
        files = {"rl_train": Artifact(path=Path("rl.parquet"), sha256="0" * 64, rows=rows)}
        return stage_result("dataset", artifacts=files)

    message = r"train_batch_size \(64\) is more than the 63 RL training rows"
    with open_run(profile_of(), "train") as run:
        sft.require_enough_rows(run, dataset(64))
        with pytest.raises(ConfigError, match=message):
            sft.require_enough_rows(run, dataset(63))
