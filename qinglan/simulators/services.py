"""Starts the stand-ins that a profile asks for, for as long as they are needed.

Each is a process of its own that ends when its standard input does, so that a killed parent leaves none behind.
The child takes a free port itself and reports it on its first line, so that no port is raced for.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from qinglan.clients.roles import Services
from qinglan.config import EMBEDDED, Profile
from qinglan.errors import EngineError
from qinglan.runs.launcher import tail

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 5.0


@contextmanager
def embedded_services(profile: Profile, knowledge_base: Path | None) -> Iterator[Services]:
    """Start what the profile calls `embedded`, and stop it at the end.

    Raises:
        EngineError: a stand-in did not come up; with the end of its log.
    """
    teacher_url, judge_url = profile.teacher.base_url, profile.judge.base_url
    answerer_url = profile.answerer.base_url if profile.answerer else ""
    rival_urls = {name: endpoint.base_url for name, endpoint in profile.compare.teachers.items()}
    with ExitStack() as stack:
        if is_any_model_embedded(profile):
            base = stack.enter_context(_server(teacher_argv(profile), _logs(profile)))
            teacher_url = f"{base}/v1" if teacher_url == EMBEDDED else teacher_url
            answerer_url = f"{base}/v1" if answerer_url == EMBEDDED else answerer_url
            judge_url = f"{base}/v1" if judge_url == EMBEDDED else judge_url
            rival_urls = {name: f"{base}/v1" if url == EMBEDDED else url for name, url in rival_urls.items()}
        rag_url = stack.enter_context(rag_service(profile, knowledge_base))
        yield Services(teacher_url, judge_url, rag_url, rival_urls, answerer_url)


@contextmanager
def rag_service(profile: Profile, knowledge_base: Path | None) -> Iterator[str]:
    """The address of the RAG: the user's own, or the stand-in's for as long as it is needed.

    Args:
        knowledge_base: None where the recipe retrieves nothing; the address is empty then.

    Raises:
        EngineError: the stand-in did not come up.
    """
    if profile.rag.url != EMBEDDED:
        yield profile.rag.url
        return
    if knowledge_base is None:
        yield ""
        return
    with _server(rag_argv(profile, knowledge_base), _logs(profile)) as base:
        yield f"{base}/retrieve"


def is_any_model_embedded(profile: Profile) -> bool:
    """Does the teacher's stand-in answer for any of the profile's models?"""
    answerer = [profile.answerer] if profile.answerer else []
    endpoints = (profile.teacher, profile.judge, *answerer, *profile.compare.teachers.values())
    return any(endpoint.base_url == EMBEDDED for endpoint in endpoints)


def teacher_argv(profile: Profile) -> list[str]:
    """Module and options of the stand-in for teacher, judge and answerer."""
    return ["qinglan.simulators.chat_server", *_fault_options(profile, profile.embedded.teacher_latency_ms)]


def rag_argv(profile: Profile, knowledge_base: Path) -> list[str]:
    """Module and options of the RAG's stand-in."""
    faults = _fault_options(profile, profile.embedded.rag_latency_ms)
    return ["qinglan.simulators.rag_server", "--knowledge-base", str(knowledge_base), *faults]


def _fault_options(profile: Profile, latency_ms: float) -> list[str]:
    faults = ["--fault-rate", str(profile.embedded.fault_rate), "--seed", str(profile.embedded.sample_seed)]
    return ["--latency-ms", str(latency_ms), *faults]


def _logs(profile: Profile) -> Path:
    return profile.paths.state / "logs"


@contextmanager
def _server(argv: list[str], logs: Path) -> Iterator[str]:
    """A running stand-in's base URL."""
    module = argv[0]
    logs.mkdir(parents=True, exist_ok=True)
    log_path = logs / f"{module.rpartition('.')[2]}.log"
    with log_path.open("ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", *argv, "--exit-with-parent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the parent, which still needs its services to finish cleanly
        )
    try:
        try:
            base_url = _wait_until_ready(process)
        except EngineError as error:
            end = tail(log_path, start=log_start)
            # The last line says why; it stands in the first, which is all that a flow shows in the end.
            why = f": {end.splitlines()[-1]}; {log_path} ends:\n{end}" if end else ""
            raise EngineError(f"{module} {error}{why}") from None
        yield base_url
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes]) -> str:
    """The base URL, once the health check answers."""
    deadline = time.monotonic() + READY_WITHIN_S
    base_url = _first_line(process, deadline)
    with httpx2.Client(trust_env=False, timeout=2) as client:
        while time.monotonic() < deadline:
            try:
                if client.get(f"{base_url}/health").status_code == 200:
                    return base_url
            except httpx2.TransportError:
                pass
            if process.poll() is not None:
                raise EngineError(f"exited with {process.returncode} before it was ready")
            time.sleep(0.05)
    raise EngineError(f"was not ready after {READY_WITHIN_S:g} s")


def _first_line(process: subprocess.Popen[bytes], deadline: float) -> str:
    if process.stdout is None:
        raise EngineError("has no standard output")
    line = b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise EngineError(f"was not ready after {READY_WITHIN_S:g} s")
        if not (block := os.read(process.stdout.fileno(), 4096)):
            raise EngineError(f"exited with {process.wait(STOP_WITHIN_S)} before it was ready")
        line += block
    return line.decode().strip()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the child's input, and the child if it does not follow."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
