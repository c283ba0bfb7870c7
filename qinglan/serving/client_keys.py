"""The keys of the router's clients; where none is set, this machine alone may ask."""

import hmac

from starlette.requests import Request

from qinglan.config import Serve, require_secret
from qinglan.errors import ConfigError
from qinglan.serving.router_requests import RefusedError

NO_CLIENT = ""
"""Name of whoever asks a router without keys."""


class ClientKeys:
    """The keys of the router's clients, by the client's name.

    Raises:
        ConfigError: a key is not set, or two clients have the same.
    """

    def __init__(self, config: Serve) -> None:
        self._own_hosts = (None, "localhost", "127.0.0.1", "::1", config.host)
        self._keys: dict[str, bytes] = {}
        for name, client in config.clients.items():
            used_by = "serve.api_key_env"
            if name in config.api_keys:
                used_by = f"serve.api_keys.{name}"
            secret = require_secret(client.key_env, used_by).encode()
            for other_name, other_secret in self._keys.items():
                if other_secret == secret:
                    raise ConfigError(
                        f"{used_by}: has the same key as {other_name}; give each client its own"
                    )
            self._keys[name] = secret

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    @property
    def clients(self) -> list[str]:
        """The names of all who may ask."""
        return list(self._keys) or [NO_CLIENT]

    def authorise(self, request: Request) -> str:
        """The name of the client that asks; `NO_CLIENT` where no key is needed.

        Raises:
            RefusedError: the key is wrong or, without keys, a page of another site asks.
        """
        if not self._keys:
            self._refuse_other_sites(request)
            return NO_CLIENT
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        # Each key is compared, so that the time does not say which one is nearest.
        names = [
            name
            for name, secret in self._keys.items()
            if hmac.compare_digest(key.strip().encode(), secret)
        ]
        if not names or kind.lower() != "bearer":
            raise RefusedError(401, "wrong key: send the header `authorization: Bearer KEY`")
        return names[0]

    def _refuse_other_sites(self, request: Request) -> None:
        """Refuse what a page of another site asks through the browser of a user of this machine."""
        # Another site's name may be given this machine's address, so the name counts.
        hostname = request.url.hostname
        if hostname not in self._own_hosts:
            raise RefusedError(
                403, f"a router without keys is asked as localhost, not as {hostname}"
            )
        origin = request.headers.get("origin", "")
        _, _, origin_host = origin.partition("://")
        if origin and origin_host != request.headers.get("host"):
            raise RefusedError(
                403, "a page from elsewhere may ask nothing of a router without keys"
            )
