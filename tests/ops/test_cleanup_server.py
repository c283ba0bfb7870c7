"""Clean-up of the flow runs of a real Prefect server."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect_process import NO_SCHEDULER, post, prefect_process
from release_site import Site
from waiting import wait_until

from qinglan.config import Profile
from qinglan.ops.cleanup import clean_up
from qinglan.ops.cleanup.records import CleanUp
from qinglan.ops.prefect.api import RetryingClient
from qinglan.ops.up import site as up
from qinglan.runs.processes import free_port

pytestmark = [
    pytest.mark.slow,
    # MLflow's use of SQLAlchemy.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
LATER = datetime.now(UTC) + timedelta(days=40)


def swept(profile: Profile, **retention: Any) -> CleanUp:
    ruled = Profile.model_validate(profile.model_dump() | {"retention": retention})
    cleaned = clean_up(ruled, dry_run=False, say=print, now=LATER)
    assert not cleaned.notes
    return cleaned


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RetryingClient]:
    """A server of Prefect's that this site uses."""
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    site = up.Site(tmp_path, "", prefect_port=free_port())
    with prefect_process(site, tmp_path / "logs", **NO_SCHEDULER) as client:
        monkeypatch.setenv("PREFECT_API_URL", site.api_url)
        yield client


def ended(api: RetryingClient, run_id: str, state: str = "COMPLETED") -> str:
    post(api, f"flow_runs/{run_id}/set_state", state={"type": state}, force=True)
    return run_id


def names(api: RetryingClient) -> set[str]:
    return {run["id"] for run in post(api, "flow_runs/filter", limit=200)}


def runs_of(api: RetryingClient, deployment: str) -> list[str]:
    query = {"deployment_id": {"any_": [deployment]}}
    return [run["id"] for run in post(api, "flow_runs/filter", flow_runs=query)]


def test_old_flow_runs_go_whoever_started_them_and_what_runs_stays(
    api: RetryingClient, tmp_path: Path
):
    profile = Site(tmp_path).profile
    flow = post(api, "flows/", name="refresh")["id"]
    foreign_flow = post(api, "flows/", name="their-flow")["id"]
    schedules = [{"schedule": {"cron": "0 2 * * *", "timezone": "UTC"}, "active": True}]
    body = {"flow_id": flow, "parameters": {"profile": "embedded"}, "schedules": schedules}
    nightly = post(api, "deployments/", name="nightly", tags=["qinglan"], **body)["id"]
    foreign = post(api, "deployments/", name="other-team", tags=["other"], **body)["id"]
    for deployment in (nightly, foreign):
        post(api, f"deployments/{deployment}/schedule", max_runs=3)
    scheduled = runs_of(api, nightly)
    by_others = runs_of(api, foreign)

    def run_of(flow_id: str, **parameters: Any) -> str:
        return str(
            post(
                api, "flow_runs/", flow_id=flow_id, parameters=parameters, state={"type": "RUNNING"}
            )["id"]
        )

    by_hand = run_of(flow, profile="embedded")
    not_ours = [run_of(flow, profile="medical"), run_of(foreign_flow)]
    # A run of another project that has a flow of this name.
    not_ours.append(run_of(flow))
    from_ui = post(
        api, f"deployments/{nightly}/create_flow_run", parameters={"overrides": ["data.limit=3"]}
    )["id"]
    by_path = run_of(flow, profile=str(tmp_path / "embedded.yaml"))
    at_work = run_of(flow, profile="embedded")
    failed = run_of(flow, profile="embedded")
    old = {ended(api, run) for run in (scheduled[0], by_hand, from_ui, by_path)}
    old.add(ended(api, failed, "FAILED"))
    foreign_old = {ended(api, run) for run in (*not_ours, by_others[0])}
    for number in range(3):
        post(api, "artifacts/", key="run", type="markdown", data=str(number), flow_run_id=by_hand)
    post(api, "artifacts/", key="run", type="markdown", data="at work", flow_run_id=at_work)
    line = {"name": "n", "level": 20, "message": "m", "timestamp": datetime.now(UTC).isoformat()}
    api.post("logs/", json=[line | {"flow_run_id": by_hand}]).raise_for_status()
    everything = names(api)
    assert old | foreign_old | {at_work} <= everything

    assert not swept(profile, flow_run_days=50).removed
    assert names(api) == everything
    cleaned = swept(profile, flow_run_days=30)
    assert cleaned.counts == {"flow run": len(old)}
    assert names(api) == everything - old
    assert scheduled[1] in names(api), "a run of the nights to come"
    for route in ("artifacts/filter", "artifacts/latest/filter"):
        artifacts = post(api, route, limit=200)
        assert [artifact["data"] for artifact in artifacts] == ["at work"], route
    logs = {"flow_run_id": {"any_": [by_hand]}}
    wait_until("its logs to go", lambda: not post(api, "logs/filter", logs=logs))


def test_a_prefect_that_is_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    cleaned = clean_up(Site(tmp_path).profile, dry_run=False, say=print, now=LATER)
    assert len(cleaned.notes) == 1
    assert cleaned.notes[0].endswith("named by PREFECT_API_URL")
