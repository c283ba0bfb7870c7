"""The services of a profile by role, and their clients in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Literal

from qinglan.clients.chat import ChatClient
from qinglan.clients.completions import Account
from qinglan.clients.rag import RagClient
from qinglan.config import EMBEDDED, Endpoint, Profile
from qinglan.errors import ConfigError
from qinglan.ledger import Ledger, ledger_url
from qinglan.ledger.queue import LedgerQueue
from qinglan.runs.run import Run
from qinglan.runs.traces import CallSample

ANSWER_FIELDS = frozenset(Endpoint.model_fields) - {
    "api_key_env",
    "timeout_s",
    "max_retries",
    "concurrency",
    "requests_per_minute",
    "tokens_per_minute",
}
"""The settings of an endpoint that its answers depend on."""

SIMULATED_ANSWERS = "330c99164ac6"
"""The version of what the simulated teacher, answerer and judge say, as a part of the ledger's
keys. Another one is needed with any change of their answers; a test compares them."""

ChatRole = Literal["teacher", "answerer", "judge"]
Role = Literal["teacher", "answerer", "judge", "rag"]
_NOT_OPENED = "this stage has no {role} client; name the role in open_clients"


@dataclass(frozen=True)
class Addresses:
    """Addresses of the services, models with `/v1`: the user's own where the profile has them, else
    the simulators."""

    teacher_url: str
    judge_url: str
    rag_url: str
    rival_urls: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the teachers in `compare`, by their names."""
    answerer_url: str = ""
    """Empty where the profile names no answerer."""


Services = Callable[[], Addresses]
"""Gives the addresses. The first call starts the simulators: a run that reuses every stage needs
none."""


class Clients:
    """The clients of the roles that a stage named; they belong to the event loop that made them."""

    def __init__(
        self, chats: Mapping[ChatRole, ChatClient] | None = None, rag: RagClient | None = None
    ) -> None:
        self._chats = chats or {}
        self._rag = rag
        self._all: list[ChatClient | RagClient] = [*self._chats.values()]
        if rag:
            self._all.append(rag)
        self.unjudged = 0
        """Answers for whose score the budget was spent."""

    @property
    def teacher(self) -> ChatClient:
        return self._chat("teacher")

    @property
    def answerer(self) -> ChatClient:
        return self._chat("answerer")

    @property
    def judge(self) -> ChatClient:
        return self._chat("judge")

    @property
    def rag(self) -> RagClient:
        if self._rag is None:
            raise LookupError(_NOT_OPENED.format(role="rag"))
        return self._rag

    def call_counts(self) -> dict[str, dict[str, int]]:
        """Counts by role that the ledger does not record: answers taken from it, and calls to the
        RAG."""
        counts: dict[str, dict[str, int]] = {
            role: {"cached": chat.cached_count} for role, chat in self._chats.items()
        }
        if self._rag:
            counts["rag"] = {"calls": self._rag.call_count, "failed": self._rag.failed_count}
        return counts

    @property
    def transient_failures(self) -> int:
        return sum(client.transient_failures for client in self._all)

    def keep_answers(self) -> None:
        for client in self._all:
            client.keep_answers()

    async def close(self) -> None:
        for client in self._all:
            await client.close()

    def _chat(self, role: ChatRole) -> ChatClient:
        if role not in self._chats:
            raise LookupError(_NOT_OPENED.format(role=role))
        return self._chats[role]


def site_ledger(profile: Profile) -> closing[Ledger]:
    """The site's ledger for a `with` block, at whose end it is closed."""
    return closing(Ledger(ledger_url(profile.ledger, profile.paths.state)))


def endpoint_of(profile: Profile, role: ChatRole) -> Endpoint:
    """The model and service of a role; raises ConfigError where the profile names no answerer."""
    if role == "teacher":
        return profile.teacher
    if role == "judge":
        return profile.judge
    if profile.answerer is None:
        asks = f"recipe `{profile.recipe_name}` asks a weak model for the answers that are judged"
        raise ConfigError(f"answerer: {asks}; name one: {{base_url: …, model: …}}")
    return profile.answerer


def key_salt(profile: Profile, role: ChatRole) -> str:
    """The service that answers, as part of every ledger key.

    A simulator is named by the version of its answers and its seed, as its port changes.
    """
    endpoint = endpoint_of(profile, role)
    if endpoint.base_url == EMBEDDED:
        return f"{SIMULATED_ANSWERS}-{profile.embedded.sample_seed}"
    return endpoint.base_url.rstrip("/")


@asynccontextmanager
async def open_clients(
    run: Run, services: Services, roles: Collection[Role], traced: CallSample | None = None
) -> AsyncIterator[Clients]:
    """Open the clients of these roles; other roles need no API key. `traced` notes what is sent."""
    profile = run.profile
    addresses = services()
    urls: dict[ChatRole, str] = {
        "teacher": addresses.teacher_url,
        "answerer": addresses.answerer_url,
        "judge": addresses.judge_url,
    }
    # In threads: a database that is away or locked is waited for, and a router's other answers must
    # not wait as well.
    ledger = await asyncio.to_thread(Ledger, ledger_url(profile.ledger, profile.paths.state))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, ledger.close)
        queue = await asyncio.to_thread(LedgerQueue, ledger, run.id, profile.budget)
        stack.push_async_callback(queue.close)
        chats: dict[ChatRole, ChatClient] = {}
        for role, url in urls.items():
            if role not in roles:
                continue
            endpoint = endpoint_of(profile, role)
            account = Account(
                run.id, profile.tenant.id, role, endpoint.model, profile.prices[endpoint.model]
            )
            chats[role] = ChatClient(
                endpoint, url, account, queue, key_salt=key_salt(profile, role), traced=traced
            )
        rag = None
        if "rag" in roles:
            rag = RagClient(profile.rag, addresses.rag_url, profile.tenant.id, traced=traced)
        clients = Clients(chats, rag)
        stack.push_async_callback(clients.close)
        yield clients
