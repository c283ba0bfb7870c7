"""The digests of a run's weights, and what is said where they are not those that the repository
states."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_fixture import page, report, shown

from qinglan.config import Profile
from qinglan.evaluation import weights
from qinglan.evaluation.models import Weights
from qinglan.evaluation.report.terminal import print_table
from qinglan.evaluation.weights import weights_of
from qinglan.runs.artifacts import WEIGHTS_SHA256, StageResult

DIGESTS = {"base_model": "b" * 64, "sft": "5" * 64, "rl": "7" * 64}


@pytest.fixture
def found(
    profile_of: Callable[..., Profile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """The weights of a run of the profile, with an empty file of expected digests."""
    monkeypatch.setattr(weights, "FILE", tmp_path / "weights.yaml")
    weights.FILE.write_text("{}")

    def weights_of_run(
        versions: dict[str, str] | None = None, digests: dict[str, str] = DIGESTS, **sections: Any
    ) -> Weights:
        details = {stage: {WEIGHTS_SHA256: digest} for stage, digest in digests.items()}
        stages = {
            s: StageResult(stage=s, key="k", run_id="r", seconds=0, details=d)
            for s, d in details.items()
        }
        run_weights = weights_of(profile_of(name="p", **sections), stages, versions or {})
        assert run_weights
        return run_weights

    return weights_of_run


def keep(found: Weights) -> None:
    weights.FILE.write_text(yaml.safe_dump({"p": {"made_of": found.made_of, **found.found}}))


def said(content: Weights) -> str:
    return " ".join(shown(print_table(report(weights=content.model_dump()))).split())


def test_digests_are_shown_and_from_which_stage_on_they_differ(
    found: Callable[..., Weights], tmp_path: Path
):
    shown_there = "Weights (SHA-256): base_model bbbbbbbbbbbb, sft 555555555555, rl 777777777777."
    assert shown_there in said(found())
    assert "repository" not in said(found())
    assert "权重（SHA-256）：基座模型 bbbbbbbbbbbb" in page(
        tmp_path, report(weights=found().model_dump())
    )
    assert weights_of(Profile.model_construct(), {}, {}) is None, "nothing was trained"
    keep(found())
    assert "bit for bit" in said(found())
    assert "From sft on they differ" in said(
        found(digests=DIGESTS | {"sft": "0" * 64, "rl": "1" * 64})
    )
    assert "bit for bit" in said(found(digests={"base_model": "b" * 64, "sft": "5" * 64}))


def test_digests_must_be_equal_for_the_same_settings_and_libraries_only(
    found: Callable[..., Weights],
):
    keep(found())
    changes: list[dict[str, Any]] = [
        {"sft": {"seed": 9}},
        {"trainer": {"threads": 9}},
        {"versions": {"torch": "1"}},
    ]
    of_same = [change for change in changes if found(**change).is_of_same]
    assert of_same == []
    assert "bit for bit" in said(found(sft={"seed": 9}))
    assert "of other settings, code or libraries" in said(
        found(digests=DIGESTS | {"rl": "1" * 64}, sft={"seed": 9})
    )
    assert found(gate={"min_gain": 0.01}).is_of_same
