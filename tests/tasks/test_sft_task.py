"""The SFT stage's key: what makes it train again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fixture_types import ProfileOf
from question_rows import random_rows
from run_stages import stage_result

from qinglan.config import Profile
from qinglan.runs.artifacts import write_jsonl
from qinglan.runs.run import open_run
from qinglan.tasks import sft

MODEL = "Qwen/Qwen3-8B"


def trained(profile: Profile, folder: Path) -> Any:
    """What the stage makes of a few rows."""
    rows = write_jsonl(folder / "rows.jsonl", random_rows(2))
    with open_run(profile, "train", fresh=True) as run:
        dataset = stage_result(
            "dataset", run.id, artifacts=dict.fromkeys(("sft_train", "sft_dev", "rl_train"), rows)
        )
        return sft.train_sft.fn(
            run, dataset, stage_result("base_model", run.id, details={"model": MODEL})
        )


def test_another_revision_of_a_hubs_model_is_another_key(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "perform", lambda _run, _name, depends_on, *_, **__: depends_on)

    def key(revision: str | None) -> Any:
        return trained(profile_of(student={"base_model": MODEL, "revision": revision}), tmp_path)

    assert key(None) == key(None) != key("a") != key("b")


def test_a_merge_that_was_interrupted_is_made_anew(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ms-swift leaves a folder that it finds as it is, and ends well."""
    (half := tmp_path / "merged").mkdir()
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
            assert name == "ms-swift SFT" and progress, (
                "without it a training that stalls or dies is not restarted"
            )

    monkeypatch.setattr(sft, "run_engine", run_engine)
    made = trained(profile_of(), tmp_path)
    assert made.artifacts["model"].path == half
