"""deployments/prefect.yaml, and what `qinglan up` starts, without starting it."""

import inspect
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

import qinglan
from qinglan.config import Profile, load_profile
from qinglan.errors import ConfigError
from qinglan.ops.prefect.deploy import DEPLOYMENTS as PREFECT_FILE
from qinglan.ops.prefect.deploy import deploy_command, find_deployments
from qinglan.ops.up.serve import serve_site
from qinglan.ops.up.site import WORK_POOLS, Site
from qinglan.runs.processes import HOST

ROOT = Path(__file__).parents[2]
PREFECT: dict[str, Any] = yaml.safe_load((ROOT / PREFECT_FILE).read_text(encoding="utf-8"))
DEPLOYMENTS: list[dict[str, Any]] = PREFECT["deployments"]
each = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])


def flow_of(deployment: dict[str, Any]) -> Any:
    module, _, name = deployment["entrypoint"].rpartition(".")
    return getattr(import_module(module), name)


def test_every_flow_is_deployed_and_every_deployment_has_a_name_of_its_own():
    files = {path.stem for path in (ROOT / "flows").glob("[a-z]*.py")}
    assert {d["entrypoint"].split(".")[2] for d in DEPLOYMENTS} == files
    assert {d["work_pool"]["name"] for d in DEPLOYMENTS} == {*WORK_POOLS}
    names = [d["name"] for d in DEPLOYMENTS]
    assert len({*names}) == len(names)
    assert {name.replace("_", "-") for name in files} <= {*names}


@each
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_entrypoint_is_dotted_and_takes_the_parameters(deployment: dict[str, Any]):
    flow = flow_of(deployment)
    scheduled = [schedule.get("parameters", {}) for schedule in deployment.get("schedules", [])]
    for parameters in (deployment["parameters"], *scheduled):
        assert set(parameters) <= set(inspect.signature(flow.fn).parameters)
        validate(parameters, parameter_schema(flow).model_dump_for_openapi(), raise_on_error=True)
    assert load_profile(deployment["parameters"]["profile"])


@each
def test_what_trains_has_the_trainers_pool(deployment: dict[str, Any]):
    trains = deployment["entrypoint"].split(".")[2] in ("pipeline", "train", "evaluate")
    assert deployment["work_pool"] == {"name": "qinglan-trainer" if trains else "qinglan"}
    assert {"qinglan", "training" if trains else "qinglan"} <= {*deployment["tags"]}
    # A restarted server would end a training by one of these limits.
    assert not {"concurrency_limit", "global_concurrency_limit"} & deployment.keys()


def test_nothing_that_costs_money_or_removes_files_runs_by_itself():
    assert not any(schedule["active"] for d in DEPLOYMENTS for schedule in d.get("schedules", []))
    clean_ups = [d for d in DEPLOYMENTS if d["entrypoint"] == "qinglan.flows.clean_up.clean_up"]
    assert not any("dry_run" in d["parameters"] for d in clean_ups)  # the flow's default only says what would go


def test_servers_listen_on_loopback_and_report_to_nobody(tmp_path: Path):
    site = Site(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    prefect, mlflow = site.prefect_server(), site.mlflow_server()
    assert mlflow
    assert "127.0.0.1" in prefect.argv
    assert "--host=127.0.0.1" in mlflow.argv
    commands = [prefect, mlflow, *map(site.worker, WORK_POOLS), deploy_command(PREFECT_FILE, site.prefect_env)]
    assert all(command.env["DO_NOT_TRACK"] == "true" for command in commands)
    assert Site(tmp_path, "https://mlflow.example.com").mlflow_server() is None


def test_a_taken_port_is_one_line(profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*; is `qinglan up` running already"):
            serve_site(profile_of(), print, prefect_port=port)


def test_a_site_with_its_own_server_is_told_so(profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example.com/api")
    with pytest.raises(ConfigError, match="has a Prefect server already"):
        serve_site(profile_of(), print)


def test_the_packages_own_deployments_are_used_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert find_deployments() == Path(qinglan.__file__).parent / "deployments" / "prefect.yaml"
