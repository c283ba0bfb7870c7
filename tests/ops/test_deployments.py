"""qinglan/deployments/prefect.yaml, and what `qinglan up` starts, without starting it.

What was switched and paused on the server survives a deployment from any machine; a change of the
file wins.
"""

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_prefect import api_of
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

import qinglan
from qinglan.config import load_profile
from qinglan.errors import ConfigError
from qinglan.ops.prefect.deploy import DEPLOYMENTS as PREFECT_FILE
from qinglan.ops.prefect.deploy import find_deployments
from qinglan.ops.prefect.deployments import read_deployments, with_server_switches
from qinglan.ops.up.site import WORK_POOLS

ROOT = Path(__file__).parents[2]
NIGHTLY = "refresh/refresh/nightly"
OFTEN = "refresh/refresh/often"
PREFECT: dict[str, Any] = yaml.safe_load(
    (ROOT / "qinglan" / PREFECT_FILE).read_text(encoding="utf-8")
)
DEPLOYMENTS: list[dict[str, Any]] = PREFECT["deployments"]


def test_every_flow_is_deployed_and_every_deployment_has_a_name_of_its_own():
    files = {path.stem for path in (ROOT / "qinglan" / "flows").glob("[a-z]*.py")}
    assert {d["entrypoint"].split(".")[2] for d in DEPLOYMENTS} == files
    assert {d["work_pool"]["name"] for d in DEPLOYMENTS} == {*WORK_POOLS}
    names = [d["name"] for d in DEPLOYMENTS]
    assert len({*names}) == len(names)
    assert {name.replace("_", "-") for name in files} <= {*names}


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_entrypoint_is_dotted_and_takes_the_parameters(deployment: dict[str, Any]):
    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(import_module(module), name)
    scheduled = [schedule.get("parameters", {}) for schedule in deployment.get("schedules", [])]
    for parameters in (deployment["parameters"], *scheduled):
        assert set(parameters) <= set(inspect.signature(flow.fn).parameters)
        validate(parameters, parameter_schema(flow).model_dump_for_openapi(), raise_on_error=True)
    assert load_profile(deployment["parameters"]["profile"])


def test_nothing_that_costs_money_or_removes_files_runs_by_itself():
    for deployment in DEPLOYMENTS:
        for schedule in deployment.get("schedules", []):
            assert not schedule["active"], deployment["name"]
        if deployment["entrypoint"] == "qinglan.flows.clean_up.clean_up":
            # The flow's default only says what would go.
            assert "dry_run" not in deployment["parameters"], deployment["name"]


def test_the_packages_own_deployments_are_used_outside_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert find_deployments() == Path(qinglan.__file__).parent / "deployments" / "prefect.yaml"


class Server:
    """Deployments and variables as Prefect's API tells of them, deployed as `prefect deploy` does
    it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deployments = dict[str, dict[str, Any]]()
        self.variables = dict[str, Any]()
        self.said = list[str]()
        self.writes = list[str]()
        self.api = api_of(self._answer)

    def deploy(self, **file: Any) -> list[str]:
        """Deploy what the file says of its two schedules; the lines that were said of them."""
        self.said.clear()
        with with_server_switches(self.api, self.written(**file), self.said.append) as switched:
            for deployment in yaml.safe_load(switched.read_text())["deployments"]:
                self._set(deployment)
        assert not switched.exists()
        return self.said

    def written(self, cron: str = "0 2 * * *", tenants: int = 0, **active: Any) -> Path:
        schedules = [{"slug": slug, "cron": cron, "active": on} for slug, on in active.items()]
        ours = {
            "name": "refresh",
            "entrypoint": "qinglan.flows.refresh.refresh",
            "work_pool": {"name": "qinglan"},
        }
        ours |= {"schedules": schedules}
        # The tenants' share the list of schedules, as aliases in YAML do.
        further = [ours | {"name": f"refresh-{n}"} for n in range(tenants)]
        foreign = {"name": "own", "entrypoint": "jobs.py:own", "schedules": schedules}
        file = self.folder / "prefect.yaml"
        file.write_text(
            yaml.safe_dump({"name": "qinglan", "deployments": [ours, *further, foreign]}),
            encoding="utf-8",
        )
        return file

    def schedules(self, deployment: str = "refresh") -> dict[str, Any]:
        return {
            schedule["slug"]: schedule for schedule in self.deployments[deployment]["schedules"]
        }

    def switch(self, **active: bool) -> None:
        for slug, on in active.items():
            self.schedules()[slug]["active"] = on

    def active(self, deployment: str = "refresh") -> dict[str, bool]:
        return {slug: schedule["active"] for slug, schedule in self.schedules(deployment).items()}

    def _set(self, wanted: dict[str, Any]) -> None:
        schedules = [{"active": True} | schedule for schedule in wanted["schedules"]]
        self.deployments[wanted["name"]] = (
            {"paused": False} | wanted | {"id": "d", "schedules": schedules}
        )

    def _answer(self, method: str, path: str, body: Any) -> Any:
        if path == "deployments/filter":
            foreign = {"id": "o", "name": "refresh", "entrypoint": "jobs.py:f", "paused": True}
            return [*[foreign] * 250, *self.deployments.values()]
        name = path.removeprefix("variables").removeprefix("/name/") or body["name"]
        if method != "POST" and name not in self.variables:
            return 404
        if method == "GET":
            return {"value": self.variables[name]}
        assert len(json.dumps(body["value"])) <= 5_000
        self.writes.append(method)
        self.variables[name] = body["value"]
        return 201 if method == "POST" else 204


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_what_the_server_does_not_have_is_as_the_file_says(server: Server):
    assert server.deploy(nightly=False, often=True) == []
    assert server.active() == {"nightly": False, "often": True}
    assert server.deploy(nightly=False, often=True, new=True) == []
    assert server.active() == {"nightly": False, "often": True, "new": True}
    # Prefect fills it in.
    template = {"nightly": "{{ $NIGHTLY }}", "often": True, "new": True}
    assert server.deploy(**template) == []
    assert server.active() == template


def test_a_switch_by_hand_stays(server: Server):
    server.deploy(nightly=False, often=True)
    server.switch(nightly=True, often=False)
    for _ in range(2):
        assert server.deploy(nightly=False, often=True) == [
            f"schedule {NIGHTLY} stays on, as it was switched by hand",
            f"schedule {OFTEN} stays off, as it was switched by hand",
        ]
        assert server.active() == {"nightly": True, "often": False}
    assert server.writes == ["POST"]


def test_a_change_of_the_file_wins_and_is_said(server: Server):
    server.deploy(nightly=False, often=True)
    assert server.deploy(nightly=True, often=False) == [
        f"schedule {NIGHTLY} is switched on, as prefect.yaml has it on now",
        f"schedule {OFTEN} is switched off, as prefect.yaml has it off now",
    ]
    assert server.active() == {"nightly": True, "often": False}
    assert server.deploy(nightly=True, often=False) == []


@pytest.mark.parametrize("noted", [{}, {"a": 1}, "nightly"])
def test_where_nothing_is_known_the_server_keeps_its_switch_and_a_new_cron_arrives(
    server: Server, noted: Any
):
    server.deploy(nightly=False, often=True)
    server.switch(nightly=True, often=False)
    if noted:
        # Something else has set the variable.
        server.variables = dict.fromkeys(server.variables, noted)
    else:
        # Prefect's own command has deployed it, or an older version.
        server.variables.clear()
    assert server.deploy(nightly=False, often=True, cron="30 3 * * *") == [
        f"schedule {NIGHTLY} stays on, as it is on the server; prefect.yaml has it off",
        f"schedule {OFTEN} stays off, as it is on the server; prefect.yaml has it on",
    ]
    assert server.active() == {"nightly": True, "often": False}
    assert {schedule["cron"] for schedule in server.schedules().values()} == {"30 3 * * *"}
    said = server.deploy(nightly=False, often=True)
    assert said[0] == f"schedule {NIGHTLY} stays on, as it was switched by hand"


def test_another_who_deploys_at_the_same_time_makes_the_note_first(server: Server):
    def answer(method: str, path: str, _: Any) -> Any:
        if "filter" in path:
            return []
        return 409 if method == "POST" else 404

    server.api = api_of(answer)
    assert server.deploy(nightly=True) == []


def test_a_pause_and_a_switch_are_of_one_deployment_alone(server: Server):
    server.deploy(tenants=1, nightly=False)
    server.deployments["refresh"]["paused"] = True
    server.switch(nightly=True)
    server.deploy(tenants=1, nightly=False)
    paused = [deployment["paused"] for deployment in server.deployments.values()]
    assert paused == [True, False, False]
    assert [server.active(name)["nightly"] for name in server.deployments] == [True, False, False]


def test_another_folders_deployments_stay_noted(server: Server):
    server.deploy(tenants=1, nightly=True)
    assert server.deploy(nightly=True) == [
        "schedule refresh/refresh-0/nightly stays on; "
        "it is not in this prefect.yaml: switch it off by hand"
    ]
    server.schedules("refresh-0")["nightly"]["active"] = False
    server.deploy(tenants=1, nightly=True)
    assert server.said == [
        "schedule refresh/refresh-0/nightly stays off, as it was switched by hand"
    ]


def test_a_schedule_made_on_the_page_is_reported_before_prefect_removes_it(server: Server):
    server.deploy(nightly=False)
    server.deployments["refresh"]["schedules"].append(
        {"slug": None, "active": True, "schedule": {"cron": "1 1 * * *"}}
    )
    assert server.deploy(nightly=False) == [
        "schedule refresh/refresh (1 1 * * *) is removed: "
        "it has no slug, and prefect.yaml has others there"
    ]


def test_more_than_can_be_noted_is_said_and_the_servers_switches_stay(server: Server):
    said = server.deploy(tenants=200, nightly=True)
    assert said[0].startswith("prefect.yaml has 201 schedules on, too many to note")
    server.switch(nightly=False)
    said = server.deploy(tenants=200, nightly=True)
    assert f"schedule {NIGHTLY} stays off, as it is on the server" in said[0]


OURS = "name: refresh, entrypoint: qinglan.flows.refresh.refresh"


@pytest.mark.parametrize(
    "content",
    [
        "deployments: [",
        "",
        "name: qinglan",
        f"deployments: [{{{OURS}}}]",
        "deployments: [{schedules: {slug: nightly}}]",
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, content: str):
    (tmp_path / "prefect.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prefect\.yaml: ") as caught:
        read_deployments(tmp_path / "prefect.yaml")
    assert "\n" not in str(caught.value)
