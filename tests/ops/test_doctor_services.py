"""Doctor's checks of proxies, keys, Prefect and MLflow, and its one paid call to a service."""

import sys
from typing import Any

import pytest
from fake_service import FakeService, completion
from fixture_types import ProfileOf, Serve
from packaging.version import Version

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.config.site import LedgerStore
from qinglan.ops.checks import Check
from qinglan.ops.doctor import services
from qinglan.ops.doctor.paid_answers import check_answer
from qinglan.ops.doctor.proxies import check_proxies

pytestmark = pytest.mark.usefixtures("no_settings")
RAG = {
    "rag": "http://rag.internal:7861/q",
    "teacher": "https://api.example/v1",
    "prefect": "http://127.0.0.1:4200/api",
}


def test_what_goes_through_a_proxy_is_said_and_loopback_must_not(monkeypatch: pytest.MonkeyPatch):
    assert check_proxies(RAG).detail == "none"
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    check = check_proxies(RAG)
    assert (check.problem, check.detail) == (None, "https proxy:3128")
    assert (
        check.note
        == "asked through it: teacher (api.example); hosts of your own network belong into NO_PROXY"
    )
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@proxy:3128/")
    monkeypatch.setenv("NO_PROXY", ".internal")
    problem = check_proxies(RAG).problem or ""
    assert problem.startswith(
        "NO_PROXY: lacks 127.0.0.1 and localhost, so Prefect's and MLflow's clients"
    )
    assert problem.endswith("export NO_PROXY=.internal,127.0.0.1,localhost")
    monkeypatch.setenv("NO_PROXY", ".internal,127.0.0.1,localhost")
    assert (check_proxies(RAG).problem, check_proxies(RAG).note) == (None, None)
    assert "secret" not in repr(check_proxies(RAG))


@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ("http://proxy:none", "HTTPS_PROXY: Invalid port"),
        ("ftp://proxy:21", "HTTPS_PROXY: Unknown scheme"),
        (
            "socks5://proxy:1080",
            "HTTPS_PROXY: Using SOCKS proxy, but the 'socksio' package is not installed",
        ),
    ],
)
def test_a_proxy_that_no_client_can_use(monkeypatch: pytest.MonkeyPatch, proxy: str, message: str):
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    problem = check_proxies(RAG).problem or ""
    assert problem.startswith(message)
    assert problem.endswith("write http://host:port, or unset it")


def test_keys_by_the_setting_that_names_them(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    chat = {"model": "big", "base_url": "http://x/v1"}
    profile = profile_of(
        teacher=chat | {"api_key_env": "A_KEY"},
        judge=chat | {"api_key_env": "B_KEY"},
        rag={"url": "http://x", "api_key_env": "RAG_KEY"},
        ledger={"url_env": "A_LEDGER"},
    )
    monkeypatch.setenv("A_KEY", "sk-secret")
    check = services.check_keys(profile, "pipeline")
    assert check.detail == "A_KEY set"
    missing_keys = "B_KEY (judge.api_key_env), RAG_KEY (rag.api_key_env), A_LEDGER (ledger.url_env)"
    assert (check.problem or "").startswith(f"keys: not set: {missing_keys}; export them")
    assert "A_KEY" in services.needed_keys(profile, "train"), (
        "the teacher is asked the red team's cases"
    )
    alone = profile.model_copy(
        update={"gate": profile.gate.model_copy(update={"rivals": ("sft",)})}
    )
    assert "A_KEY" not in services.needed_keys(alone, "train")
    assert "RAG_KEY" not in services.needed_keys(profile, "release"), (
        "it only reads what was evaluated"
    )
    assert services.check_keys(profile_of(), "pipeline").detail == "none needed"


def test_the_webhooks_variable_is_a_note_and_where_it_is_deployed_a_problem(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    profile = profile_of(notify={"webhook_url_env": "A_WEBHOOK"})
    monkeypatch.delenv("A_WEBHOOK", raising=False)
    lacking = (
        "notify.webhook_url_env needs the environment variable A_WEBHOOK; set it and run again"
    )
    run = services.check_keys(profile, "refresh", deploys=False)
    assert run.problem is None
    assert run.note == f"`qinglan up` and `qinglan deploy` will refuse: {lacking}"
    deployed = services.check_keys(profile, "refresh", deploys=True)
    assert (deployed.problem, deployed.note) == (lacking, None)
    monkeypatch.setenv("A_WEBHOOK", "hooks.example/T0/secret-part")
    wrong = services.check_keys(profile, "refresh", deploys=True)
    assert "the value of A_WEBHOOK is no http(s) address" in (wrong.problem or "")
    assert "secret-part" not in repr(wrong)
    monkeypatch.setenv("A_WEBHOOK", "https://hooks.example/T0/secret-part")
    assert services.check_keys(profile, "refresh", deploys=True).detail == "A_WEBHOOK set"


@pytest.mark.parametrize(
    ("name", "reply", "message"),
    [
        ("prefect", (200, "3.8.1"), None),
        (
            "prefect",
            (200, "2.20.1"),
            "the server is 2.20.1, the client here 3.8.8; bring both to one version: `pip i",
        ),
        ("prefect", (401, {}), "refuses us (HTTP 401); set PREFECT_API_AUTH_STRING"),
        ("prefect", (200, b"<html>"), "names no version; is the address that of a prefect server?"),
        ("mlflow", (200, b"3.8.0"), None),
        ("mlflow", (403, {}), "refuses us (HTTP 403); set MLFLOW_TRACKING_USERNAME and"),
        ("mlflow", (500, {}), "answers HTTP 500; is the address that of a mlflow server?"),
    ],
)
def test_a_server(
    profile_of: ProfileOf,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    reply: Any,
    message: str | None,
):
    monkeypatch.setattr(services, "installed", lambda _: Version("3.8.8"))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    service = serve(lambda _: reply)
    monkeypatch.setenv("PREFECT_API_URL", service.url)
    check = getattr(services, f"check_{name}")(profile_of(tracking={"uri": service.url}))
    if message is None:
        assert check.problem is None
    else:
        assert message in (check.problem or "")
    authorization = "Bearer t0ken" if name == "mlflow" else None
    assert service.headers[0].get("authorization") == authorization


def test_no_server_is_configured_or_none_can_be_reached(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    assert "`qinglan run` starts one" in services.check_prefect(profile_of()).detail
    assert services.check_mlflow(profile_of()).detail.startswith(
        "no server configured: runs are kept in sqlite:///"
    )
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    profile = profile_of(tracking={"uri": "http://127.0.0.1:9"})
    prefect = services.check_prefect(profile).problem or ""
    mlflow = services.check_mlflow(profile).problem or ""
    assert prefect.startswith(
        "prefect http://127.0.0.1:9/api (PREFECT_API_URL): can't be reached: "
    )
    assert mlflow.startswith("tracking.uri: http://127.0.0.1:9 can't be reached: ")


def asked(
    profile_of: ProfileOf, service: FakeService, role: str = "teacher", **settings: Any
) -> tuple[Profile, Check]:
    endpoint = {"model": "big", "base_url": service.url} | settings
    profile = profile_of(**{role: endpoint})
    return profile, check_answer(profile, role, getattr(profile, role))


def test_an_answer_says_what_it_cost_and_the_ledger_knows(profile_of: ProfileOf, serve: Serve):
    service = serve(lambda _: (200, completion("ready")))
    profile, check = asked(profile_of, service)
    assert (check.problem, check.detail[-12:]) == (None, " for $0.0002")
    asked(profile_of, service)
    with site_ledger(profile) as ledger:
        (spent,) = ledger.spending("role")
        assert (spent.key, spent.calls) == ("teacher-probe", 2)
        assert ledger.mean_tokens("big", "teacher") is None


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            (200, completion("")),
            "teacher: empty answer; raise teacher.max_tokens, as thoughts count too, or name ",
        ),
        (
            (200, completion(None, refusal="no")),
            'teacher: refused: "no"; name another model (the probe cost $0.0002)',
        ),
        (
            (200, completion("rea", "length")),
            "teacher: truncated at max_tokens; raise teacher.max_tokens (the probe",
        ),
        (
            (200, {"object": "error"}),
            "teacher: the answer is no chat completion; ask it by hand with the same",
        ),
        (
            (404, {"error": {"message": "no"}}),
            "teacher: the service knows no model 'big'; set teacher.model (the",
        ),
        (
            (400, {"error": {"message": "temperature"}}),
            "teacher: HTTP 400: request refused: Error code: 400",
        ),
        (
            (429, {"error": {"message": "slow down"}}),
            "teacher: HTTP 429: Error code: 429 - slow down",
        ),
        (None, "teacher: "),
    ],
)
def test_whatever_is_no_answer_is_a_problem(
    profile_of: ProfileOf, serve: Serve, reply: Any, message: str
):
    service = serve(lambda _: reply)
    assert (asked(profile_of, service)[1].problem or "").startswith(message)
    asked_again = 1 if "empty answer" in message else 0  # a blank may be an accident
    assert len(service.bodies) == 1 + asked_again


def test_parameters_are_those_of_a_run_and_a_judge_that_ignores_the_format_is_told(
    profile_of: ProfileOf, serve: Serve
):
    service = serve(lambda _: (200, completion('{"ready": true}')))
    settings = {
        "structured_output": "json_schema",
        "max_tokens": 99,
        "extra_body": {"thinking": "off"},
    }
    assert asked(profile_of, service, "judge", **settings)[1].problem is None
    (body,) = service.bodies
    assert body["response_format"]["type"] == "json_schema"
    assert body["max_tokens"] == 99
    assert body["thinking"] == "off"
    service = serve(lambda _: (200, completion("I am ready")))
    problem = asked(profile_of, service, "judge", structured_output="json_object")[1].problem or ""
    assert problem.startswith(
        "judge: asked for JSON, it answers 'I am ready'; set judge.structured_output: off"
    )
    assert asked(profile_of, service, "judge")[1].problem is None  # no format was asked for


def test_what_budget_or_ledger_forbid_is_not_asked(profile_of: ProfileOf, serve: Serve):
    service = serve(lambda _: (200, completion("ready")))
    profile = profile_of(
        teacher={"model": "big", "base_url": service.url}, budget={"per_month_usd": 0.0001}
    )
    assert check_answer(profile, "teacher", profile.teacher).problem is None
    assert "nothing is left to spend" in (
        check_answer(profile, "teacher", profile.teacher).problem or ""
    )
    closed = profile.model_copy(update={"ledger": LedgerStore(url_env="A_LEDGER")})
    assert "needs the environment variable A_LEDGER" in (
        check_answer(closed, "teacher", closed.teacher).problem or ""
    )
    assert len(service.bodies) == 1
