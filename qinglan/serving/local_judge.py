"""The local judge: the champion of a registered judge of passages, served on loopback for RL.

It is asked through the ledger; the keys have the digest of its weights, so that no version is given
another's answers.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qinglan.clients.chat import ChatClient
from qinglan.clients.completions import Account
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
"""Its role in the ledger, and in messages about its calls."""
_READY_WITHIN_S = 1800.0
_PORT_FREE_WITHIN_S = 150.0
"""Connections that were closed hold a port for up to two minutes."""
# Settings that change what the judge answers.
_ANSWER_SETTINGS = {"model", "max_tokens", "extra"}


@dataclass(frozen=True)
class ReleasedJudge:
    settings: LocalJudge
    released: Released

    @property
    def name(self) -> str:
        return f"{self.released.name}-v{self.released.version}"

    @property
    def identity(self) -> dict[str, Any]:
        """All that its answers depend on."""
        identity = self.settings.model_dump(mode="json", include=_ANSWER_SETTINGS)
        identity["sha256"] = self.released.sha256
        identity["recipe"] = recipe_key(self.released.recipe)
        return identity

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
        settings = self.judge.settings
        return Endpoint(
            base_url=self.url,
            model=self.judge.name,
            max_tokens=settings.max_tokens,
            concurrency=settings.concurrency,
            timeout_s=settings.timeout_s,
        )


def released_judge(profile: Profile) -> ReleasedJudge | None:
    """The judge that the profile's `judge.local` names, if any.

    Raises:
        ConfigError: it can't be asked by this recipe, there is no champion, or its prompt is
            another one by now.
        ArtifactError: its weights can't be found.
    """
    local = profile.judge.local
    if local is None:
        return None
    recipe = get_recipe(profile.recipe)
    if "passage" not in recipe.grader.judge_uses:
        raise ConfigError(
            f"judge.local: recipe `{recipe.NAME}` retrieves nothing to be judged; leave it out"
        )
    if profile.trainer.is_elsewhere:
        cluster = profile.trainer.ray_dashboard_url
        problem = f"it is served on this machine only, which the nodes of {cluster} can't reach"
        raise ConfigError(f"judge.local: {problem}; leave it out, or train here")
    champion = registry_of(profile, local.model).read_champion()
    if champion is None:
        where = f"{local.model} has no champion in the registry at {profile.tracking_uri}"
        hint = (
            "train and release one (docs/how-to/answer-judge.md; `qinglan release list` shows them)"
        )
        raise ConfigError(f"judge.local.model: {where}; {hint}, or leave it out")
    # It raises where the champion's recipe is none of passages.
    verdict_recipe(champion.recipe)
    judge_profile = profile.model_copy(update={"recipe": champion.recipe})
    if champion.prompt_sha256 != prompt_digest(judge_profile):
        raise ConfigError(
            f"judge.local: version {champion.version} of {local.model} was trained with another "
            f"prompt than recipe `{champion.recipe}` has now; train and release it again"
        )
    return ReleasedJudge(local, champion)


@contextmanager
def serve_judge(
    profile: Profile, judge: ReleasedJudge | None, logs: Path, say: Say
) -> Iterator[JudgeServer | None]:
    """The judge's server, until the end of the `with`; None where there is no judge.

    Raises:
        EngineError: it does not come up; the message has the end of its log.
    """
    if judge is None:
        yield None
        return
    local = judge.settings
    folder = registry_of(profile, local.model).folder(judge.released, say)
    with Processes(logs, say) as processes:
        # A stage that is continued has the same port: a Ray job that still runs asks it there.
        port = PORTS[int(hash_fraction(str(logs.resolve())) * len(PORTS))]
        # The port is looked at as ms-swift does, which would silently take another one.
        find_port_problem = partial(port_problem, "", port, reuse=False)
        processes.wait_until(f"port {port}", find_port_problem, _PORT_FREE_WITHIN_S)
        url = f"http://127.0.0.1:{port}/v1"
        backend = Backend(url=url, model=judge.name, version=judge.released.version)
        gpus = [local.gpu] if local.gpu else []
        command = serve_command(_as_served(profile, local), folder, backend, port, gpus)
        processes.start("judge", command)
        recipe = verdict_recipe(judge.released.recipe)
        messages = recipe.verdict_messages("问", "答", profile.tenant)
        processes.wait_until(judge.name, partial(chat_probe(messages), backend), _READY_WITHIN_S)
        say(f"{judge.name} answers at {url}")
        yield JudgeServer(judge, url, processes["judge"].require_running)


def _as_served(profile: Profile, local: LocalJudge) -> Profile:
    """The profile with the judge's settings in place of those of the student and its server."""
    gpus = (local.gpu or "0").split(",")
    device = "cuda" if local.gpu else "cpu"
    student = profile.student.model_copy(update={"max_new_tokens": local.max_tokens})
    serve = profile.serve.model_copy(
        update={"backend": None, "extra": local.extra, "models_per_gpu": 1}
    )
    rl = profile.rl.model_copy(update={"tensor_model_parallel_size": len(gpus)})
    trainer = profile.trainer.model_copy(update={"device": device})
    return profile.model_copy(
        update={"student": student, "serve": serve, "rl": rl, "trainer": trainer}
    )


@asynccontextmanager
async def open_judge(run: Run, served: JudgeServer) -> AsyncIterator[ChatClient]:
    """A client that asks the judge through the ledger."""
    profile = run.profile
    judge = served.judge
    async with AsyncExitStack() as stack:
        queue = LedgerQueue(stack.enter_context(site_ledger(profile)), run.id, profile.budget)
        stack.push_async_callback(queue.close)
        account = Account(run.id, profile.tenant.id, ROLE, judge.name, judge.settings.price)
        client = ChatClient(served.endpoint, served.url, account, queue, key_salt=judge.key_salt)
        stack.push_async_callback(client.close)
        yield client
