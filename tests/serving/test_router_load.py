"""The router as a process of its own: how it starts, stops and takes clients of every kind."""

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import openai
import pytest

from qinglan.serving.connections import HEAD_WITHIN_S
from qinglan.serving.routes import Backend, Routes

pytestmark = [pytest.mark.slow, pytest.mark.extended]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "router.py"
QUESTION = "请问菌粉睡前吃行不行呀"


@contextmanager
def process(log: Path, *argv: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and the address that its first line says."""
    with log.open("w") as errors:
        started = subprocess.Popen(
            [sys.executable, *argv], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()
            started.communicate()


@contextmanager
def router(folder: Path, *settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A router with a champion, and without a deadline that a busy machine could miss."""
    stub = (str(BENCHMARK), "--stub", "0", "--model-ms", "5")
    with process(folder / "model.log", *stub) as (_, model_url):
        routes = folder / "routes.json"
        Routes(champion=Backend(url=f"{model_url}/v1", model="m", version="1")).write(routes)
        argv = [
            "-m",
            "qinglan.serving.router",
            "--profile=embedded",
            f"--routes={routes}",
            "--port=0",
        ]
        argv += [f"--set={setting}" for setting in ("serve.deadline_ms=60000", *settings)]
        with process(folder / "router.log", *argv) as (started, url):
            yield started, url


def ask(url: str) -> httpx2.Response:
    body = {"model": "champion", "messages": [{"role": "user", "content": QUESTION}]}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=120)


def test_stopping_answers_what_came_in_and_finishes_the_log(tmp_path: Path):
    log = tmp_path / "log"
    settings = (f"serve.request_log.folder={log}", "serve.request_log.consent=all")
    with router(tmp_path, *settings) as (running, url):
        assert ask(url).headers["x-qinglan-source"] == "model"
        running.terminate()
        running.wait(300)
    assert [path.suffix for path in log.iterdir()] == [".jsonl"]
    assert QUESTION in next(log.iterdir()).read_text()


def test_a_client_that_hangs_up_is_no_error(tmp_path: Path):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}]}).encode()
    with router(tmp_path) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        for sent in (head % (len(body), body), head % (len(body) + 1, body), b"POST /v1/chat"):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(sent)
        assert ask(url).headers["x-qinglan-source"] == "model"
        page = httpx2.get(f"{url}/metrics", trust_env=False, timeout=120).text
    assert "qinglan_router_refused_total{" not in page
    assert "Traceback" not in (tmp_path / "router.log").read_text()


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n{"])
def test_clients_that_send_nothing_more_keep_no_other_waiting(tmp_path: Path, sent: bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        # Most shells have this limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        _, url = stack.enter_context(router(tmp_path))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_000, hard), hard))
        assert ask(url).headers["x-qinglan-source"] == "model"
        host, port = url.removeprefix("http://").split(":")
        for _ in range(min(2_000, hard - 200)):
            stack.enter_context(socket.create_connection((host, int(port)))).sendall(sent)
        start = time.monotonic()
        assert ask(url).headers["x-qinglan-source"] == "model"
        print(f"answered after {time.monotonic() - start:.2f} s")
        assert time.monotonic() - start < HEAD_WITHIN_S, (
            "it did not wait until the others were hung up on"
        )


def test_the_openai_client_understands_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROUTER_KEY", "s3cret")
    with router(tmp_path, "serve.api_key_env=ROUTER_KEY") as (_, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="s3cret") as client:
            messages = [{"role": "user", "content": QUESTION}]
            answer = client.chat.completions.create(
                model="champion", messages=messages, extra_body={"profile": "孕妇"}
            )
            stream = list(
                client.chat.completions.create(model="champion", messages=messages, stream=True)
            )
            with pytest.raises(openai.NotFoundError, match="`gpt-5` does not exist"):
                client.chat.completions.create(model="gpt-5", messages=messages)
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client_with_wrong_key,
            pytest.raises(openai.AuthenticationError),
        ):
            client_with_wrong_key.models.list()
    assert answer.choices[0].message.content == "益生菌 服用时间 饭前饭后"
    assert answer.model_extra["qinglan"]["source"] == "model"
    assert answer.usage
    assert answer.usage.total_tokens == 110
    assert [chunk.choices[0].delta.content for chunk in stream] == ["益生菌 服用时间 饭前饭后"]


def test_bad_settings_are_one_line(tmp_path: Path):
    argv = [
        sys.executable,
        "-m",
        "qinglan.serving.router",
        "--profile=embedded",
        f"--routes={tmp_path / 'r'}",
        "--set=serve.host=0.0.0.0",
    ]
    ended = subprocess.run(argv, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "error: profile" in ended.stderr
    assert "Traceback" not in ended.stderr
