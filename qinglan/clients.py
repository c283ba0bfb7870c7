"""The clients of one process, built from a profile and the addresses in force."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qinglan.chat import ChatClient
from qinglan.config import EMBEDDED, Profile
from qinglan.embedded.services import Services
from qinglan.embedded.version import embedded_version
from qinglan.ledger import open_ledger
from qinglan.retrieval import RagClient
from qinglan.runs import Run

Role = Literal["teacher", "judge"]


@dataclass(frozen=True)
class Clients:
    """Teacher, judge and RAG; they belong to the event loop that made them."""

    teacher: ChatClient
    judge: ChatClient
    rag: RagClient


def ledger_path(profile: Profile) -> Path:
    """The site's ledger."""
    return profile.paths.state / "ledger.db"


def key_salt(profile: Profile, role: Role) -> str:
    """Part of every ledger key: the stand-in's version and seed, as its answers change with them; else nothing."""
    endpoint = profile.teacher if role == "teacher" else profile.judge
    return f"{embedded_version()}-{profile.embedded.sample_seed}" if endpoint.base_url == EMBEDDED else ""


def scoring_identity(profile: Profile) -> dict[str, Any]:
    """What a score by RAG and judge depends on, beside the text."""
    return {
        "tenant": profile.tenant.model_dump(mode="json"),
        "rag": profile.rag.model_dump(mode="json", include={"url", "kb_name", "top_k", "score_threshold"}),
        "judge": profile.judge.model_dump(
            mode="json", include={"base_url", "model", "temperature", "max_tokens", "extra_body"}
        ),
        "server": key_salt(profile, "judge"),
    }


@asynccontextmanager
async def open_clients(run: Run, services: Services) -> AsyncIterator[Clients]:
    """Clients that are closed at the end."""
    profile = run.profile
    with open_ledger(ledger_path(profile)) as ledger:

        def chat(role: Role, url: str) -> ChatClient:
            endpoint = profile.teacher if role == "teacher" else profile.judge
            return ChatClient(
                endpoint,
                url,
                role=role,
                ledger=ledger,
                price=profile.prices[endpoint.model],
                run_id=run.id,
                tenant=profile.tenant.id,
                key_salt=key_salt(profile, role),
            )

        clients = Clients(
            chat("teacher", services.teacher_url),
            chat("judge", services.judge_url),
            RagClient(profile.rag, services.rag_url, profile.tenant.id),
        )
        try:
            yield clients
        finally:
            await clients.teacher.close()
            await clients.judge.close()
            await clients.rag.close()
