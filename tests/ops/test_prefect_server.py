"""The Prefect server that a site uses, and what it is shown."""

from base64 import b64encode
from pathlib import Path

import httpx2
import pytest
from fixture_types import ProfileOf, Serve

from qinglan.errors import ConfigError
from qinglan.ops.cleanup import clean_up
from qinglan.ops.doctor import services
from qinglan.ops.prefect import api as prefect_api
from qinglan.ops.prefect.api import RetryingClient
from qinglan.ops.prefect.deploy import deploy_site
from qinglan.ops.prefect.server import LOCK_FILE, SERVER_FILE, PrefectServer, find_server, server_at
from qinglan.runs.back_off import BackOff

PROFILES = """
active = "team"
[profiles.team]
PREFECT_API_URL = "https://prefect.example.com/api/"
PREFECT_API_AUTH_STRING = "ann:secret"
[profiles.other]
PREFECT_API_URL = "https://other.example.com/api"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Also the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.environ", {"PREFECT_HOME": str(tmp_path)})
    return tmp_path


def test_the_sites_own_is_found_where_nothing_else_is_set(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    (home / "pyproject.toml").write_text('[project]\ndependencies = ["prefect"]\n')
    # A file that does not set Prefect up starts no process.
    monkeypatch.delattr("subprocess.run")
    assert find_server(home) is None
    (home / SERVER_FILE).write_text("http://127.0.0.1:4200/api\n")
    assert find_server(home) == PrefectServer(
        "http://127.0.0.1:4200/api", "qinglan up", is_of_up=True
    )
    # A site that was killed leaves its lock file.
    (home / LOCK_FILE).write_text("12345")
    assert find_server(home) is None


@pytest.mark.parametrize(
    ("file", "section"), [("prefect.toml", "api"), ("pyproject.toml", "tool.prefect.api")]
)
def test_every_file_of_prefects_settings_wins_over_the_sites_own_server(
    home: Path, file: str, section: str
):
    (home / SERVER_FILE).write_text("http://127.0.0.1:4200/api")
    (home / file).write_text(
        f'[{section}]\nurl = "https://team.example.com/api"\nauth_string = "ann:secret"\n'
    )
    team = PrefectServer(
        "https://team.example.com/api", "Prefect's settings", auth_string="ann:secret"
    )
    assert find_server(home) == team


def test_a_noted_server_gets_its_own_login_alone(home: Path, monkeypatch: pytest.MonkeyPatch):
    team_url = "https://prefect.example.com/api"
    local_url = "http://127.0.0.1:4200/api"
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "bob:other")
    assert server_at(local_url, home).auth_string is None, "nothing says that it is meant for it"
    # This machine by another name.
    monkeypatch.setenv("PREFECT_API_URL", "http://localhost:4200/api")
    assert server_at(local_url, home).auth_string == "bob:other"
    monkeypatch.setenv("PREFECT_API_URL", "https://ann:secret@prefect.example.com/api")
    monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    team = PrefectServer(team_url, "PREFECT_API_URL", auth_string="ann:secret")
    assert server_at(team_url, home) == team
    monkeypatch.setenv("PREFECT_API_KEY", "k-1")
    assert server_at(local_url, home) == PrefectServer(local_url, "the run itself")


def test_a_variable_wins_setting_by_setting(home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "profiles.toml").write_text(PROFILES)
    monkeypatch.setenv("PREFECT_PROFILE", "other")
    monkeypatch.setenv("PREFECT_API_KEY", "k-1")
    assert find_server(home) == PrefectServer(
        "https://other.example.com/api", "Prefect's settings", key="k-1"
    )


def test_a_server_that_was_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefect_api, "_BACK_OFF", BackOff(0.0, 0.0))
    answers = iter([503, 429, 200, *(5 * [502])])
    with RetryingClient(
        transport=httpx2.MockTransport(lambda _: httpx2.Response(next(answers)))
    ) as client:
        assert client.get("http://127.0.0.1/api/health").status_code == 200
        assert client.get("http://127.0.0.1/api/health").status_code == 502


class Guarded:
    """A server with CSRF protection, which at first gives no tokens."""

    def __init__(self) -> None:
        self.enabled = False
        self.tokens = dict[str, str]()
        self.requests = list[str]()

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(f"{request.method} {request.url.path}")
        if request.url.path == "/api/csrf-token":
            token = f"t{len(self.requests)}"
            self.tokens[request.url.params["client"]] = token
            if not self.enabled:
                return httpx2.Response(422)
            return httpx2.Response(200, json={"token": token})
        token = request.headers.get("prefect-csrf-token")
        if token is None:
            return httpx2.Response(403, json={"detail": "Missing CSRF token."})
        if self.tokens.get(request.headers["prefect-csrf-client"]) != token:
            refusal = {"detail": "Invalid CSRF token or client identifier."}
            return httpx2.Response(403, json=refusal)
        return httpx2.Response(200, content=request.content)


def test_a_server_with_csrf_protection_gets_its_token_or_has_its_say():
    server = Guarded()
    with RetryingClient(base_url="http://x/api", transport=httpx2.MockTransport(server)) as client:
        assert client.post("flows/", json=[0]).json() == {"detail": "Missing CSRF token."}
        server.enabled = True
        server.requests.clear()
        assert client.post("flows/", json=[1]).json() == [1]
        assert client.post("flows/", json=[2]).json() == [2]
        assert server.requests == [
            "POST /api/flows/",
            "GET /api/csrf-token",
            "POST /api/flows/",
            "POST /api/flows/",
        ]
        # The server forgets them after an hour.
        server.tokens.clear()
        assert client.post("flows/", json=[3]).json() == [3]


def test_a_login_in_the_address_is_used_and_never_shown(
    home: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
):
    service = serve(lambda _: (401, {}))
    monkeypatch.setenv("PREFECT_API_URL", service.url.replace("http://", "http://ann:se%40cret@"))
    server = find_server(home)
    assert server is not None
    assert server.api_url == service.url
    with server.client() as client, pytest.raises(httpx2.HTTPStatusError) as caught:
        client.get("health").raise_for_status()
    assert "cret" not in str(caught.value) + repr(server)
    assert service.headers[0]["authorization"] == f"Basic {b64encode(b'ann:se@cret').decode()}"


MALFORMED = (
    "localhost:4200/api",
    "http://localhost:port/api",
    "http://[bad/api",
    "http://h:99999/api",
    "http:///api",
)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "address", [*MALFORMED, "http://a..b/api", "http://999.1.1.1/api", "http://me:se/cret@h/api"]
)
def test_a_malformed_address_is_one_line(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch, address: str
):
    monkeypatch.setenv("PREFECT_API_URL", address)
    profile = profile_of(retention={"flow_run_days": 1})
    with pytest.raises(ConfigError) as caught:
        deploy_site(profile, print)
    problem = str(caught.value)
    without_login = address.replace("me:se/cret@", "")
    assert problem.startswith(
        f"PREFECT_API_URL: {without_login!r} is no http(s) URL; write it like PREFECT_API_URL="
    )
    assert "prefect" not in services.addresses(profile, "pipeline")
    assert services.check_prefect(profile).problem == problem
    assert clean_up(profile, dry_run=False, say=print).notes == [problem]


@pytest.mark.parametrize("file", ["profiles.toml", "prefect.toml"])
def test_settings_that_prefect_cannot_read_are_one_line(home: Path, file: str):
    (home / file).write_text("active = ")
    with pytest.raises(ConfigError, match=rf"Prefect's settings: exits with 1: .*{file}.*; try"):
        find_server(home)
