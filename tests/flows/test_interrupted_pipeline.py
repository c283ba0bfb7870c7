"""The whole DAG, killed three times by SIGKILL, then finished: one run, nothing paid twice, nothing trained twice."""

import json
import sqlite3
from contextlib import closing

import pytest
from pipeline_site import ROWS, Site

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """A finished run that was killed in distillation, in SFT and in PPO."""
    site = Site(tmp_path_factory.mktemp("site"))
    site.kill_when(lambda: site.paid("teacher") >= 50)
    site.kill_when(lambda: site.found("runs/*/sft/checkpoints/checkpoint-*/trainer_state.json"))
    site.kill_when(lambda: site.found("runs/*/rl/checkpoints/latest_checkpointed_iteration.txt"))
    site.run()
    return site


def test_interrupted_run_is_one_run(site: Site) -> None:
    assert len([d for d in (site.root / "runs").iterdir() if d.is_dir() and not d.is_symlink()]) == 1


def test_prefect_knows_which_attempts_were_killed(site: Site) -> None:
    with closing(sqlite3.connect(site.root / "state" / "prefect" / "prefect.db")) as connection:
        states = connection.execute("SELECT state_type FROM flow_run ORDER BY created").fetchall()
    assert [state for (state,) in states] == ["CRASHED", "CRASHED", "CRASHED", "COMPLETED"]


def test_training_continued_from_its_checkpoints(site: Site) -> None:
    assert "sft: continuing from checkpoint-" in site.log.read_text()
    lines = (site.run_directory / "rl" / "metrics.2.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps[0] > 0


def test_no_paid_call_is_repeated(site: Site) -> None:
    assert site.paid("teacher") == ROWS
    usage = site.report()["api"]["teacher"]
    assert usage["calls"] == ROWS and usage["failed"] == 0
