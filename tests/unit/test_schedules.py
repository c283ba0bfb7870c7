"""A schedule that was switched on in the UI survives the next deployment; a change of the file wins."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from qinglan.schedules import keep_switches

SLUGS = ("nightly", "often")


class Server:
    """Deployments as Prefect's API tells of them."""

    def __init__(self) -> None:
        self.active = dict.fromkeys(SLUGS, False)
        self.others = [
            {"id": f"o{n}", "name": "refresh", "entrypoint": "jobs.py:f", "schedules": [{"id": "o", "slug": "nightly"}]}
            for n in range(250)
        ]
        self.api = httpx.Client(base_url="http://test/api", transport=httpx.MockTransport(self._answer))

    def deploy(self, state: Path, said: list[str], **file: bool) -> None:
        with keep_switches(self.api, state, said.append):
            self.active.update(file)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH":
            slug = request.url.path.rpartition("/")[2]
            assert request.url.path == f"/api/deployments/d1/schedules/{slug}"
            self.active[slug] = json.loads(request.content)["active"]
            return httpx.Response(204)
        schedules: list[dict[str, Any]] = [{"id": s, "slug": s, "active": on} for s, on in self.active.items()]
        unnamed = {"id": "made by hand", "slug": None, "active": True}
        ours = {"id": "d1", "name": "refresh", "entrypoint": "flows.refresh.refresh"}
        found = [*self.others, ours | {"schedules": [*schedules, unnamed]}]
        query = json.loads(request.content)
        return httpx.Response(200, json=found[query.get("offset", 0) :][: query.get("limit", 200)])


@pytest.fixture
def server() -> Server:
    return Server()


def test_a_switch_by_hand_stays(server: Server, tmp_path: Path):
    said = list[str]()
    server.deploy(tmp_path, said, nightly=False, often=True)
    server.active.update(nightly=True, often=False)
    server.deploy(tmp_path, said, nightly=False, often=True)
    assert server.active == {"nightly": True, "often": False}
    assert said == [
        "schedule refresh/refresh/nightly stays on, as it was switched by hand",
        "schedule refresh/refresh/often stays off, as it was switched by hand",
    ]
    server.deploy(tmp_path, said, nightly=False, often=True)
    assert server.active["nightly"]


def test_a_change_of_the_file_wins(server: Server, tmp_path: Path):
    said = list[str]()
    server.deploy(tmp_path, said, nightly=False)
    server.deploy(tmp_path, said, nightly=True)
    assert (server.active["nightly"], said) == (True, [])


def test_without_memory_the_file_wins(server: Server, tmp_path: Path):
    server.active["nightly"] = True
    server.deploy(tmp_path, [], nightly=False)
    assert not server.active["nightly"]


@pytest.mark.parametrize("reason", [RuntimeError, KeyboardInterrupt])
def test_a_deployment_that_fails_midway_keeps_the_switches(server: Server, tmp_path: Path, reason: type[BaseException]):
    server.deploy(tmp_path, [], nightly=False, often=False)
    server.active.update(nightly=True, often=True)
    with pytest.raises(reason), keep_switches(server.api, tmp_path, [].append):
        server.active.update(nightly=False)
        raise reason
    assert server.active == {"nightly": True, "often": True}
    server.deploy(tmp_path, [], nightly=False, often=False)
    assert server.active == {"nightly": True, "often": True}
