"""`qinglan show`: whose run `latest` is, and what is said of a run without a report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.evaluation.models import Report
from qinglan.runs.artifacts import StageResult
from qinglan.runs.run import Run, finish_run, note_end, note_flow_run, open_run, save_stage
from qinglan.serving.registry.approval import WAITING_FILE, Waiting

ProfileOf = Callable[..., Profile]
Show = Callable[..., tuple[int, str, str]]
FLOW_RUN = "0193-a"


@pytest.fixture
def show(qinglan: Show, profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Run the command with a profile of this name."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)

    def call(*words: str, of: str | None = None, **sections: Any) -> tuple[int, str, str]:
        if of:
            return qinglan("show", *words, profile=profile_of(name=of, **sections))
        return qinglan("show", *words, "--set", f"paths.runs={tmp_path / 'runs'}")

    return call


def ended(profile: Profile, flow: str = "refresh") -> Run:
    with open_run(profile, flow) as run:
        finish_run(run)
    Report(run_id=run.id, profile=profile.name, recipe="query_rewrite").write(run.directory / "report.json")
    return run


def shown_of(run: Run) -> str:
    return f"Report: {run.directory / 'report.html'}"


def test_latest_is_the_profiles_own_where_one_is_named(profile_of: ProfileOf, show: Show):
    mine, other = ended(profile_of(name="acme")), ended(profile_of(name="beta"))
    status, out, _ = show("latest", of="acme")
    assert (status, shown_of(mine) in out) == (0, True)
    assert shown_of(other) in show("latest")[1]
    assert shown_of(other) in show(other.id, of="acme")[1]
    status, out, err = show("latest", of="gamma")
    assert (status, out) == (2, "")
    assert err.startswith("error: run `latest`: profile gamma has no run under ")
    assert err.endswith("leave out --profile for the last one of any\n")
    (mine.directory / "report.json").unlink()
    assert "has ended, but its report.json is missing; restore it from a backup" in show("latest", of="acme")[2]


def test_latest_of_a_profile_is_the_run_that_was_continued_last(profile_of: ProfileOf, show: Show):
    profile = profile_of(name="acme")
    with open_run(profile, "pipeline") as continued:
        continued.directory.joinpath("keep").touch()
    ended(profile)
    assert ended(profile, "pipeline").id == continued.id
    assert shown_of(continued) in show("latest", of="acme")[1]


def test_of_a_run_that_failed_it_says_what_was_done_where_its_log_is_and_how_it_goes_on(
    profile_of: ProfileOf, show: Show
):
    earlier = ended(profile_of(name="acme"))
    with open_run(profile_of(name="acme"), "refresh") as opened:
        run = note_flow_run(opened, FLOW_RUN)
        counts = {"rows_in": 9, "rows_out": 8, "dropped": {"empty_query": 1}}
        save_stage(run, StageResult(stage="ingest", key="k", run_id=run.id, seconds=2, **counts))
        log = run.stage_directory("distill") / "ray.log"
        log.touch()
        (log.parent / "started.json").touch()
        note_end(run, StageError("distill: 9 of 10 calls failed (timeout 9)\nthe end of a log"))
    assert "ended before its report: distill: 9 of 10 calls failed (timeout 9); `qinglan run" in show("latest")[2]
    note_flow_run(run, FLOW_RUN)  # it goes on
    status, out, err = show("latest", of="acme")
    assert (status, err.count("\n")) == (2, 1)
    why = "ended before its report, as no process of this machine runs it; "
    assert err.startswith(f"error: run {run.id} (refresh of acme): {why}")
    assert "`qinglan run refresh --profile acme` with the same --set goes on with it" in err
    assert f"the newest that has one: `qinglan show {earlier.id}`" in err
    assert "empty_query 1" in out
    assert "Begun, but not done: distill\n" in out
    assert f"Log: flow run {FLOW_RUN} on Prefect's pages, which `qinglan up` serves\nLog of distill: {log}\n" in out


def test_a_running_run_has_not_ended_and_its_log_is_on_the_sites_server(
    profile_of: ProfileOf, show: Show, monkeypatch: pytest.MonkeyPatch
):
    with open_run(profile_of(name="acme"), "refresh") as run:
        note_flow_run(run, FLOW_RUN)
        status, out, err = show("latest", of="acme", notify={"ui_url": "http://prefect.example/"})
        monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:4207/api")
        log = show("latest", of="acme")[1]
    assert log == f"Log: http://127.0.0.1:4207/runs/flow-run/{FLOW_RUN}\n"
    assert (status, out) == (2, f"Log: http://prefect.example/runs/flow-run/{FLOW_RUN}\n")
    assert err == f"error: run {run.id} (refresh of acme): has not ended, so it has no report yet; look again later\n"


def test_a_run_that_waits_for_a_person_says_where(profile_of: ProfileOf, show: Show):
    with open_run(profile_of(name="acme"), "pipeline") as run:
        page = "http://127.0.0.1:4200/runs/flow-run/x"
        api_url, workbook = "http://127.0.0.1:4200/api", Path("w.xlsx")
        waiting = Waiting(flow_run_id=uuid4(), api_url=api_url, page=page, until="noon", workbook=workbook)
        (run.stage_directory("gate") / WAITING_FILE).write_text(waiting.model_dump_json())
        assert f"waits for a person's approval until noon: {page}; it has no report yet" in show("latest", of="acme")[2]
    told = show("latest", of="acme")[2]  # and its process was killed
    assert "waits for" not in told and "ended before its report" in told
