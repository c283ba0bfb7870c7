"""The embedded teacher and RAG for users to try by hand, for as long as the site runs.

Flows start their own: a run may set other data, latencies or faults than the profile that the site was started with.
"""

import sys
from dataclasses import dataclass

from qinglan.config import Profile
from qinglan.runs.command import Command
from qinglan.runs.processes import HOST, port_from
from qinglan.simulators.domains import embedded_knowledge_base
from qinglan.simulators.services import is_any_model_embedded, rag_argv, teacher_argv

_TEACHER_PORT, _RAG_PORT = 8101, 8201
"""Or the next free ones."""


@dataclass(frozen=True)
class SimulatedRole:
    """A server, and where it answers."""

    title: str
    argv: list[str]
    port: int
    path: str
    """Of what is to be called, after the port."""

    @property
    def name(self) -> str:
        """Its log's."""
        return f"embedded_{self.title.lower()}"

    @property
    def command(self) -> Command:
        """What starts it."""
        return Command([sys.executable, "-m", *self.argv, f"--port={self.port}"])

    @property
    def url(self) -> str:
        """What to call."""
        return f"http://{HOST}:{self.port}{self.path}"

    @property
    def health_url(self) -> str:
        """Answers 200."""
        return f"http://{HOST}:{self.port}/health"


def simulated_roles_of(profile: Profile) -> list[SimulatedRole]:
    """Those that the profile calls `embedded`.

    Raises:
        ConfigError: the profile's sample can't be made.
    """
    found = []
    if is_any_model_embedded(profile):
        found.append(SimulatedRole("Teacher", teacher_argv(profile), port_from(_TEACHER_PORT), "/v1"))
    if knowledge_base := embedded_knowledge_base(profile):
        found.append(SimulatedRole("RAG", rag_argv(profile, knowledge_base), port_from(_RAG_PORT), "/retrieve"))
    return found
