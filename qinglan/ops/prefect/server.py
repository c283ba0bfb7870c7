"""The Prefect server that this site uses, asked over HTTP, so that nothing here needs Prefect.

In order: the address in Prefect's settings, which are variables, `.env`, `prefect.toml`,
`pyproject.toml` and Prefect's profile; then that of `qinglan up` where it runs.
"""

import json
import os
import re
import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2

from qinglan.config import uses_proxy
from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import RetryingClient
from qinglan.runs.launcher import output_of
from qinglan.runs.locks import is_held

SERVER_FILE = "prefect_api_url"
"""Under the state directory while `qinglan up`'s server runs; it stays behind after kill -9."""
LOCK_FILE = "up.lock"
"""Under the state directory, locked while `qinglan up` or any of its processes runs."""
_PRINT_SETTINGS = """
import json, sys, warnings
warnings.filterwarnings("error", "Failed to load profiles")
try:
    from prefect.settings import get_current_settings
    api = get_current_settings().api
except Exception as error:
    sys.exit(" ".join(str(error).split()))
secrets = [secret and secret.get_secret_value() for secret in (api.key, api.auth_string)]
print(json.dumps([api.url, *secrets]))
"""


@dataclass(frozen=True)
class PrefectServer:
    """A server's API, and what it wants to be shown."""

    api_url: str
    """Ends in `/api`, or names a workspace of Prefect Cloud; without a login."""
    origin: str
    """The place where the address was found, for messages."""
    key: str | None = field(default=None, repr=False)
    auth_string: str | None = field(default=None, repr=False)
    is_of_up: bool = False
    """True where `qinglan up` runs it; else it is the user's own."""

    def is_at(self, url: str | None) -> bool:
        """Compare its address with another; `localhost` and 127.0.0.1 are the same."""
        return _comparable(self.api_url) == _comparable(url or "")

    def client(self, *, timeout_s: float = 30.0) -> RetryingClient:
        """A client for requests below the API's address."""
        user, _, password = (self.auth_string or "").partition(":")
        return RetryingClient(
            base_url=self.api_url,
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            auth=(user, password) if self.auth_string else None,
            timeout=timeout_s,
            trust_env=uses_proxy(self.api_url),
        )


def _comparable(url: str) -> str:
    return url.rstrip("/").replace("//localhost:", "//127.0.0.1:")


def find_server(state: Path) -> PrefectServer | None:
    """The server that flows of this site talk to.

    None where none is configured or announced in `paths.state`. Raises ConfigError where the
    configured address is none.
    """
    url, key, auth_string = configured()
    if url:
        origin = "PREFECT_API_URL" if os.environ.get("PREFECT_API_URL") else "Prefect's settings"
        _require_address(url, origin)
        login_in_url = unquote(urlsplit(url).netloc.rpartition("@")[0])
        login = auth_string or login_in_url or None
        return PrefectServer(without_login(url).rstrip("/"), origin, key, login)
    announced = announced_url(state)
    if not announced:
        return None
    return PrefectServer(announced, "qinglan up", auth_string=auth_string, is_of_up=True)


def configured() -> tuple[str | None, str | None, str | None]:
    """The API's address, key and login that the environment or Prefect's files name."""
    variables = {
        name: value.strip()
        for name, value in os.environ.items()
        if name.startswith("PREFECT_") and value.strip()
    }
    if _has_settings_file():
        return _ask_prefect(Path.cwd(), tuple(sorted(variables.items())))
    return (
        variables.get("PREFECT_API_URL"),
        variables.get("PREFECT_API_KEY"),
        variables.get("PREFECT_API_AUTH_STRING"),
    )


def server_at(api_url: str, state: Path) -> PrefectServer:
    """The server that a run noted as where it runs.

    It gets a login only where it is the server that this site uses.
    """
    own_server = find_server(state)
    if own_server and own_server.is_at(api_url):
        return own_server
    return PrefectServer(api_url, "the run itself")


def _require_address(url: str, origin: str) -> None:
    """Raise `ConfigError` where nothing can be asked; Prefect itself takes any text."""
    if _is_address(url):
        return
    # A login in it may be what is wrong with it.
    url_without_login = re.sub(r"(?s)^(\w+://)?.*@", r"\1", url)
    hint = "write it like PREFECT_API_URL=http://127.0.0.1:4200/api"
    raise ConfigError(f"{origin}: {url_without_login!r} is no http(s) URL; {hint}")


def _is_address(url: str) -> bool:
    try:
        # Each parser refuses what the other takes.
        parts = urlsplit(url)
        httpx2.URL(url)
        host = (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and parts.port != 0 and bool(host)
    except (ValueError, httpx2.InvalidURL):
        return False


def without_login(address: str) -> str:
    """A URL without its user and password."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def announced_url(state: Path) -> str | None:
    """The API of the `qinglan up` that runs on this state folder; None where none does."""
    try:
        announced = (state / SERVER_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    lock = state / LOCK_FILE
    if is_held(lock):
        return announced
    # Without a lock there, another machine that shares the folder announced it.
    return None if lock.exists() else announced


def prefect_home() -> Path | None:
    """The folder that PREFECT_HOME names, expanded as Prefect does it; None where it names none."""
    home = os.environ.get("PREFECT_HOME")
    return Path(home).expanduser() if home else None


def _has_settings_file() -> bool:
    """Tell whether a file sets Prefect up: only then it is asked, which takes over a second."""
    home = prefect_home() or Path("~/.prefect")
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    if any(file.is_file() for file in (Path("prefect.toml"), Path(".env"), profiles)):
        return True
    project = Path("pyproject.toml")
    try:
        if not project.exists():
            return False
        content = tomllib.loads(project.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Prefect says what is wrong with it.
        return True
    return "prefect" in content.get("tool", {})


@cache
def _ask_prefect(
    folder: Path, variables: tuple[tuple[str, str], ...]
) -> tuple[str | None, str | None, str | None]:
    """The address, key and login that Prefect would use here.

    Asked in a process of its own: Prefect reads its settings when it is imported, and the address
    may be set later.
    """
    argv = [sys.executable, "-P", "-c", _PRINT_SETTINGS]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env.update(variables)
    printed = output_of(argv, "Prefect's settings", "prefect config view", cwd=folder, env=env)
    url, key, auth_string = json.loads(printed.splitlines()[-1])
    return url, key, auth_string
