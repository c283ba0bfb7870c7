"""Releasing for real: the flow under Prefect with a person's approval, and the command line."""

import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from release_site import DEADLINE_S, ROWS, Site
from waiting import wait_until

from qinglan.evaluation.models import Report
from qinglan.ops.prefect.api import RetryingClient, call
from qinglan.registry.approval import Waiting

# The warnings are about MLflow's use of SQLAlchemy.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def asked_in(site: Site, flow: "subprocess.Popen[str]") -> Path:
    """The file by which the flow says that it waits for a person."""

    def asks() -> Path | None:
        return next(site.profile.paths.runs.glob("*/gate/waiting.json"), None)

    wait_until("the gate's question", lambda: flow.poll() is not None or asks(), DEADLINE_S)
    waiting = asks()
    assert waiting is not None, flow.communicate()[0]
    return waiting


def believe_crashed(waiting: Waiting | None) -> None:
    """Tell the server that the run crashed, while its process is running, and asks again.

    So it is where no heartbeat came through for a while.
    """
    assert waiting
    path = f"flow_runs/{waiting.flow_run_id}"
    with RetryingClient(base_url=waiting.api_url, timeout=DEADLINE_S) as api:

        def paused_at() -> str | None:
            state = call(api, "GET", path)["state"]
            return str(state["timestamp"]) if state["name"] == "Paused" else None

        for state in ({"type": "CRASHED"}, {"type": "SCHEDULED", "name": "AwaitingRetry"}):
            wait_until("the flow run's pause", paused_at, DEADLINE_S)
            before = paused_at()
            call(api, "POST", f"{path}/set_state", {"state": state, "force": True})
            wait_until(
                "it to ask again",
                lambda before=before: paused_at() not in (None, before),
                DEADLINE_S,
            )


def test_a_model_that_a_person_approved_serves_until_it_is_rolled_back(site: Site):
    first = site.evaluated_run("first")
    flow = site.start("run", "release", "--from", first.id)
    waiting = asked_in(site, flow)
    assert (waiting.parent / "review.xlsx").exists()
    believe_crashed(Waiting.read(waiting.parent))
    site.qinglan("release", "approve", waiting.parents[1].name, "--reviewer", "李雷")
    text, _ = flow.communicate(timeout=DEADLINE_S)
    assert flow.returncode == 0, text
    assert "approved by 李雷" in text
    assert "version 1 (champion)" in text
    report = Report.read(waiting.parents[1] / "report.json")
    assert report.decision
    assert report.decision.verdict == "promote"
    assert report.released
    assert (report.released.version, report.released.aliases) == ("1", ["champion"])

    second = site.evaluated_run("second")
    site.qinglan("run", "release", "--from", second.id, "--set", "gate.approval=none")
    # It was not compared with the champion, which came later.
    assert site.registry.aliases() == {"champion": "1"}
    decision = Report.read(site.profile.paths.runs / "latest" / "report.json").decision
    assert decision
    assert decision.verdict == "undecided"
    (rule,) = [rule for rule in decision.rules if rule.name == "gain_vs_champion"]
    assert rule.outcome == "unknown"
    assert rule.reason
    assert "was not evaluated in this run" in rule.reason.render()
    site.qinglan("release", "promote", "2", "--force", "--reason", "tried by hand")
    rollback = site.qinglan("release", "rollback", "--reason", "it was slow")
    assert "champion 1, previous 2" in rollback
    lineage = site.qinglan("lineage", "champion", "--worst", "1")
    assert f"mean over {ROWS} of {ROWS} rows: the same" in lineage

    champion = site.registry.released("champion")
    assert champion is not None
    shutil.rmtree(champion.folder)
    restored = site.registry.folder(champion)
    assert (restored / "model.safetensors").read_text() == "rl first"


@pytest.mark.extended
def test_a_wait_that_was_cancelled_ends_though_no_worker_is_there(site: Site):
    evaluated = site.evaluated_run("first")
    flow = site.start("run", "release", "--from", evaluated.id)
    waiting = Waiting.read(asked_in(site, flow).parent)
    assert waiting
    with RetryingClient(base_url=waiting.api_url, timeout=DEADLINE_S) as api:
        path = f"flow_runs/{waiting.flow_run_id}"
        wait_until(
            "the pause", lambda: call(api, "GET", path)["state"]["name"] == "Paused", DEADLINE_S
        )
        call(api, "POST", f"{path}/set_state", {"state": {"type": "CANCELLED"}})
    text, _ = flow.communicate(timeout=DEADLINE_S)
    assert flow.returncode == 2, text
    assert "error: gate: the flow run became Cancelled while it waited for a person" in text
    assert site.registry.aliases() == {}


@pytest.mark.extended
def test_a_model_that_nobody_looked_at_ends_the_flow_well_and_can_be_approved_later(site: Site):
    evaluated = site.evaluated_run("first")
    text = site.qinglan(
        "run", "release", "--from", evaluated.id, "--set", "gate.approval_timeout_s=20"
    )
    assert "Undecided about the RL student" in text
    with closing(sqlite3.connect(next(site.profile.paths.state.rglob("prefect.db")))) as database:
        query = "SELECT name FROM flow_run_state ORDER BY timestamp"
        states = [name for (name,) in database.execute(query)]
    # Never Failed, of which people would be told.
    assert states[-3:] == ["Paused", "Running", "Completed"]
    assert site.registry.aliases() == {}
    assert "champion 1" in site.qinglan("release", "approve", "latest", "--reviewer", "李雷")
