"""The local judge: the champion of a registered judge of passages, served on loopback while RL
needs it.

It is asked through the ledger; the keys have the digest of its weights, so that no version is given
another's answers.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qinglan.clients.chat import Account, ChatClient
from qinglan.clients.roles import site_ledger
from qinglan.config import Endpoint, LocalJudge, Profile
from qinglan.errors import ConfigError
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes import get_recipe, recipe_key
from qinglan.recipes.passage_judge import verdict_recipe
from qinglan.registry import Released, prompt_digest, registry_of
from qinglan.rows import hash_fraction
from qinglan.runs.processes import PORTS, Processes, Say, port_problem
from qinglan.runs.run import Run
from qinglan.serving.routes import Backend
from qinglan.serving.server_process import chat_probe, serve_command

ROLE = "judge.local"
"""In the ledger, and in messages about its calls."""
_READY_WITHIN_S = 1800.0
_PORT_FREE_WITHIN_S = 150.0
"""Connections that were closed hold a port for up to two minutes."""


@dataclass(frozen=True)
class ReleasedJudge:
    settings: LocalJudge
    released: Released

    @property
    def name(self) -> str:
        return f"{self.released.name}-v{self.released.version}"

    @property
    def identity(self) -> dict[str, Any]:
        answers = self.settings.model_dump(mode="json", include={"model", "max_tokens", "extra"})
        return answers | {
            "sha256": self.released.sha256,
            "recipe": recipe_key(self.released.recipe),
        }

    @property
    def key_salt(self) -> str:
        """Part of every ledger key."""
        return f"local-{self.released.sha256}"


@dataclass(frozen=True)
class JudgeServer:
    judge: ReleasedJudge
    url: str
    check: Callable[[], None]
    """Raises `EngineError` where its server has ended."""

    @property
    def endpoint(self) -> Endpoint:
        settings = self.judge.settings.model_dump(
            include={"max_tokens", "concurrency", "timeout_s"}
        )
        return Endpoint(base_url=self.url, model=self.judge.name, **settings)


def released_judge(profile: Profile) -> ReleasedJudge | None:
    """The judge that the profile's `judge.local` names, if any.

    Raises:
        ConfigError: it can't be asked by this recipe, there is no champion, or its prompt is
            another one by now.
        ArtifactError: its weights can't be found.
    """
    if (local := profile.judge.local) is None:
        return None
    recipe, cluster = get_recipe(profile.recipe), profile.trainer.ray_dashboard_url
    if not recipe.grader.retrieves:
        raise ConfigError(
            f"judge.local: recipe `{recipe.NAME}` retrieves nothing to be judged; leave it out"
        )
    if profile.trainer.is_elsewhere:
        problem = f"it is served on this machine only, which the nodes of {cluster} can't reach"
        raise ConfigError(f"judge.local: {problem}; leave it out, or train here")
    if (champion := registry_of(profile, local.model).read_champion()) is None:
        hint = (
            "train and release one (docs/how-to/answer-judge.md; `qinglan release list` shows them)"
        )
        where = f"{local.model} has no champion in the registry at {profile.tracking_uri}"
        raise ConfigError(f"judge.local.model: {where}; {hint}, or leave it out")
    verdict_recipe(champion.recipe)
    if champion.prompt_sha256 != prompt_digest(
        profile.model_copy(update={"recipe": champion.recipe})
    ):
        trained = f"version {champion.version} of {local.model} was trained with another prompt than recipe"
        raise ConfigError(
            f"judge.local: {trained} `{champion.recipe}` has now; train and release it again"
        )
    return ReleasedJudge(local, champion)


@contextmanager
def serve_judge(
    profile: Profile, judge: ReleasedJudge | None, logs: Path, say: Say
) -> Iterator[JudgeServer | None]:
    """Its server, until the end; raises `EngineError`, with the end of its log, where it does not
    come up."""
    if judge is None:
        yield None
        return
    local = judge.settings
    folder = registry_of(profile, local.model).folder(judge.released, say)
    as_served = profile.model_copy(
        update={
            "student": profile.student.model_copy(update={"max_new_tokens": local.max_tokens}),
            "serve": profile.serve.model_copy(
                update={"backend": None, "extra": local.extra, "models_per_gpu": 1}
            ),
            "rl": profile.rl.model_copy(
                update={"tensor_model_parallel_size": len((local.gpu or "0").split(","))}
            ),
            "trainer": profile.trainer.model_copy(
                update={"device": "cuda" if local.gpu else "cpu"}
            ),
        }
    )
    with Processes(logs, say) as processes:
        # The same for a stage that is continued: a Ray job that is still running asks it there.
        port = PORTS[int(hash_fraction(str(logs.resolve())) * len(PORTS))]
        # As ms-swift looks at it, which takes another one silently.
        processes.wait_until(
            f"port {port}", partial(port_problem, "", port, reuse=False), _PORT_FREE_WITHIN_S
        )
        backend = Backend(
            url=f"http://127.0.0.1:{port}/v1", model=judge.name, version=judge.released.version
        )
        processes.start(
            "judge",
            serve_command(as_served, folder, backend, port, [local.gpu] if local.gpu else []),
        )
        messages = verdict_recipe(judge.released.recipe).verdict_messages(
            "问", "答", profile.tenant
        )
        processes.wait_until(judge.name, partial(chat_probe(messages), backend), _READY_WITHIN_S)
        say(f"{judge.name} answers at {backend.url}")
        yield JudgeServer(judge, backend.url, processes["judge"].require_running)


@asynccontextmanager
async def open_judge(run: Run, served: JudgeServer) -> AsyncIterator[ChatClient]:
    profile, judge = run.profile, served.judge
    async with AsyncExitStack() as stack:
        queue = LedgerQueue(stack.enter_context(site_ledger(profile)), run.id, profile.budget)
        stack.push_async_callback(queue.close)
        account = Account(run.id, profile.tenant.id, ROLE, judge.name, judge.settings.price)
        client = ChatClient(served.endpoint, served.url, account, queue, key_salt=judge.key_salt)
        stack.push_async_callback(client.close)
        yield client
