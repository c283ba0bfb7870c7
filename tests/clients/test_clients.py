"""The clients of a process: ledger keys of the simulators, and closing."""

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest
from fake_service import PRICE
from fixture_types import ProfileOf

from qinglan.clients import roles
from qinglan.clients.roles import SIMULATED_ANSWERS, Addresses, key_salt, open_clients
from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.runs.run import Run

NOWHERE = "http://127.0.0.1:9/v1"
SERVICES = partial(Addresses, NOWHERE, NOWHERE, NOWHERE, answerer_url=NOWHERE)


def run_of(profile: Profile, directory: Path) -> Run:
    return Run(id="r", flow="refresh", profile=profile, directory=directory)


def test_salt_names_the_service_or_the_simulator(profile_of: ProfileOf):
    judge = {
        "judge": {"model": "simulated-judge"},
        "prices": dict.fromkeys(("big", "simulated-judge"), PRICE),
    }
    profile = profile_of(teacher={"model": "big", "base_url": "http://live/v1/"}, **judge)
    assert key_salt(profile, "teacher") == "http://live/v1"
    assert key_salt(profile, "judge").startswith(SIMULATED_ANSWERS)
    seeded = profile_of(embedded={"sample_seed": 2}, **judge)
    assert key_salt(seeded, "judge") != key_salt(profile, "judge")


async def test_a_ledger_that_opens_slowly_holds_up_nobody_else(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = roles.Ledger
    monkeypatch.setattr(roles, "Ledger", lambda url: time.sleep(0.5) or opened(url))
    async with asyncio.TaskGroup() as group:
        opening = group.create_task(
            open_clients(run_of(profile_of(), tmp_path), SERVICES, ()).__aenter__()
        )
        await asyncio.sleep(0.05)
        assert not opening.done()


async def test_clients_open_and_close_and_only_the_roles_asked_for_need_a_key(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    live = {"model": "big", "base_url": NOWHERE, "api_key_env": "NO_SUCH_KEY"}
    run = run_of(profile_of(teacher=live), tmp_path)
    async with open_clients(run, SERVICES, ("judge", "rag")) as clients:
        assert clients.call_counts() == {"judge": {"cached": 0}, "rag": {"calls": 0, "failed": 0}}
        with pytest.raises(LookupError, match="no teacher client; name the role in open_clients"):
            _ = clients.teacher
        assert (run.profile.paths.state / "ledger.db").is_file()
    assert clients.rag._client.is_closed
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        async with open_clients(run, SERVICES, ("teacher",)):
            pass


async def test_an_answerer_is_a_role_of_its_own(profile_of: ProfileOf, tmp_path: Path):
    run = run_of(profile_of(answerer={"model": "small", "base_url": "http://weak/v1"}), tmp_path)
    assert key_salt(run.profile, "answerer") == "http://weak/v1"
    async with open_clients(run, SERVICES, ("answerer",)) as clients:
        assert clients.call_counts() == {"answerer": {"cached": 0}}
    with pytest.raises(ConfigError, match="answerer: recipe `query_rewrite` asks a weak model"):
        async with open_clients(run_of(profile_of(), tmp_path), SERVICES, ("answerer",)):
            pass
