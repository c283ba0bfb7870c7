"""The clients of one process, built from a profile and the addresses in force."""

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from qinglan.clients.chat import Account, ChatClient
from qinglan.clients.rag import RagClient
from qinglan.config import EMBEDDED, Endpoint, Profile
from qinglan.errors import ConfigError
from qinglan.ledger import Ledger, ledger_url, open_ledger
from qinglan.ledger.queue import LedgerQueue
from qinglan.runs.code_digest import code_digest
from qinglan.runs.run import Run

ANSWER_FIELDS = frozenset(Endpoint.model_fields) - {
    "api_key_env", "timeout_s", "max_retries", "concurrency", "requests_per_minute", "tokens_per_minute",
}  # fmt: skip
"""What of an endpoint's settings its answers depend on."""

ChatRole = Literal["teacher", "answerer", "judge"]
Role = Literal["teacher", "answerer", "judge", "rag"]
Client = TypeVar("Client")


@dataclass(frozen=True)
class Services:
    """Addresses to call: the user's own where the profile has them, else those of the stand-ins."""

    teacher_url: str
    """Up to and including `/v1`."""
    judge_url: str
    """Up to and including `/v1`."""
    rag_url: str
    """The address that takes the POST."""
    rival_urls: Mapping[str, str] = field(default_factory=dict)
    """Of the teachers in `compare`, by their names."""
    answerer_url: str = ""
    """Up to and including `/v1`; empty where the profile names no answerer."""


class Clients:
    """Those of the chat roles and the RAG that a stage asked for; they belong to the event loop that made them."""

    def __init__(
        self,
        teacher: ChatClient | None = None,
        judge: ChatClient | None = None,
        rag: RagClient | None = None,
        answerer: ChatClient | None = None,
    ) -> None:
        self._teacher, self._answerer, self._judge, self._rag = teacher, answerer, judge, rag

    @property
    def teacher(self) -> ChatClient:
        """The teacher's client."""
        return _opened(self._teacher, "teacher")

    @property
    def answerer(self) -> ChatClient:
        """The client of the model whose answers are judged."""
        return _opened(self._answerer, "answerer")

    @property
    def judge(self) -> ChatClient:
        """The judge's client."""
        return _opened(self._judge, "judge")

    @property
    def rag(self) -> RagClient:
        """The retrieval service's client."""
        return _opened(self._rag, "rag")

    def call_counts(self) -> dict[str, dict[str, int]]:
        """By role, what the ledger can't know: answers taken from it, and calls to the RAG."""
        chats = {"teacher": self._teacher, "answerer": self._answerer, "judge": self._judge}
        counts = {role: {"cached": client.cached_count} for role, client in chats.items() if client}
        if self._rag:
            counts["rag"] = {"calls": self._rag.call_count, "failed": self._rag.failed_count}
        return counts

    async def close(self) -> None:
        """Close the connections."""
        for client in (self._teacher, self._answerer, self._judge, self._rag):
            if client:
                await client.close()


def _opened(client: Client | None, role: Role) -> Client:
    if client is None:
        raise LookupError(f"this stage has no {role} client; name the role in open_clients")
    return client


def site_ledger(profile: Profile) -> AbstractContextManager[Ledger]:
    """The site's ledger, closed at the end."""
    return open_ledger(ledger_url(profile.ledger, profile.paths.state))


def endpoint_of(profile: Profile, role: ChatRole) -> Endpoint:
    """Who plays the role.

    Raises:
        ConfigError: the recipe wants an answerer, and the profile names none.
    """
    if role != "answerer":
        return profile.teacher if role == "teacher" else profile.judge
    if profile.answerer is None:
        raise ConfigError(
            f"answerer: recipe `{profile.recipe_name}` asks a weak model for the answers that are judged; name one: "
            "{base_url: …, model: …}"
        )
    return profile.answerer


def key_salt(profile: Profile, role: ChatRole) -> str:
    """Part of every ledger key: which service answers. Two may have models of the same name.

    Of a stand-in it is version and seed, as its answers change with them; its port is another one in every run.
    """
    endpoint = endpoint_of(profile, role)
    if endpoint.base_url == EMBEDDED:
        return f"{code_digest('qinglan.simulators')[:12]}-{profile.embedded.sample_seed}"
    return endpoint.base_url.rstrip("/")


@asynccontextmanager
async def open_clients(run: Run, services: Services, roles: Collection[Role]) -> AsyncIterator[Clients]:
    """The clients of these roles, closed at the end; of no other role is a key needed.

    Raises:
        ConfigError: a role's API key is not set, or the profile names nobody for it.
    """
    profile = run.profile
    with site_ledger(profile) as ledger:
        queue = LedgerQueue(ledger, run.id, profile.budget)

        def chat(role: ChatRole, url: str) -> ChatClient | None:
            if role not in roles:
                return None
            endpoint = endpoint_of(profile, role)
            account = Account(run.id, profile.tenant.id, role, endpoint.model, profile.prices[endpoint.model])
            return ChatClient(endpoint, url, account, queue, key_salt=key_salt(profile, role))

        clients = Clients(
            chat("teacher", services.teacher_url),
            chat("judge", services.judge_url),
            RagClient(profile.rag, services.rag_url, profile.tenant.id) if "rag" in roles else None,
            chat("answerer", services.answerer_url),
        )
        try:
            yield clients
        finally:
            try:
                await clients.close()
            finally:
                await queue.close()
