"""One site per state folder, ports where people expect them, and which Prefect server a run talks
to."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import prefect.settings
import pytest
from fixture_types import ProfileOf

from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.ops.prefect.server import LOCK_FILE, SERVER_FILE, announced_url
from qinglan.ops.up import site
from qinglan.ops.up.serve import serve_site
from qinglan.ops.up.site import Site, only_one, prefect_for
from qinglan.runs.processes import HOST


def test_a_second_site_on_the_same_folder_is_told_where_the_first_is(tmp_path: Path):
    with only_one(tmp_path, print):
        (tmp_path / SERVER_FILE).write_text("http://127.0.0.1:4207/api")
        expected = (
            rf"runs here already \(process {os.getpid()}, http://127.0.0.1:4207\); use that one"
        )
        with pytest.raises(ConfigError, match=expected), only_one(tmp_path, print):
            raise AssertionError
    with only_one(tmp_path, print):
        assert (tmp_path / LOCK_FILE).read_text() == str(os.getpid())
    assert announced_url(tmp_path) is None


@pytest.mark.usefixtures("no_settings")
def test_who_runs_here_is_said_before_anything_that_a_second_site_would_lack(profile_of: ProfileOf):
    profile = profile_of(notify={"webhook_url_env": "A_WEBHOOK"})
    with (
        only_one(profile.paths.state, print),
        pytest.raises(ConfigError, match="`qinglan up` runs here already"),
    ):
        serve_site(profile, print)
    with pytest.raises(ConfigError, match="needs the environment variable A_WEBHOOK"):
        serve_site(profile, print)


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize("asked", [True, False])
def test_a_taken_port_is_one_line(profile: Profile, monkeypatch: pytest.MonkeyPatch, asked: bool):
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        if not asked:
            # A server of the user's own decides where ours may be.
            monkeypatch.setenv("PREFECT_API_URL", f"http://localhost:{port}/api")
        with pytest.raises(
            ConfigError, match=f"127.0.0.1:{port}: .*; is `qinglan up` running already"
        ):
            serve_site(profile, print, prefect_port=port if asked else None)


def test_the_processes_of_a_killed_site_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(site, "POLL_S", 0.05)
    said = list[str]()
    argv = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with only_one(tmp_path, print) as descriptor:
        left_over = subprocess.Popen(argv, pass_fds=[descriptor], stdin=subprocess.PIPE)
        # No process has this number.
        (tmp_path / LOCK_FILE).write_text("99999999")

    def say(text: str) -> None:
        said.append(text)
        assert left_over.stdin
        left_over.stdin.close()

    with only_one(tmp_path, say):
        assert left_over.wait(60) == 0
    assert said == ["waiting for the processes of an earlier `qinglan up` to end"]


@pytest.mark.parametrize(
    ("url", "asked"),
    [("http://127.0.0.1:4300/api", 4301), ("https://ann:secret@prefect.example.com/api", None)],
)
def test_a_users_own_prefect_elsewhere(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, url: str, asked: int | None
):
    monkeypatch.setenv("PREFECT_API_URL", url)
    without_login = url.replace("ann:secret@", "")
    problem = f"PREFECT_API_URL is {without_login}, so this site has a Prefect server already"
    with pytest.raises(ConfigError, match=problem):
        serve_site(profile, print, prefect_port=asked)


@pytest.mark.parametrize("unset", [{}, {"PREFECT_HOME": ""}])
def test_prefects_folder_is_this_accounts_alone_unless_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unset: dict[str, str]
):
    monkeypatch.setattr("os.environ", {"HOME": str(tmp_path)} | unset)
    monkeypatch.chdir(tmp_path)
    own_folder = tmp_path / "prefect"
    users_folder = tmp_path / "named"
    for folder in (own_folder, users_folder):
        folder.mkdir()
        folder.chmod(0o755)
    Site(tmp_path, "").prepare()
    # As an env file has it.
    monkeypatch.setenv("PREFECT_HOME", "~/named")
    Site(tmp_path, "").prepare()
    assert Site(tmp_path, "").prefect_env["PREFECT_HOME"] == str(users_folder)
    assert {folder.name for folder in tmp_path.iterdir()} == {"prefect", "named"}
    assert own_folder.stat().st_mode & 0o777 == 0o700
    assert users_folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("there", "empty", "begins_with"),
    [
        (None, b"tables", b"tables"),
        (b"flow runs", b"tables", b"flow runs"),
        (None, None, None),
    ],
    ids=["new", "there already", "no file to begin with"],
)
def test_a_new_sites_database_begins_with_the_tables(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: bytes | None,
    empty: bytes | None,
    begins_with: bytes | None,
):
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment"))
    state = tmp_path / "state"
    database = state / "prefect" / "prefect.db"
    for path, content in ((database, there), (site.empty_database(), empty)):
        if content:
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
    Site(state, "").prepare()
    assert (database.read_bytes() if database.exists() else None) == begins_with
    assert {path.name for path in database.parent.iterdir()} <= {"pages", "prefect.db"}


@pytest.mark.parametrize(
    "name", ["PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL"]
)
@pytest.mark.parametrize(
    "url", ["postgresql+asyncpg://prefect@db/prefect", "sqlite+aiosqlite:///:memory:"]
)
def test_a_site_whose_database_is_elsewhere_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, url: str
):
    monkeypatch.delenv("PREFECT_HOME", raising=False)
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment"))
    monkeypatch.setenv(name, url)
    site.empty_database().parent.mkdir(parents=True)
    site.empty_database().write_bytes(b"tables")
    Site(tmp_path, "").prepare()
    assert not (tmp_path / "prefect" / "prefect.db").exists()


def test_a_prefect_home_of_the_users_own_gets_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "named"))
    site.empty_database().parent.mkdir(parents=True)
    site.empty_database().write_bytes(b"tables")
    Site(tmp_path, "").prepare()
    assert [path.name for path in (tmp_path / "named").iterdir()] == ["pages"]


def test_servers_listen_on_loopback_report_to_nobody_and_have_settings_that_prefect_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "os.environ", os.environ | {"OTHER_TENANT_API_KEY": "sk-1", "PREFECT_API_KEY": "sk-2"}
    )
    ours = Site(tmp_path, f"sqlite:///{tmp_path}/mlflow.db")
    servers = [ours.prefect_server(), ours.mlflow_server()]
    for server in servers:
        assert {"127.0.0.1", "--host=127.0.0.1"} & {*server.argv}, server.argv
        assert server.env["OTHER_TENANT_API_KEY"] == "", server.argv
    for command in (*servers, *map(ours.worker, site.WORKERS)):
        assert command.env["DO_NOT_TRACK"] == "true", command.argv
    assert [server.env.get("PREFECT_API_KEY") for server in servers] == [None, ""]
    assert Site(tmp_path, "https://mlflow.example.com").mlflow_server() is None
    names = ours.prefect_env | site.SERVER_TUNING | site.WORKER_TUNING
    prefect_names = [name for name in names if name.startswith("PREFECT_")]
    assert [name for name in prefect_names if not hasattr(prefect.settings, name)] == []
    assert ours.worker("qinglan-up").env["PREFECT_WORKER_QUERY_SECONDS"] == "2"
    monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", "7")
    assert ours.worker("qinglan-up").env["PREFECT_WORKER_QUERY_SECONDS"] == "7"


def test_a_users_prefect_is_left_alone_and_the_sites_server_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.environ", {"PREFECT_API_URL": "http://prefect/api"})
    with prefect_for(tmp_path, print):
        assert os.environ["PREFECT_API_URL"] == "http://prefect/api"
        assert "PREFECT_HOME" not in os.environ
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.environ", {"PREFECT_HOME": str(tmp_path)})
    healthy = "http://127.0.0.1:4200/api/health"
    monkeypatch.setattr(site, "health_problem", lambda url: None if url == healthy else "no answer")
    (tmp_path / SERVER_FILE).write_text("http://127.0.0.1:4200/api")
    with only_one(tmp_path, print), prefect_for(tmp_path, print):
        assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
