"""The SFT stage's key: what makes it train again."""

from pathlib import Path
from typing import Any

import pytest
from fixture_types import ProfileOf
from question_rows import random_rows
from run_stages import stage_result

from qinglan.runs.artifacts import write_jsonl
from qinglan.runs.run import open_run
from qinglan.tasks import sft


def test_another_revision_of_a_hubs_model_is_another_key(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", random_rows(2))
    monkeypatch.setattr(sft, "perform", lambda _run, _name, depends_on, *_, **__: depends_on)

    def key(revision: str | None) -> Any:
        student = {"base_model": "Qwen/Qwen3-8B", "revision": revision}
        with open_run(profile_of(student=student), "train", fresh=True) as run:
            dataset = stage_result(
                "dataset", run.id, artifacts=dict.fromkeys(("sft_train", "sft_dev", "rl_train"), rows)
            )
            return sft.train_sft.fn(
                run, dataset, stage_result("base_model", run.id, details={"model": "Qwen/Qwen3-8B"})
            )

    assert key(None) == key(None) != key("a") != key("b")
