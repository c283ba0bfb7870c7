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
        return httpx.Response(200, json=[{"id": "d1", "name": "refresh", "schedules": [*schedules, unnamed]}])


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
        "schedule refresh/nightly stays on, as it was switched by hand",
        "schedule refresh/often stays off, as it was switched by hand",
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
