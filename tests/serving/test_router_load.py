"""A router under load, all as processes of their own: models die, hang and change, and every request is answered."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from waiting import wait_until

from qinglan.serving.routes import Backend, Routes

pytestmark = [pytest.mark.slow, pytest.mark.extended]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "router.py"
QUESTION = "请问菌粉睡前吃行不行呀"
DEADLINE_S, SLACK_S = 3.0, 60.0
"""Generous, as others may have the cores; what hangs does so for ever. How fast it is, the benchmark says."""
NO_DEADLINE = "serve.deadline_ms=60000"
"""Where every answer is to be the model's, on a machine that has others to serve."""
RATE, SECONDS = 25, 6


@contextmanager
def process(*argv: str, log: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and the address that its first line says."""
    with (log or Path("/dev/null")).open("w") as errors:
        started = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()
            started.communicate()


@contextmanager
def stub(port: str = "0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    with process(str(BENCHMARK), "--stub", port, "--model-ms", "5") as (started, url):
        yield started, url


@contextmanager
def router(folder: Path, routes: Routes, *settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    routes.write(folder / "routes.json")
    argv = [
        "-m",
        "qinglan.serving.router",
        "--profile",
        "embedded",
        "--routes",
        str(folder / "routes.json"),
        "--port=0",
    ]
    for setting in (f"serve.deadline_ms={1000 * DEADLINE_S}", *settings):
        argv += ["--set", setting]
    with process(*argv, log=folder / "router.log") as (started, url):
        yield started, url


def backend(url: str, version: str) -> Backend:
    return Backend(url=f"{url}/v1", model="m", version=version)


def load(url: str, meanwhile: Callable[[], None]) -> list[dict[str, Any]]:
    """What became of each request of a load, during which something happens."""
    argv = [
        sys.executable,
        str(BENCHMARK),
        "--load",
        url,
        "--rate",
        str(RATE),
        "--seconds",
        str(SECONDS),
        "--give-up-s=600",
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        running.stdout.readline()  # it begins
        time.sleep(SECONDS / 3)
        meanwhile()
        answers, _ = running.communicate(timeout=600)
    names = ("due_s", "latency_ms", "status", "source", "version", "reason")
    return [dict(zip(names, answer, strict=True)) for answer in json.loads(answers)]


def assert_answered(answers: list[dict[str, Any]]) -> None:
    assert len(answers) == RATE * SECONDS
    assert Counter(answer["status"] for answer in answers) == {200: len(answers)}
    assert max(answer["latency_ms"] for answer in answers) < 1000 * (DEADLINE_S + SLACK_S)


def ask(url: str, **more: Any) -> httpx2.Response:
    body = {"model": "champion", "messages": [{"role": "user", "content": QUESTION}], **more}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=120)


def test_a_killed_model_costs_rewrites_and_no_answer(tmp_path: Path):
    with stub() as (model, model_url), router(tmp_path, Routes(champion=backend(model_url, "1"))) as (_, url):
        answers = load(url, model.kill)
        assert_answered(answers)
        assert {answer["source"] for answer in answers} == {"model", "fallback"}
        assert answers[-1]["reason"] in ("circuit_open", "model_unreachable")
        assert httpx2.get(f"{url}/health", trust_env=False, timeout=120).json()["status"] == "degraded"
        with stub(model_url.rpartition(":")[2]):
            wait_until("the model's answers", lambda: ask(url).headers["x-qinglan-source"] == "model")


def test_a_hanging_model_is_given_up_in_time(tmp_path: Path):
    with stub() as (model, model_url), router(tmp_path, Routes(champion=backend(model_url, "1"))) as (_, url):
        answers = load(url, lambda: model.send_signal(signal.SIGSTOP))
        assert_answered(answers)
        assert {"model_timeout", "circuit_open"} & {answer["reason"] for answer in answers}


def test_a_swap_drops_nothing(tmp_path: Path):
    with (
        stub() as (_, old),
        stub() as (_, new),
        router(tmp_path, Routes(champion=backend(old, "1")), NO_DEADLINE) as (_, url),
    ):
        for version, model in (("2", new), ("1", old), ("2", new)):
            routes = Routes(champion=backend(model, version))
            answers = load(url, partial(routes.write, tmp_path / "routes.json"))
            assert_answered(answers)
            assert {answer["source"] for answer in answers} == {"model"}
            served = {answer["version"] for answer in answers}
            wait_until("the new model", lambda version=version: ask(url).headers["x-qinglan-version"] == version)
            if served == {"1", "2"}:
                return
    raise AssertionError("no load met the swap: the machine stood still each time")


def test_stopping_answers_what_came_in_and_finishes_the_log(tmp_path: Path):
    log = tmp_path / "log"
    settings = (NO_DEADLINE, f"serve.request_log.folder={log}", "serve.request_log.consent=all")
    with stub() as (_, old), router(tmp_path, Routes(champion=backend(old, "1")), *settings) as (running, url):
        assert ask(url).headers["x-qinglan-source"] == "model"
        running.terminate()
        running.wait(300)
    assert [path.suffix for path in log.iterdir()] == [".jsonl"]
    assert QUESTION in next(log.iterdir()).read_text()


def test_a_client_that_hangs_up_is_no_error(tmp_path: Path):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}]}).encode()
    with stub() as (_, old), router(tmp_path, Routes(champion=backend(old, "1")), NO_DEADLINE) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        for sent in (head % (len(body), body), head % (len(body) + 1, body), b"POST /v1/chat"):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(sent)
        assert ask(url).headers["x-qinglan-source"] == "model"
        page = httpx2.get(f"{url}/metrics", trust_env=False, timeout=120).text
    assert "qinglan_router_refused_total{" not in page
    assert "Traceback" not in (tmp_path / "router.log").read_text()


def test_the_openai_client_understands_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROUTER_KEY", "s3cret")
    settings = (NO_DEADLINE, "serve.api_key_env=ROUTER_KEY")
    with stub() as (_, old), router(tmp_path, Routes(champion=backend(old, "1")), *settings) as (_, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret") as client:
            messages = [{"role": "user", "content": QUESTION}]
            answer = client.chat.completions.create(model="champion", messages=messages, extra_body={"profile": "孕妇"})
            stream = list(client.chat.completions.create(model="champion", messages=messages, stream=True))
            assert [model.id for model in client.models.list()] == ["qinglan.sample.query_rewrite", "champion"]
            with pytest.raises(openai.NotFoundError, match="`gpt-5` does not exist"):
                client.chat.completions.create(model="gpt-5", messages=messages)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as other, pytest.raises(openai.AuthenticationError):
            other.models.list()
    assert answer.choices[0].message.content == "益生菌 服用时间 饭前饭后"
    assert answer.model_extra["qinglan"]["source"] == "model"
    assert [chunk.choices[0].delta.content for chunk in stream] == ["益生菌 服用时间 饭前饭后"]


def test_bad_settings_are_one_line(tmp_path: Path):
    argv = ["-m", "qinglan.serving.router", "--profile", "embedded", "--routes", str(tmp_path / "r"), "--set"]
    done = subprocess.run([sys.executable, *argv, "serve.host=0.0.0.0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: profile" in done.stderr
    assert "set api_key_env" in done.stderr
    assert "Traceback" not in done.stderr
