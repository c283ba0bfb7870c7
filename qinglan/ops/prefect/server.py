"""Which Prefect server this site uses, and how to ask it: over HTTP, so that the core needs no Prefect.

In order: the address in the environment, the one of the user's Prefect profile, `qinglan up`'s where it runs.
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from qinglan.config import uses_proxy
from qinglan.errors import ConfigError
from qinglan.ops.prefect.api import RetryingClient
from qinglan.runs.locks import is_held

SERVER_FILE = "prefect_api_url"
"""Under the state directory while `qinglan up`'s server runs; it stays behind after kill -9."""
LOCK_FILE = "up.lock"
"""Under the state directory, locked while `qinglan up` or any of its processes runs."""
_UP = "qinglan up"
_TIMEOUT_S = 30.0
_SETTINGS = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING")


@dataclass(frozen=True)
class PrefectServer:
    """A server's API, and what it wants to be shown."""

    api_url: str
    """Ends in `/api`, or names a workspace of Prefect Cloud."""
    origin: str
    """Who named it, for messages."""
    key: str | None = None
    auth_string: str | None = None

    def __repr__(self) -> str:
        return f"PrefectServer({self.shown_url!r}, {self.origin!r})"

    @property
    def shown_url(self) -> str:
        """For messages and files."""
        return without_login(self.api_url)

    def is_at(self, url: str | None) -> bool:
        """Is that its address, however this machine is called in it?"""
        return url is not None and _plain(self.shown_url) == _plain(url)

    @property
    def is_of_up(self) -> bool:
        """Is it `qinglan up`'s? Else the user's own."""
        return self.origin == _UP

    def client(self, *, timeout_s: float = _TIMEOUT_S) -> RetryingClient:
        """For requests below the API's address; its errors name that as `shown_url` does."""
        return RetryingClient(
            base_url=self.shown_url,
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            auth=self._login,
            timeout=timeout_s,
            trust_env=uses_proxy(self.api_url),
        )

    @property
    def _login(self) -> tuple[str, str] | None:
        if self.auth_string:
            user, _, password = self.auth_string.partition(":")
            return user, password
        parts = urlsplit(self.api_url)
        return (unquote(parts.username), unquote(parts.password or "")) if parts.username else None


def find_server(state: Path) -> PrefectServer | None:
    """The server that flows of this site talk to; None where none is configured or announced.

    Args:
        state: the profile's `paths.state`.

    Raises:
        ConfigError: the user's Prefect profile can't be read.
    """
    own = {name: value for name in _SETTINGS if (value := os.environ.get(name, "").strip())}
    # As Prefect does: a variable wins over the profile, setting by setting.
    chosen, profile_name = _users_profile() | own, os.environ.get("PREFECT_PROFILE")
    if url := chosen.get("PREFECT_API_URL"):
        origin = "PREFECT_API_URL" if "PREFECT_API_URL" in own else f"Prefect's profile {profile_name or 'in use'}"
        return PrefectServer(
            url.rstrip("/"), origin, chosen.get("PREFECT_API_KEY"), chosen.get("PREFECT_API_AUTH_STRING")
        )
    if not (announced := announced_url(state)):
        return None
    return PrefectServer(announced, _UP, auth_string=own.get("PREFECT_API_AUTH_STRING"))


def server_at(shown_url: str, state: Path) -> PrefectServer:
    """The server that a run noted as where it runs; with a login only where this site knows that server.

    Raises:
        ConfigError: the user's Prefect profile can't be read.
    """
    known = find_server(state)
    return known if known and known.is_at(shown_url) else PrefectServer(shown_url, "the run itself")


def _plain(url: str) -> str:
    return url.rstrip("/").replace("//localhost:", "//127.0.0.1:")


def without_login(address: str) -> str:
    """The address without the name and password that may stand in it."""
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


def _users_profile() -> dict[str, Any]:
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    file = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()
    try:
        known = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: can't be read as Prefect's profiles: {error}") from error
    name = os.environ.get("PREFECT_PROFILE") or known.get("active")
    settings = known.get("profiles", {}).get(name, {})
    return settings if isinstance(settings, dict) else {}
