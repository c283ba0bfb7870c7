"""The check of what is being served, with a router that answers as a test says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_types import ProfileOf

from qinglan.serving.canary import Judgement
from qinglan.serving.canary_observer import STATE_FILE, VERDICT_FILE, CanaryState, CanaryVerdict
from qinglan.serving.checks import ServingHealth, check_serving
from qinglan.serving.site import serving_folder

Check = Callable[..., ServingHealth]
NOW = 1_000_000.0
CANARY = {"champion": "1", "challenger": "2"}


@pytest.fixture
def check(profile_of: ProfileOf, serve: Any) -> Check:
    def check(aliases: dict[Any, str], **health: Any) -> ServingHealth:
        answer = {
            "status": "ok",
            "champion": {"version": "1"},
            "challenger": None,
            "request_log": None,
        } | health
        url = serve(lambda _: (200, answer)).url.removesuffix("/v1")
        return check_serving(profile_of(), aliases, url, clock=lambda: NOW)

    return check


@pytest.fixture
def folder(profile_of: ProfileOf) -> Path:
    serving = serving_folder(profile_of())
    serving.mkdir(parents=True)
    return serving


def write_canary(folder: Path, *, looked: float) -> None:
    state = CanaryState(champion="1", challenger="2", share=0.1, started=NOW - 900, looked=looked)
    (folder / STATE_FILE).write_text(state.model_dump_json())


def test_all_is_well_with_a_champion_that_serves_or_is_coming_up_unless_the_router_is_in_trouble(
    check: Check,
):
    health = check({"champion": "1"})
    assert health.problems == []
    assert health.notes == []
    assert health.serving == "1"
    assert "| Answers | 1 |" in health.markdown
    assert "All is as it should be." in health.markdown
    health = check({"champion": "2"})
    assert health.problems == []
    assert health.notes == ["version 1 answers until version 2 has come up"]
    degraded = check({"champion": "1"}, status="degraded")
    assert "answers without a model: version 1" in degraded.problems[0]
    without_log = check({"champion": "1"}, request_log="failing")
    assert "is the disk full?" in without_log.problems[0]


def test_a_router_that_is_down_is_a_problem_once_there_is_a_champion(
    profile_of: ProfileOf, serve: Any
):
    profile = profile_of(serve={"host": "0.0.0.0", "port": 9, "api_key_env": "KEY"})
    assert check_serving(profile, {}).problems == []
    assert check_serving(profile, {"champion": "3"}).problems == [
        "version 3 is the champion, but no router answers at http://127.0.0.1:9; "
        "start `qinglan serve --profile test`"
    ]
    ipv6 = profile_of(serve={"host": "::1", "port": 9})
    assert check_serving(ipv6, {}).url == "http://[::1]:9"
    another_service = serve(lambda _: (200, ["hello"])).url.removesuffix("/v1")
    (problem,) = check_serving(profile, {"champion": "1"}, another_service).problems
    assert "no router answers" in problem


def test_a_canary_is_shown_while_it_is_watched_and_how_it_ended(check: Check, folder: Path):
    assert check(CANARY).notes == ["version 2 is the challenger, but gets no requests yet"]
    write_canary(folder, looked=NOW - 5)
    health = check(CANARY)
    assert health.problems == []
    assert health.notes == []
    assert (
        "| Canary | version 2 gets 10%: keep, not checked yet; 0 requests to it, 0 to version 1 |"
        in health.markdown
    )
    judgement = Judgement(outcome="roll_back", reason="slower")
    verdict = CanaryVerdict(challenger="2", champion="1", judgement=judgement, at=NOW, requests=9)
    (folder / VERDICT_FILE).write_text(verdict.model_dump_json())
    assert check(CANARY).notes == ["the canary has ended: roll_back, slower"]


@pytest.mark.parametrize("looked", [NOW - 600, 0.0])
def test_a_canary_that_nobody_watches_is_a_problem(check: Check, folder: Path, looked: float):
    write_canary(folder, looked=looked)
    (problem,) = check(CANARY).problems
    assert problem.startswith("the canary of version 2 was last checked 1")
    assert "qinglan canary stop" in problem
