"""verl's router plug-in for the CPU: each request goes to the server that was asked least recently.

In a module without heavy imports, because verl starts a Ray actor for it and sends it the servers. That actor is not
asked: the agent loop's `LocalClient` knows the servers itself.
"""

from functools import cached_property
from typing import Any


class NamedServer:
    """A server's handle that can be sent without what its methods' types would have the receiver import."""

    def __init__(self, actor_name: str) -> None:
        self._actor_name = actor_name

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return NamedServer, (self._actor_name,)

    @cached_property
    def generate(self) -> Any:
        """`generate.remote(...)` is the actor's."""
        import ray

        return ray.get_actor(self._actor_name).generate


class Router:
    """What verl's `LLMServerClient` calls."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any] | None = None) -> None:
        del config  # the YAML file that names this class
        self._servers = list(servers.items())

    def require_acquire_fields(self) -> list[str]:
        """Nothing of a request is needed to choose."""
        return []

    def require_release_fields(self) -> list[str]:
        """Nor is it needed to know which one has ended."""
        return []

    def acquire_server(self, request_id: str) -> tuple[str, Any]:  # noqa: ARG002
        """Address and handle."""
        self._servers.append(self._servers.pop(0))
        return self._servers[-1]

    def release_server(self, server_id: str) -> None:
        """Nothing is counted."""
