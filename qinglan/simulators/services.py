"""Starts the simulators that a profile asks for, for as long as they are needed.

Each takes a free port itself and reports it, so that no port is raced for, and ends when this
process does.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from qinglan.clients.roles import Addresses, Services
from qinglan.config import EMBEDDED, Endpoint, Profile, withheld_secrets
from qinglan.runs.launcher import Command, SupervisedProcess
from qinglan.runs.processes import health_problem, wait_until_ready

READY_WITHIN_S = 60.0


@contextmanager
def embedded_services(profile: Profile, knowledge_base: Path | None) -> Iterator[Services]:
    """Start what the profile calls `embedded` when an address is first asked for.

    All of it is stopped at the end of the block. The call that asks for an address raises
    EngineError where a simulator does not come up.
    """
    with ExitStack() as stack:
        # Cached: the first call starts the simulators, later ones get the same addresses.
        yield cache(partial(_start, stack, profile, knowledge_base))


def _start(stack: ExitStack, profile: Profile, knowledge_base: Path | None) -> Addresses:
    wait_for_models = None
    if is_any_model_embedded(profile):
        wait_for_models = stack.enter_context(_simulator(teacher_argv(profile), profile))
    # The models are waited for after the RAG, so that both start up at the same time.
    rag_url = stack.enter_context(rag_service(profile, knowledge_base))
    models_url = f"{wait_for_models()}/v1" if wait_for_models else ""

    def url_of(endpoint: Endpoint | None) -> str:
        if endpoint is None:
            return ""
        return models_url if endpoint.base_url == EMBEDDED else endpoint.base_url

    rival_urls = {name: url_of(endpoint) for name, endpoint in profile.compare.teachers.items()}
    return Addresses(
        url_of(profile.teacher),
        url_of(profile.judge),
        rag_url,
        rival_urls,
        url_of(profile.answerer),
    )


@contextmanager
def rag_service(profile: Profile, knowledge_base: Path | None) -> Iterator[str]:
    """The address of the RAG: the user's own, or the simulator's for as long as it is needed.

    The address is empty without a knowledge base, as for a recipe that retrieves nothing.
    """
    if profile.rag.url != EMBEDDED:
        yield profile.rag.url
    elif knowledge_base is None:
        yield ""
    else:
        with _simulator(rag_argv(profile, knowledge_base), profile) as wait_for_rag:
            yield f"{wait_for_rag()}/retrieve"


def is_any_model_embedded(profile: Profile) -> bool:
    endpoints = (
        profile.teacher,
        profile.judge,
        profile.answerer,
        *profile.compare.teachers.values(),
    )
    return any(endpoint is not None and endpoint.base_url == EMBEDDED for endpoint in endpoints)


def teacher_argv(profile: Profile) -> list[str]:
    """Module and options of the server for all simulated models."""
    options = _fault_options(profile, profile.embedded.teacher_latency_ms)
    return ["qinglan.simulators.chat_server", *options]


def rag_argv(profile: Profile, knowledge_base: Path) -> list[str]:
    """Module and options of the server for the simulated RAG."""
    options = _fault_options(profile, profile.embedded.rag_latency_ms)
    return ["qinglan.simulators.rag_server", "--knowledge-base", str(knowledge_base), *options]


def _fault_options(profile: Profile, latency_ms: float) -> list[str]:
    return [
        "--latency-ms",
        str(latency_ms),
        "--fault-rate",
        str(profile.embedded.fault_rate),
        "--seed",
        str(profile.embedded.sample_seed),
    ]


@contextmanager
def _simulator(argv: list[str], profile: Profile) -> Iterator[Callable[[], str]]:
    """Start a simulator, and end it with the block.

    The block gets a function that waits until the simulator is ready, and returns its base URL.
    """
    name = argv[0].rpartition(".")[2]
    # The secrets are for the real services; what simulates them gets none.
    command = Command([sys.executable, "-m", *argv], withheld_secrets(profile))
    log = profile.paths.state / "logs" / f"{name}.log"
    process = SupervisedProcess(name, command, log, announces=True)

    def wait() -> str:
        url = process.address(READY_WITHIN_S)

        def problem() -> str | None:
            return health_problem(f"{url}/health")

        wait_until_ready(name, problem, [process], within_s=READY_WITHIN_S)
        return url

    try:
        yield wait
    finally:
        process.end()
