"""deployments/prefect.yaml, and what `qinglan up` starts, without starting it."""

import inspect
import socket
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid

from qinglan import up
from qinglan.config import Profile, load_profile, profile_names
from qinglan.engines.command import Command
from qinglan.errors import ConfigError

ROOT = Path(__file__).parents[2]
PREFECT: dict[str, Any] = yaml.safe_load((ROOT / up.DEPLOYMENTS).read_text(encoding="utf-8"))
DEPLOYMENTS: list[dict[str, Any]] = PREFECT["deployments"]
each = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])


def all_commands(site: up.Site) -> list[Command]:
    commands = [site.prefect_server(), site.mlflow_server(), site.worker(), site.deploy(ROOT / up.DEPLOYMENTS)]
    return [command for command in commands if command]


def test_every_flow_is_deployed():
    assert {d["name"] for d in DEPLOYMENTS} == {path.stem for path in (ROOT / "flows").glob("[a-z]*.py")}


@each
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_entrypoint_is_dotted_and_takes_the_parameters(deployment: dict[str, Any]):
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(import_module(module), name)
    assert set(deployment["parameters"]) <= set(inspect.signature(flow.fn).parameters)
    assert load_profile(deployment["parameters"]["profile"])
    assert deployment["work_pool"] == {"name": up.WORK_POOL}


@each
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_run_form_offers_every_shipped_profile_and_takes_any_other(deployment: dict[str, Any]):
    module, _, name = deployment["entrypoint"].rpartition(".")
    schema = parameter_schema(getattr(import_module(module), name)).model_dump_for_openapi()
    profile = schema["properties"]["profile"]
    offered, own = profile["anyOf"]
    assert {"embedded", "answer_judge", "medical"} <= {*offered["enum"]} == {*profile_names()}
    assert (own["type"], profile["default"], profile["title"]) == ("string", "embedded", "profile")
    for value in ("medical", "/srv/own.yaml"):
        assert is_valid({"profile": value}, schema)


def test_nothing_that_costs_money_runs_by_itself():
    schedules = [schedule for d in DEPLOYMENTS for schedule in d.get("schedules", [])]
    assert [(s["cron"], s["timezone"], s["active"]) for s in schedules] == [("0 2 * * *", "Asia/Shanghai", False)]


def test_no_pull_step_so_that_runs_start_where_they_were_deployed():
    assert "pull" not in PREFECT
    assert all("pull" not in d for d in DEPLOYMENTS)


def test_servers_listen_on_loopback_and_report_to_nobody(tmp_path: Path):
    commands = all_commands(up.Site(tmp_path, f"sqlite:///{tmp_path}/mlflow.db"))
    servers = [command for command in commands if {"server"} & set(command.argv)]
    assert len(servers) == 2
    assert all("--host=127.0.0.1" in command.argv for command in servers)
    assert all(command.env["DO_NOT_TRACK"] == "true" for command in commands)
    assert servers[0].env["PREFECT_SERVER_UI_V2_ENABLED"] == "false"


def test_mlflow_is_left_alone_where_a_tracking_server_is_set(tmp_path: Path):
    site = up.Site(tmp_path, "https://mlflow.example.com")
    assert site.mlflow_server() is None
    assert site.mlflow_url == "https://mlflow.example.com"


def test_a_taken_port_is_one_line(profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with socket.create_server((up.HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*; is `qinglan up` running already"):
            up.serve_site(profile_of(), print, prefect_port=port)


def test_a_site_with_its_own_server_is_told_so(profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example.com/api")
    with pytest.raises(ConfigError, match="has a Prefect server already"):
        up.serve_site(profile_of(), print)


def test_what_a_dead_worker_left_is_marked_as_crashed():
    sent: list[tuple[str, bytes]] = []

    def server(request: httpx.Request) -> httpx.Response:
        sent.append((request.url.path, request.content))
        return httpx.Response(200, json=[{"id": "r1"}] if request.url.path.endswith("filter") else {})

    with httpx.Client(base_url="http://test/api", transport=httpx.MockTransport(server)) as api:
        assert up.crash_interrupted(api) == 1
    assert [path for path, _ in sent] == ["/api/flow_runs/filter", "/api/flow_runs/r1/set_state"]
    assert b'"RUNNING"' in sent[0][1]
    assert b'"CRASHED"' in sent[1][1]
