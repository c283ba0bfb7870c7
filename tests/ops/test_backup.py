"""A site with a Prefect server, MLflow and a ledger: backed up, lost, restored, found again."""

import shutil
from pathlib import Path

import pytest
from fixture_types import Qinglan
from ledger_calls import call
from mlflow import MlflowClient
from prefect_process import post, prefect_process
from registered import Models
from run_stages import end_stage_with

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.ledger import Order
from qinglan.ops.up.site import Site
from qinglan.runs.artifacts import sha256_of
from qinglan.runs.processes import free_port
from qinglan.runs.run import find_run, load_stages, open_run

pytestmark = [
    pytest.mark.slow,
    # MLflow's.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]
PAID_FOR = [f"question-{number}" for number in range(200)]


def test_a_lost_site_is_found_again_and_paid_once(
    qinglan: Qinglan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("PREFECT_HOME", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    state = profile.paths.state
    runs = profile.paths.runs
    backup_folder = str(tmp_path / "kept")
    with site_ledger(profile) as ledger:
        ledger.record([call(question, text=f"answer to {question}") for question in PAID_FOR])
    models = Models(profile.tracking_uri, "qinglan.test", state)
    candidate = models.candidate()
    models.registry.register(candidate)
    with open_run(profile, "refresh") as run:
        ingested = end_stage_with(run, "ingest", [{"n": 1}])
    server = Site(state, "", prefect_port=free_port())
    with prefect_process(server, tmp_path / "logs") as prefect:
        flow = post(prefect, "/flows/", name="refresh")["id"]
        path = "qinglan.flows.refresh.refresh"
        deployment = post(prefect, "/deployments/", name="nightly", flow_id=flow, entrypoint=path)
        flow_run = post(prefect, f"/deployments/{deployment['id']}/create_flow_run")
        status, said, error = qinglan("backup", backup_folder, profile=profile)
        assert status == 0, error
        assert "part of a database that is copied whole" in said

    shutil.rmtree(state)
    shutil.rmtree(runs)
    status, said, error = qinglan("restore", backup_folder, profile=profile)
    assert status == 0, error
    assert "restored" in said

    with site_ledger(profile) as ledger:
        exchange = ledger.exchange(Order(wanted=[*PAID_FOR, "never asked"]))
        assert exchange.claimed == {"never asked"}
        assert exchange.found[PAID_FOR[-1]].text == f"answer to {PAID_FOR[-1]}"
    client = MlflowClient(profile.tracking_uri)
    assert client.get_run(candidate.mlflow_run_id).info.status == "RUNNING"
    released = models.open().version("1")
    assert sha256_of(models.open().folder(released)) == candidate.model.sha256
    release = client.download_artifacts(
        candidate.mlflow_run_id, "release/release.json", str(tmp_path)
    )
    assert '"verdict": "promote"' in Path(release).read_text(encoding="utf-8")
    (restored,) = load_stages(find_run(runs, "latest"), ["ingest"], "")
    assert restored.path("rows") == ingested.path("rows")
    with prefect_process(server, tmp_path / "logs") as prefect:
        response = prefect.get(f"/flow_runs/{flow_run['id']}").raise_for_status()
        assert response.json()["name"] == flow_run["name"]
        deployments = post(prefect, "/deployments/filter")
        assert [deployment["name"] for deployment in deployments] == ["nightly"]
