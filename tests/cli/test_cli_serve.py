"""`qinglan serve` and `qinglan canary` as a user types them, with a registry in memory."""

from pathlib import Path
from typing import Any

import pytest
from fake_registry import FakeRegistry
from fixture_types import Qinglan

from qinglan.config import Profile, load_profile
from qinglan.errors import ConfigError, EngineError
from qinglan.registry import Released
from qinglan.rows import Row
from qinglan.runs.schema_version import read_record
from qinglan.serving.canary import Judgement
from qinglan.serving.canary_observer import STATE_FILE, VERDICT_FILE, CanaryState, CanaryVerdict
from qinglan.serving.checks import _ask, run_smoke_test
from qinglan.serving.site import HISTORY_FILE, serving_folder, share_of


class Registry(FakeRegistry):
    """Remembers what was asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, champion="1")
        self.calls = list[tuple[str, ...]]()
        self.refuses = False

    def challenge(self, version: str, *, force_reason: str = "") -> Released:
        if self.refuses:
            raise ConfigError("the gate said reject")
        self.calls.append(("challenge", version, force_reason))
        return self.version(version)

    def withdraw_challenger(self, reason: str, version: str | None = None) -> Released | None:
        self.calls.append(("withdraw", reason))
        return self.version("2") if "challenger" in self.named else None


class Terminal:
    """The command line, and what it works on."""

    def __init__(self, qinglan: Qinglan, profile: Profile, registry: Registry) -> None:
        self._qinglan = qinglan
        self.profile = profile
        self.registry = registry
        self.folder = serving_folder(profile)
        self.folder.mkdir(parents=True)

    def __call__(self, *words: str) -> str:
        status, out, err = self._qinglan(*words, profile=self.profile)
        assert status == (2 if err else 0)
        return " ".join((out + err).split())


@pytest.fixture
def terminal(
    qinglan: Qinglan, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Terminal:
    registry = Registry(tmp_path)
    monkeypatch.setattr("qinglan.registry.registry_of", lambda _: registry)
    return Terminal(qinglan, profile, registry)


def verdict(outcome: Any) -> CanaryVerdict:
    judgement = Judgement(outcome=outcome, reason="so it is")
    return CanaryVerdict(challenger="2", champion="1", judgement=judgement, at=1.0, requests=1234)


def test_a_canary_starts_with_the_profiles_share_or_its_own(terminal: Terminal):
    assert "m 2: challenger, 10% of the requests" in terminal("canary", "start", "2")
    assert "25% of the requests" in terminal("canary", "start", "2", "--share", "0.25")
    assert share_of(terminal.profile, terminal.folder, "2") == 0.25
    terminal("canary", "start", "2", "--force", "--reason", "urgent")
    assert terminal.registry.calls[-1] == ("challenge", "2", "urgent")


@pytest.mark.parametrize(
    ("aliases", "started", "calls"),
    [
        ({}, "2", [("challenge", "2", "")]),
        (
            {"challenger": "2"},
            "5",
            [("withdraw", "canary roll_back: so it is"), ("challenge", "5", "")],
        ),
        (
            {"challenger": "2"},
            "2",
            [("withdraw", "canary roll_back: so it is"), ("challenge", "2", "")],
        ),
    ],
)
def test_a_new_canary_acts_upon_the_verdict_on_the_last_one_and_files_it(
    terminal: Terminal, aliases: dict[str, str], started: str, calls: list[tuple[str, ...]]
):
    terminal.registry.named |= aliases
    for name in (VERDICT_FILE, STATE_FILE):
        (terminal.folder / name).write_text(verdict("roll_back").model_dump_json())
    terminal("canary", "start", started)
    assert not (terminal.folder / VERDICT_FILE).exists()
    assert not (terminal.folder / STATE_FILE).exists()
    assert read_record(CanaryVerdict, terminal.folder / HISTORY_FILE) == verdict("roll_back")
    assert terminal.registry.calls == calls


def test_a_refused_canary_changes_nothing(terminal: Terminal):
    terminal.registry.refuses = True
    state_file = terminal.folder / STATE_FILE
    state_file.write_text("as it was")
    assert terminal("canary", "start", "2", "--share", "0.9") == "error: the gate said reject"
    assert state_file.read_text() == "as it was"
    assert share_of(terminal.profile, terminal.folder, "2") == 0.1


def test_status_shows_both_models(terminal: Terminal):
    terminal.registry.named["challenger"] = "2"
    state = CanaryState(champion="1", challenger="2", share=0.1, started=1.0, failed=3, left_out=4)
    state.counts.champion.add("row", fallback=False, latency_ms=100)
    state.counts.challenger.add("row", fallback=True, latency_ms=800)
    state.counts.retrieval.add(0.25)
    (terminal.folder / STATE_FILE).write_text(state.model_dump_json())
    said = terminal("canary", "status")
    champion = "champion 1: 1 requests, 0.0% of its questions fell back, p95 100 ms"
    assert f"version 2 gets 10%: keep {champion}" in said
    assert "challenger 2: 1 requests, 100.0% of its questions fell back" in said
    assert "retrieval: +0.250 [−1.000, 1.000] over 1 pairs; 3 without a result, 4 left out" in said


def test_status_and_stop_without_a_running_canary(terminal: Terminal):
    assert terminal("canary", "status") == terminal("canary", "stop") == "no canary"
    (terminal.folder / HISTORY_FILE).write_text(verdict("better").model_dump_json() + "\n")
    ended = "no canary; the last one: version 2 against 1, 1,234 requests: better, so it is"
    assert terminal("canary", "status") == ended
    terminal.registry.named["challenger"] = "2"
    assert "gets no requests yet: is `qinglan serve` running?" in terminal("canary", "status")
    assert terminal("canary", "stop", "--reason", "enough") == "m 2: no longer the challenger"
    assert terminal.registry.calls[-1] == ("withdraw", "enough")


def test_a_check_ends_well_where_nothing_is_released(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("qinglan.serving.checks.run_smoke_test", lambda *_: "asked")
    assert terminal("serve", "--check", "--if-released") == terminal("serve", "--check") == "asked"
    del terminal.registry.named["champion"]
    assert (
        terminal("serve", "--check", "--if-released")
        == "No model is released, so none is asked a question."
    )
    assert terminal("serve", "--if-released") == "error: --if-released goes with --check"


def test_a_check_leaves_request_log_and_canary_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = list[Any]()

    def open_site(profile: Any, folder: Path, *_: object, watched: bool, **__: object) -> None:
        opened.append((profile.serve.request_log.folder, folder.parent, watched))
        raise ConfigError("enough")

    monkeypatch.setattr("qinglan.serving.checks.open_site", open_site)
    overrides = [
        f"paths.state={tmp_path}",
        f"serve.request_log.folder={tmp_path}",
        "serve.request_log.consent=all",
    ]
    with pytest.raises(ConfigError, match="enough"):
        run_smoke_test("embedded", overrides, None, print)
    folder_of_site = serving_folder(load_profile("embedded", overrides))
    assert opened == [(None, folder_of_site, False)]


CAPITALS = str(Path(__file__).parents[1] / "support" / "capitals_recipe.py")


def test_a_recipe_with_inputs_is_checked_with_a_row_of_the_sample(tmp_path: Path):
    overrides = [f"recipe={CAPITALS}", f"paths.state={tmp_path}"]
    with pytest.raises(
        ConfigError,
        match="recipe `capitals_recipe` needs hint beside the question; leave --question",
    ):
        run_smoke_test("embedded", overrides, "法国", print)
    with pytest.raises(ConfigError, match="recipe capitals_recipe has no simulated domain"):
        run_smoke_test("embedded", overrides, None, print)


@pytest.mark.parametrize(
    ("status", "headers", "why"),
    [
        (503, {"x-qinglan-source": "none", "x-qinglan-reason": "model_timeout"}, "model_timeout"),
        (400, {}, "HTTP 400"),
    ],
)
def test_a_check_without_an_answer_says_why(
    serve: Any, status: int, headers: dict[str, str], why: str
):
    router = serve(lambda _: (status, {"error": {}}, headers))
    row = Row(
        id="1", tenant="t", query="法国", inputs={"hint": "塞纳河", "capital": "巴黎"}, source="s"
    )
    with pytest.raises(EngineError, match=f"gave no usable answer to '法国': {why}"):
        _ask(load_profile("embedded", [f"recipe={CAPITALS}"]), router.url.removesuffix("/v1"), row)
    assert router.bodies[0]["inputs"] == {"hint": "塞纳河"}, "no label leaves the house"
