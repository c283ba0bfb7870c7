"""What doctor finds about proxies, clocks, keys, Prefect and MLflow."""

import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fake_service import FakeService, Script
from packaging.version import Version

from qinglan.config import Profile
from qinglan.ops.doctor import network, services
from qinglan.ops.doctor.network import check_clock, check_proxies

ProfileOf = Callable[..., Profile]
Serve = Callable[[Script], FakeService]
Clocks = Callable[[float], str]
RAG = {"rag": "http://rag.internal:7861/q", "teacher": "https://api.example/v1", "prefect": "http://127.0.0.1:4200/api"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of this machine's own environment."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "prefect_api_url", "prefect_profile"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server_whose_clock_is() -> Iterator[Clocks]:
    """Servers that are so many seconds ahead."""
    started = []

    def start(seconds: float) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.send_response(404)
                self.end_headers()

            def date_time_string(self, timestamp: float | None = None) -> str:
                return formatdate(time.time() + seconds, usegmt=True)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


def test_clocks_that_agree(server_whose_clock_is: Clocks):
    check = check_clock({"teacher": server_whose_clock_is(0), "rag": "http://127.0.0.1:9/q"})
    assert (check.problem, check.note, check.detail[:9]) == (None, None, "0 s from ")
    assert check_clock({"rag": "http://127.0.0.1:9/q"}).detail == "no service to compare it with"


def test_a_clock_that_is_wrong(server_whose_clock_is: Clocks):
    late = server_whose_clock_is(-3600)
    check = check_clock({"a": late, "prefect": late.replace("http://", "http://me:secret@")})
    assert "s ahead of 127.0.0.1:" in (check.problem or "")
    assert "set this machine's (timedatectl set-ntp true)" in (check.problem or "")
    assert "secret" not in repr(check)
    problem = check_clock({"a": server_whose_clock_is(3600), "b": server_whose_clock_is(0)}).problem or ""
    assert " s behind 127.0.0.1:" in problem
    assert "set that service's, as the others agree with this machine" in problem
    check = check_clock({"a": server_whose_clock_is(20)})
    assert (check.problem, check.note) == (None, "set the clock by NTP (timedatectl set-ntp true)")


def test_no_proxy(monkeypatch: pytest.MonkeyPatch):
    assert check_proxies(RAG).detail == "none"
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    check = check_proxies(RAG)
    assert (check.problem, check.detail) == (None, "https proxy:3128")
    assert check.note == "asked through it: teacher (api.example); hosts of your own network belong into NO_PROXY"


def test_loopback_must_not_go_through_the_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@proxy:3128/")
    monkeypatch.setenv("NO_PROXY", ".internal")
    problem = check_proxies(RAG).problem or ""
    assert problem.startswith("NO_PROXY: lacks 127.0.0.1 and localhost, so Prefect's and MLflow's clients")
    assert problem.endswith("export NO_PROXY=.internal,127.0.0.1,localhost")
    monkeypatch.setenv("NO_PROXY", ".internal,127.0.0.1,localhost")
    assert (check_proxies(RAG).problem, check_proxies(RAG).note) == (None, None)
    assert "secret" not in repr(check_proxies(RAG))


@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ("http://proxy:none", "HTTPS_PROXY: is no address; write http://host:port, or unset it"),
        ("ftp://proxy:21", "HTTPS_PROXY: a proxy of the kind ftp:// can't be used; name an HTTP proxy"),
        ("socks5://proxy:1080", "HTTPS_PROXY: a SOCKS proxy needs the package socksio"),
    ],
)
def test_a_proxy_that_no_client_can_use(monkeypatch: pytest.MonkeyPatch, proxy: str, message: str):
    monkeypatch.setattr(network, "find_spec", lambda _: None)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    assert (check_proxies(RAG).problem or "").startswith(message)


def test_keys_by_the_setting_that_names_them(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch):
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
    assert (check.problem or "").startswith(
        "keys: not set: B_KEY (judge.api_key_env), RAG_KEY (rag.api_key_env), A_LEDGER (ledger.url_env); export them"
    )
    assert "A_KEY" not in services.needed_keys(profile, "train")
    assert services.check_keys(profile_of(), "pipeline").detail == "none needed"


def test_the_webhooks_variable_is_a_note_and_where_it_is_deployed_a_problem(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    profile = profile_of(notify={"webhook_url_env": "A_WEBHOOK"})
    monkeypatch.delenv("A_WEBHOOK", raising=False)
    lacking = "notify.webhook_url_env needs the environment variable A_WEBHOOK; set it and run again"
    noted, refused = (services.check_keys(profile, "refresh", deploys=deploys) for deploys in (False, True))
    assert (noted.problem, noted.note) == (None, f"`qinglan up` and `qinglan deploy` will refuse: {lacking}")
    assert (refused.problem, refused.note) == (lacking, None)
    monkeypatch.setenv("A_WEBHOOK", "hooks.example/T0/secret-part")
    wrong = services.check_keys(profile, "refresh", deploys=True)
    assert "the value of A_WEBHOOK is no http(s) address" in (wrong.problem or "")
    assert "secret-part" not in repr(wrong)
    monkeypatch.setenv("A_WEBHOOK", "https://hooks.example/T0/secret-part")
    assert services.check_keys(profile, "refresh", deploys=True).detail == "A_WEBHOOK set"


COMPARED = [
    ("prefect", (200, "3.8.1"), None),
    ("prefect", (200, "2.20.1"), "the server is 2.20.1, the client here 3.8.8; bring both to one version: `pip inst"),
    ("prefect", (401, {}), "refuses us (HTTP 401); set PREFECT_API_AUTH_STRING"),
    ("prefect", (200, b"<html>"), "names no version; is the address that of a prefect server?"),
    ("mlflow", (200, b"3.8.0"), None),
    ("mlflow", (403, {}), "refuses us (HTTP 403); set MLFLOW_TRACKING_USERNAME and"),
    ("mlflow", (500, {}), "answers HTTP 500; is the address that of a mlflow server?"),
]


@pytest.mark.parametrize(("name", "reply", "message"), COMPARED)
def test_a_server(
    profile_of: ProfileOf, serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str, reply: Any, message: str | None
):
    monkeypatch.setattr(services, "installed", lambda _: Version("3.8.8"))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0ken")
    service = serve(lambda _: reply)
    monkeypatch.setenv("PREFECT_API_URL", service.url)
    check = getattr(services, f"check_{name}")(profile_of(tracking={"uri": service.url}))
    assert (message in (check.problem or "")) if message else check.problem is None
    assert service.headers[0].get("authorization") == ("Bearer t0ken" if name == "mlflow" else None)


def test_prefects_login_is_not_shown(profile_of: ProfileOf, serve: Serve, monkeypatch: pytest.MonkeyPatch):
    for address in (serve(lambda _: (401, {})).url, "http://127.0.0.1:9/api"):
        monkeypatch.setenv("PREFECT_API_URL", address.replace("http://", "http://me:secret@"))
        assert "secret" not in repr(services.check_prefect(profile_of()))
        assert "secret" not in repr(network.addresses(profile_of(), "refresh"))


def test_no_server_is_configured_or_none_can_be_reached(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch):
    assert "`qinglan run` starts one" in services.check_prefect(profile_of()).detail
    assert services.check_mlflow(profile_of()).detail.startswith("no server configured: runs are kept in sqlite:///")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    profile = profile_of(tracking={"uri": "http://127.0.0.1:9"})
    prefect, mlflow = services.check_prefect(profile).problem or "", services.check_mlflow(profile).problem or ""
    assert prefect.startswith("prefect http://127.0.0.1:9/api (PREFECT_API_URL): can't be reached: ")
    assert mlflow.startswith("tracking.uri: http://127.0.0.1:9 can't be reached: ")
