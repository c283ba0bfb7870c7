"""Which Prefect server this site uses, and how to ask it: over HTTP, so that the core needs no
Prefect.

In order: the address in Prefect's settings, which are variables, `.env`, `prefect.toml`,
`pyproject.toml` and Prefect's profile; then that of `qinglan up` where it runs.
"""

import json
import os
import re
import sys
import tomllib
from contextlib import suppress
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
print(json.dumps([api.url, *(each and each.get_secret_value() for each in (api.key, api.auth_string))]))
"""


@dataclass(frozen=True)
class PrefectServer:
    """A server's API, and what it wants to be shown."""

    api_url: str
    """Ends in `/api`, or names a workspace of Prefect Cloud; without a login."""
    origin: str
    """Where the address was found, for messages."""
    key: str | None = field(default=None, repr=False)
    auth_string: str | None = field(default=None, repr=False)
    is_of_up: bool = False
    """Is it `qinglan up`'s? Else the user's own."""

    def is_at(self, url: str | None) -> bool:
        """Is that its address? `localhost` and 127.0.0.1 are the same."""
        here, there = (
            each.rstrip("/").replace("//localhost:", "//127.0.0.1:")
            for each in (self.api_url, url or "")
        )
        return here == there

    def client(self, *, timeout_s: float = 30.0) -> RetryingClient:
        """For requests below the API's address."""
        user, _, password = (self.auth_string or "").partition(":")
        auth = (user, password) if self.auth_string else None
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        proxied = uses_proxy(self.api_url)
        return RetryingClient(
            base_url=self.api_url, headers=headers, auth=auth, timeout=timeout_s, trust_env=proxied
        )


def find_server(state: Path) -> PrefectServer | None:
    """The server that flows of this site talk to; None where none is configured or announced in
    `paths.state`."""
    url, key, auth_string = configured()
    if url:
        origin = "PREFECT_API_URL" if os.environ.get("PREFECT_API_URL") else "Prefect's settings"
        _require_address(url, origin)
        login = unquote(urlsplit(url).netloc.rpartition("@")[0])
        return PrefectServer(
            without_login(url).rstrip("/"), origin, key, auth_string or login or None
        )
    announced = announced_url(state)
    return (
        PrefectServer(announced, "qinglan up", auth_string=auth_string, is_of_up=True)
        if announced
        else None
    )


def configured() -> tuple[str | None, str | None, str | None]:
    """The API's address, key and login that the environment or Prefect's files name."""
    given = {
        name: value.strip()
        for name, value in os.environ.items()
        if name.startswith("PREFECT_") and value.strip()
    }
    if _has_settings_file():
        return _ask_prefect(Path.cwd(), tuple(sorted(given.items())))
    return (
        given.get("PREFECT_API_URL"),
        given.get("PREFECT_API_KEY"),
        given.get("PREFECT_API_AUTH_STRING"),
    )


def server_at(api_url: str, state: Path) -> PrefectServer:
    """The server that a run noted as where it runs; with a login only where this site knows that
    server."""
    known = find_server(state)
    return known if known and known.is_at(api_url) else PrefectServer(api_url, "the run itself")


def _require_address(url: str, origin: str) -> None:
    """Raise `ConfigError` where nothing can be asked; Prefect itself takes any text."""
    with suppress(ValueError, httpx2.InvalidURL):  # each parser refuses what the other takes
        parts, _ = urlsplit(url), httpx2.URL(url)
        if (
            parts.scheme in ("http", "https")
            and parts.port != 0
            and (parts.hostname or "").encode("idna")
        ):
            return
    shown = re.sub(r"(?s)^(\w+://)?.*@", r"\1", url)  # a login may be what is wrong with it
    raise ConfigError(
        f"{origin}: {shown!r} is no http(s) URL; write it like PREFECT_API_URL=http://127.0.0.1:4200/api"
    )


def without_login(address: str) -> str:
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def announced_url(state: Path) -> str | None:
    """The API of the `qinglan up` that runs on this state folder; None where none does."""
    try:
        announced = (state / SERVER_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    lock = state / LOCK_FILE
    # Without a lock there, another machine that shares the folder announced it.
    return announced if is_held(lock) or not lock.exists() else None


def prefect_home() -> Path | None:
    """The folder that PREFECT_HOME names, expanded as Prefect does it; None where it names none."""
    return Path(home).expanduser() if (home := os.environ.get("PREFECT_HOME")) else None


def _has_settings_file() -> bool:
    """Only a file makes it necessary to ask Prefect, which takes more than a second."""
    home = prefect_home() or Path("~/.prefect")
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml").expanduser()
    if any(file.is_file() for file in (Path("prefect.toml"), Path(".env"), profiles)):
        return True
    project = Path("pyproject.toml")
    try:
        return project.exists() and "prefect" in tomllib.loads(
            project.read_text(encoding="utf-8")
        ).get("tool", {})
    except (OSError, ValueError):  # Prefect says what is wrong with it
        return True


@cache
def _ask_prefect(
    folder: Path, variables: tuple[tuple[str, str], ...]
) -> tuple[str | None, str | None, str | None]:
    """The address, key and login that Prefect would use here.

    Asked in a process of its own: Prefect reads its settings when it is imported, and the address
    may be set later.
    """
    argv = [sys.executable, "-P", "-c", _PRINT_SETTINGS]
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    } | dict(variables)
    printed = output_of(argv, "Prefect's settings", "prefect config view", cwd=folder, env=env)
    url, key, auth_string = json.loads(printed.splitlines()[-1])
    return url, key, auth_string
