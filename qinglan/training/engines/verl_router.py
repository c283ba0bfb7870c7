"""verl's router plug-in for the CPU, which gets no requests: the agent loop's `LocalClient` knows
the servers itself.

verl starts a Ray actor for it and sends it the servers, so this module has no heavy imports.
"""

from functools import cached_property
from typing import Any


class NamedServer:
    """A handle of a server actor that pickles as the actor's name: unpickling imports nothing of
    the actor's."""

    def __init__(self, actor_name: str) -> None:
        self._actor_name = actor_name

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return NamedServer, (self._actor_name,)

    @cached_property
    def generate(self) -> Any:
        """The actor's method, looked up where it is first called."""
        import ray

        return ray.get_actor(self._actor_name).generate


class UnusedRouter:
    """A router that routes nothing."""

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]) -> None:
        """verl calls it with the servers and the content of the YAML file that names this class."""
