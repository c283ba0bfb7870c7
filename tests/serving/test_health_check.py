"""Is what should be served being served? With a router that answers as a test says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qinglan.config import Profile
from qinglan.serving.canary import Judgement
from qinglan.serving.canary_observer import STATE_FILE, VERDICT_FILE, CanaryState, CanaryVerdict
from qinglan.serving.health_check import ServingHealth, check_serving, url_of
from qinglan.serving.site import serving_folder

ProfileOf = Callable[..., Profile]
NOW = 1_000_000.0
NOBODY = "http://127.0.0.1:9"


class Registry:
    """Names who should be served."""

    def __init__(self, **aliases: str) -> None:
        self._aliases = aliases

    def aliases(self) -> Any:
        return self._aliases


@pytest.fixture
def look(profile_of: ProfileOf, serve: Any) -> Callable[..., ServingHealth]:
    def look(registry: Registry, **health: Any) -> ServingHealth:
        told = {"status": "ok", "champion": {"version": "1"}, "challenger": None, "request_log": None} | health
        url = serve(lambda _: (200, told)).url.removesuffix("/v1")
        return check_serving(profile_of(), registry, url, clock=lambda: NOW)

    return look


@pytest.fixture
def folder(profile_of: ProfileOf) -> Path:
    found = serving_folder(profile_of())
    found.mkdir(parents=True)
    return found


def canary(folder: Path, *, looked: float) -> None:
    state = CanaryState(champion="1", challenger="2", share=0.1, started=NOW - 900, looked=looked)
    (folder / STATE_FILE).write_text(state.model_dump_json())


def test_all_is_well(look: Callable[..., ServingHealth]):
    health = look(Registry(champion="1"))
    assert (health.problems, health.notes, health.serving) == ([], [], "1")
    assert "| Answers | 1 |" in health.markdown
    assert "All is as it should be." in health.markdown


def test_a_site_that_is_down_is_a_problem_once_there_is_a_champion(profile_of: ProfileOf):
    assert check_serving(profile_of(), Registry(), NOBODY).problems == []
    (problem,) = check_serving(profile_of(), Registry(champion="3"), NOBODY).problems
    assert problem == (
        "version 3 is the champion, but no router answers at http://127.0.0.1:9; start `qinglan serve --profile test`"
    )


def test_another_service_at_the_address_is_no_router(
    look: Callable[..., ServingHealth], profile_of: ProfileOf, serve: Any
):
    url = serve(lambda _: (200, ["hello"])).url.removesuffix("/v1")
    assert "no router answers" in check_serving(profile_of(), Registry(champion="1"), url).problems[0]


@pytest.mark.parametrize("health", [{"status": "degraded"}, {"champion": None, "status": "degraded"}])
def test_answers_without_a_model_are_a_problem(look: Callable[..., ServingHealth], health: dict[str, Any]):
    (problem,) = look(Registry(champion="1"), **health).problems
    assert "answers without a model: version 1" in problem


def test_a_champion_that_is_coming_up_is_a_note(look: Callable[..., ServingHealth]):
    health = look(Registry(champion="2"))
    assert (health.problems, health.notes) == ([], ["version 1 answers until version 2 has come up"])


def test_a_full_disk_is_a_problem(look: Callable[..., ServingHealth]):
    assert "is the disk full?" in look(Registry(champion="1"), request_log="failing").problems[0]


def test_a_watched_canary_is_shown(look: Callable[..., ServingHealth], folder: Path):
    canary(folder, looked=NOW - 5)
    health = look(Registry(champion="1", challenger="2"))
    assert health.problems == []
    assert "| Canary | version 2 gets 10%: keep, not checked yet; 0 requests to it, 0 to version 1 |" in health.markdown


@pytest.mark.parametrize("looked", [NOW - 600, 0.0])
def test_a_canary_that_nobody_watches_is_a_problem(look: Callable[..., ServingHealth], folder: Path, looked: float):
    canary(folder, looked=looked)
    (problem,) = look(Registry(champion="1", challenger="2")).problems
    assert problem.startswith("the canary of version 2 was last checked 1")
    assert "qinglan canary stop" in problem


def test_a_challenger_without_requests_is_a_note(look: Callable[..., ServingHealth], folder: Path):
    canary(folder, looked=NOW)
    assert look(Registry(champion="1", challenger="3")).notes == [
        "version 3 is the challenger, but gets no requests yet"
    ]


def test_a_verdict_that_is_being_acted_upon_is_a_note(look: Callable[..., ServingHealth], folder: Path):
    canary(folder, looked=NOW)
    judgement = Judgement(outcome="roll_back", reason="slower")
    verdict = CanaryVerdict(challenger="2", champion="1", judgement=judgement, at=NOW, requests=9)
    (folder / VERDICT_FILE).write_text(verdict.model_dump_json())
    assert look(Registry(champion="1", challenger="2")).notes == ["the canary has ended: roll_back, slower"]


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")])
def test_the_address_is_the_profiles(profile_of: ProfileOf, host: str, url: str):
    serving = {"host": host, "port": 8123, "api_key_env": "KEY"}
    assert url_of(profile_of(serve=serving)) == f"http://{url}:8123"
