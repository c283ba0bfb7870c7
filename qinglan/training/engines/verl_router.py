"""verl's router plug-in for the CPU: each request goes to the server that was asked least recently.

verl starts a Ray actor for the router and sends it the servers, so this module has no heavy imports. That actor gets no
requests: the agent loop's `LocalClient` has a router of its own.
"""

from functools import cached_property
from typing import Any


class NamedServer:
    """A handle of a server actor that pickles as the actor's name: unpickling imports nothing of the actor's."""

    def __init__(self, actor_name: str) -> None:
        self._actor_name = actor_name

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return NamedServer, (self._actor_name,)

    @cached_property
    def generate(self) -> Any:
        import ray

        return ray.get_actor(self._actor_name).generate


class LeastRecentRouter:
    """The methods of a router that verl's `LLMServerClient` calls."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        del config  # the YAML file that names this class
        self._servers = list(servers.items())

    def require_acquire_fields(self) -> list[str]:
        return []

    require_release_fields = require_acquire_fields

    def acquire_server(self, request_id: str) -> tuple[str, Any]:  # noqa: ARG002
        self._servers.append(self._servers.pop(0))
        return self._servers[-1]

    def release_server(self, server_id: str) -> None:
        """Do nothing: requests are not counted."""
