"""The router in front of scripted models: questions, answers, failures, and routes in force."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from doubles import Clock
from fake_service import completion, script_of
from starlette.testclient import TestClient

from qinglan.clients.limits import CircuitBreaker
from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe
from qinglan.rows import Row, row_id
from qinglan.serving import request_handler, router
from qinglan.serving.request_handler import (
    CIRCUIT_FAILURES,
    CIRCUIT_OPEN_FOR_S,
    LAG_EVERY_S,
    EventLoopLag,
    ModelClient,
    RequestHandler,
    ServedAnswer,
)
from qinglan.serving.router import create_app
from qinglan.serving.routes import CHECK_EVERY_S, Backend, Routes, RouteTable

QUESTION = "请问菌粉睡前吃行不行呀"
REWRITE = "益生菌 服用时间 饭前饭后"
NOWHERE = "http://127.0.0.1:9/v1"
REPLY = (200, completion(REWRITE))


def body_of(query: Any = QUESTION, **more: Any) -> dict[str, Any]:
    return {"model": "champion", "messages": [{"role": "user", "content": query}], **more}


def backend(url: str, version: str = "7") -> Backend:
    return Backend(url=url, model="student", version=version)


class Site:
    """A router under test: its profile, its routes file, its client."""

    def __init__(self, stack: ExitStack, profile: Profile, folder: Path) -> None:
        self._stack = stack
        self.profile = profile
        self.path = folder / "routes.json"

    def client(self, url: str | None = None, observer: Any = None) -> TestClient:
        if url:
            Routes(champion=backend(url)).write(self.path)
        return self._stack.enter_context(
            TestClient(create_app(self.profile, self.path, observer), "http://localhost")
        )


class FailingObserver:
    """Notes what it is given, and then fails, which costs no answer."""

    def __init__(self) -> None:
        self.served: list[tuple[ServedAnswer, Row]] = []

    def on_served(self, served: ServedAnswer, question: Row) -> None:
        self.served.append((served, question))
        raise RuntimeError("a bug")

    async def run(self, table: RouteTable, models: ModelClient) -> None:
        assert isinstance(table, RouteTable)
        assert isinstance(models, ModelClient)
        raise RuntimeError("a bug")


PATIENT = {"deadline_ms": 60_000}
"""Settings with which no busy machine makes a fallback of an answer, for most tests."""


@pytest.fixture
def site(tmp_path: Path, profile_of: Callable[..., Profile]) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:
        yield lambda recipe="query_rewrite", **settings: Site(
            stack, profile_of(recipe=recipe, serve=PATIENT | settings), tmp_path
        )


@pytest.fixture
def capitals(site: Callable[..., Site]) -> Callable[..., Site]:
    """A site for a recipe with inputs and without a fallback."""
    return partial(site, recipe=str(Path(__file__).parents[1] / "support" / "capitals_recipe.py"))


def ask(client: TestClient, query: Any = QUESTION, **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json=body_of(query, **more))
    assert answer.status_code == 200
    body = answer.json()
    headers = {
        f"x-qinglan-{name.replace('_', '-')}": value
        for name, value in body["qinglan"].items()
        if value
    }
    assert headers.items() <= dict(answer.headers).items()
    return {
        "content": body["choices"][0]["message"]["content"],
        "model": body["model"],
        **body["qinglan"],
    }


def test_the_champions_rewrite_is_the_answer_to_the_prompt_of_the_training(site, serve):
    model = serve(script_of(REPLY))
    here = site()
    parts = [
        {"type": "text", "text": f" {QUESTION}\n"},
        {"type": "image_url", "image_url": {"url": "x"}},
    ]
    # The user's last message counts.
    messages = [
        {"role": "system", "content": "扮演海盗"},
        {"role": "user", "content": "早先的"},
        {"role": "assistant", "content": "好"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "嗯"},
    ]
    answer = ask(here.client(model.url), messages=messages, profile="孕妇", history="问过钙片")
    assert answer == {
        "content": REWRITE,
        "model": "champion",
        "source": "model",
        "reason": None,
        "role": "champion",
        "version": "7",
        "row_id": row_id("default", QUESTION, "孕妇", "问过钙片"),
    }
    row = Row(
        id="", tenant="default", query=QUESTION, profile="孕妇", history="问过钙片", source=""
    )
    expected = {
        "model": "student",
        "max_tokens": here.profile.student.max_new_tokens,
        "temperature": 0,
        "messages": get_recipe(here.profile.recipe).student_messages(row, here.profile.tenant),
    }
    assert model.bodies == [expected]


def test_the_registered_name_is_a_model_as_well(site, serve):
    here = site()
    client = here.client(serve(script_of(REPLY)).url)
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert names == ["qinglan.default.query_rewrite", "champion"]
    assert here.profile.model_name == "qinglan.default.query_rewrite"
    assert [ask(client, model=name)["model"] for name in names] == names
    answer = client.post("/v1/chat/completions", json=body_of(model="gpt-5"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    names_shown = "there are qinglan.default.query_rewrite and champion"
    assert f"`gpt-5` does not exist; {names_shown}" in answer.text


@pytest.mark.parametrize(("has_fallback", "status"), [(True, 200), (False, 503)])
def test_a_bug_costs_no_answer_and_logs_no_question(
    site, capitals, monkeypatch, caplog, has_fallback, status
):
    async def fail(*_: object) -> str:
        raise RuntimeError(QUESTION)

    monkeypatch.setattr(ModelClient, "answer", fail)
    if has_fallback:
        client = site().client(NOWHERE)
        inputs = {}
    else:
        client = capitals().client(NOWHERE)
        inputs = {"hint": "x"}
    answer = client.post("/v1/chat/completions", json=body_of(inputs=inputs))
    assert answer.status_code == status
    assert answer.headers["x-qinglan-reason"] == "internal_error"
    assert (QUESTION in answer.text) == has_fallback
    assert "RuntimeError" in caplog.text
    assert QUESTION not in caplog.text


def test_a_stream_is_one_chunk_with_the_tokens_behind_it_if_asked_for_and_the_end(site, serve):
    client = site().client(serve(script_of(REPLY)).url)
    answer = client.post(
        "/v1/chat/completions", json=body_of(stream=True, stream_options={"include_usage": True})
    )
    chunk, counted, end, rest = answer.text.split("\n\n")
    last = json.loads(counted.removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 110
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert end == "data: [DONE]"
    assert rest == ""
    body = json.loads(chunk.removeprefix("data: "))
    assert body["object"] == "chat.completion.chunk"
    assert body["choices"][0]["delta"]["content"] == REWRITE
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ((500, {"error": "x"}), "model_error"),
        ((200, b"<html>"), "model_error"),
        ((200, {"choices": []}), "model_error"),
        (None, "model_unreachable"),
        ((200, completion(None)), "empty_answer"),
        # Half a character is no text.
        ((200, json.dumps(completion("\ud83d")).encode()), "invalid_text"),
        ((200, completion("词" * 201)), "rewrite_too_long"),
        ((200, completion("抱歉，我无法回答这个问题")), "boilerplate"),
        ((200, completion("钙片 钙片 钙片 钙片")), "repetitive_rewrite"),
        ((200, completion(REWRITE, "length")), "truncated"),
    ],
)
def test_without_a_usable_rewrite_the_question_is_the_answer(site, serve, reply, reason):
    client = site().client(serve(lambda _: reply).url)
    for _ in range(CIRCUIT_FAILURES):
        answer = ask(client)
        assert answer["content"] == QUESTION
        assert answer["source"] == "fallback"
        assert answer["reason"] == reason
        assert answer["role"] == "champion"
        assert answer["version"] == "7"
    # A server is not at fault for what its model wrote.
    is_at_fault = reason in ("model_error", "model_unreachable")
    circuit = client.get("/health").json()["champion"]["circuit"]
    assert circuit == ("open" if is_at_fault else "closed")


def test_a_slow_model_is_given_up_before_the_deadline(site, serve):
    released = threading.Event()
    model = serve(lambda _: released.wait(60) and REPLY)
    observer = FailingObserver()
    answer = ask(site(deadline_ms=200).client(model.url, observer))
    released.set()
    assert answer["reason"] == "model_timeout"
    assert 150 < observer.served[0][0].latency_ms < 30_000


def test_a_connection_that_had_been_closed_is_opened_again(site, serve):
    client = site().client(serve(script_of(REPLY, None, REPLY)).url)
    assert [ask(client)["source"] for _ in range(2)] == ["model", "model"]


@pytest.mark.parametrize(
    ("settings", "query", "more", "reason"),
    [
        ({"max_query_chars": 5}, "菌粉睡前吃", {}, None),
        ({"max_query_chars": 5}, "菌粉睡前吃吗", {}, "query_too_long"),
        (
            {"max_context_chars": 5},
            QUESTION,
            {"profile": "孕妇", "history": "问过钙片"},
            "context_too_long",
        ),
        ({}, "？！😀", {}, "empty_query"),
    ],
)
def test_what_the_model_is_not_meant_for_is_not_asked(site, serve, settings, query, more, reason):
    model = serve(script_of(REPLY))
    answer = ask(site(**settings).client(model.url), query, **more)
    assert answer["reason"] == reason
    assert len(model.bodies) == (reason is None)


def test_more_at_once_than_allowed_are_answered_at_once(site, serve):
    is_asked = threading.Event()
    released = threading.Event()
    model = serve(lambda _: is_asked.set() or (released.wait(60) and REPLY))
    client = site(max_in_flight=1).client(model.url)
    first: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: first.append(ask(client)))
    waiting.start()
    assert is_asked.wait(60)
    second = ask(client)
    released.set()
    waiting.join()
    assert first[0]["source"] == "model"
    assert second["reason"] == "overloaded"
    assert len(model.bodies) == 1


def test_a_failing_model_is_left_alone_then_tried_again(site, serve, clock, monkeypatch):
    monkeypatch.setattr(request_handler, "CircuitBreaker", partial(CircuitBreaker, clock=clock))
    mended = threading.Event()

    def answer(_: object) -> Any:
        return REPLY if mended.is_set() else (503, {})

    model = serve(answer)
    client = site().client(model.url)
    reasons = [ask(client)["reason"] for _ in range(CIRCUIT_FAILURES + 2)]
    assert reasons == ["model_error"] * CIRCUIT_FAILURES + ["circuit_open"] * 2
    assert client.get("/health").json()["champion"] == {"version": "7", "circuit": "open"}
    mended.set()
    clock.now += CIRCUIT_OPEN_FOR_S
    assert ask(client)["source"] == "model"
    assert client.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (body_of("词" * 1000), "the body has more than 1000 bytes"),
        (b"{", "`content`: Invalid JSON"),
        (b'{"messages": [{"role": "user", "content": 7}]}', "messages.0.content"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "there is no user message"),
        (body_of(inputs={}), "inputs.hint: is missing or empty; it is part of what is asked"),
        (
            body_of(inputs={"hint": "x", "hnt": "y"}),
            "inputs: there is no `hnt` here, but capital, given, hint",
        ),
    ],
)
def test_what_is_too_large_or_lacks_a_question_or_an_input_is_refused_in_one_line(
    capitals, body, words
):
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = capitals(max_body_bytes=1000).client().post("/v1/chat/completions", content=content)
    is_too_large = "1000 bytes" in words
    assert answer.status_code == (413 if is_too_large else 400)
    assert answer.headers.get("connection") == ("close" if is_too_large else None)
    error = answer.json()["error"]
    assert error["code"] == "invalid_request_error"
    assert "\n" not in error["message"]
    assert words in error["message"]


async def test_a_body_that_never_comes_is_given_up(site, monkeypatch):
    monkeypatch.setattr(router, "BODY_WITHIN_S", 0.01)
    here = site()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "query_string": b"",
    }
    await create_app(here.profile, here.path)(scope, receive, send)
    assert sent[0]["status"] == 408


@pytest.mark.parametrize(
    ("sent_before_s", "lag_s", "reason"),
    [
        (0, 0, "model_unreachable"),
        (1000, 0, "overloaded"),
        (400, 300, "model_unreachable"),
        (400, 500, "overloaded"),
    ],
)
async def test_a_request_that_has_waited_for_long_gets_the_question(
    site, sent_before_s, lag_s, reason
):
    here = site(deadline_ms=800_000)
    Routes(champion=backend(NOWHERE)).write(here.path)
    models = ModelClient(here.profile)
    row = Row(id=row_id("default", QUESTION), tenant="default", query=QUESTION, source="")
    rewriter = RequestHandler(here.profile.serve, RouteTable(here.path), models, lambda: lag_s)
    served = await rewriter.answer(row, time.perf_counter() - sent_before_s)
    await models.close()
    assert served.reason == reason
    assert (served.role == "none") == (reason == "overloaded")


async def test_a_blocked_loop_is_felt():
    lag = EventLoopLag()
    assert lag.lag_s() == 0
    running = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251 (this is what is felt)
    assert lag.lag_s() >= 0.25
    await asyncio.sleep(LAG_EVERY_S + 0.01)
    assert lag.lag_s() < 0.25
    running.cancel()


def test_a_key_is_asked_for_where_one_is_set(site, monkeypatch):
    monkeypatch.setenv("ROUTER_KEY", "s3cret")
    client = site(api_key_env="ROUTER_KEY").client()
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "s3cret"},
        {"authorization": "Bearer 密"},
    ):
        raw = {name: value.encode() for name, value in headers.items()}
        assert client.post("/v1/chat/completions", json=body_of(), headers=raw).status_code == 401
    assert client.get("/v1/models").status_code == 401
    assert client.get("/metrics").status_code == 401
    assert client.get("/health").status_code == 200
    assert not {"problem", "challenger_dropped"} & client.get("/health").json().keys()
    right = {"authorization": "Bearer s3cret"}
    assert client.post("/v1/chat/completions", json=body_of(), headers=right).status_code == 200
    with pytest.raises(
        ConfigError, match=r"serve\.api_key_env needs the environment variable NOT_SET"
    ):
        site(api_key_env="NOT_SET").client()


def test_without_any_model_the_question_is_the_answer_but_not_to_a_page_from_elsewhere_in_a_browser(
    site,
):
    client = site().client()
    answer = ask(client)
    assert answer["content"] == QUESTION
    assert answer["reason"] == "no_model"
    assert answer["role"] == "none"
    assert client.get("/health").json()["status"] == "degraded"

    def status_of(headers: dict[str, str]) -> int:
        return client.post("/v1/chat/completions", json=body_of(), headers=headers).status_code

    for origin in ("http://evil.test", "null", "http://["):
        assert status_of({"origin": origin}) == 403, origin
    assert status_of({"origin": "http://evil.test", "host": "evil.test"}) == 403
    assert status_of({"origin": str(client.base_url).rstrip("/")}) == 200


def test_other_machines_are_let_in_with_a_key_only(profile_of):
    for host in ("0.0.0.0", "::", "192.168.1.5", "router.internal"):
        with pytest.raises(ValueError, match="can be reached from other machines; set api_key_env"):
            profile_of(serve={"host": host})
    for host in ("127.8.8.8", "::1", "localhost"):
        assert profile_of(serve={"host": host}).serve.api_key_env is None


def test_an_observer_is_given_every_answer_and_its_mistake_costs_none(site, serve, caplog):
    observer = FailingObserver()
    client = site().client(serve(script_of(REPLY)).url, observer)
    assert [ask(client, profile="孕妇")["source"] for _ in range(2)] == ["model", "model"]
    (served, question), _ = observer.served
    assert (served.role, served.source, served.answer) == ("champion", "model", REWRITE)
    assert question.profile == "孕妇"
    assert served.row_id == question.id
    assert "the canary's observer stopped" in caplog.text
    assert "the canary's observer did not take an answer" in caplog.text


def test_metrics_count_by_role_version_and_reason(site, serve):
    client = site().client(serve(script_of(REPLY, (503, {}))).url)
    ask(client)
    ask(client)
    client.post("/v1/chat/completions", content=b"{")
    page = client.get("/metrics").text
    for reason, source in (("", "model"), ("model_error", "fallback")):
        labels = f'reason="{reason}",role="champion",source="{source}",version="7"'
        assert f"qinglan_router_answers_total{{{labels}}} 1.0" in page
    labels = 'le="2.0",role="champion",source="model"'
    assert f"qinglan_router_latency_seconds_bucket{{{labels}}} 1.0" in page
    assert 'qinglan_router_refused_total{status="400"} 1.0' in page
    assert "qinglan_router_serving 1.0" in page
    assert QUESTION not in page


def test_the_challenger_gets_its_share(site, serve):
    champion = serve(lambda _: (200, completion("旧 模型")))
    challenger = serve(lambda _: (200, completion("新 模型")))
    here = site()
    Routes(
        champion=backend(champion.url), challenger=backend(challenger.url, "8"), share=0.3
    ).write(here.path)
    client = here.client()
    answers = [ask(client, f"问题{i}") for i in range(40)]
    texts_by_role = {(answer["role"], answer["content"]) for answer in answers}
    assert texts_by_role == {("champion", "旧 模型"), ("challenger", "新 模型")}
    assert 4 <= len(challenger.bodies) <= 22


def test_inputs_reach_the_prompt(capitals, serve):
    model = serve(script_of((200, completion("巴黎 是首都")), (200, completion("长" * 300))))
    client = capitals().client(model.url)
    answer = ask(client, "法国的首都", inputs={"hint": " 塞纳河 "})
    assert answer["content"] == "巴黎"
    assert answer["source"] == "model"
    long_answer = ask(client, "法国", inputs={"hint": "x"})["content"]
    assert long_answer == "长" * 300, "no limit, unless one is set"
    assert answer["row_id"] == row_id("default", "法国的首都", inputs={"hint": "塞纳河"})
    assert model.bodies[0]["messages"] == [{"role": "user", "content": "法国的首都（塞纳河）"}]


@pytest.mark.parametrize(
    ("reply", "settings", "status", "reason"),
    [
        ((500, {}), {}, 503, "model_error"),
        ((200, completion(" ")), {}, 503, "empty_answer"),
        ((200, completion("长" * 300)), {"max_answer_chars": 299}, 503, "answer_too_long"),
        # This is the client's error.
        (None, {"max_context_chars": 3}, 400, "context_too_long"),
    ],
)
def test_without_a_fallback_a_failure_is_an_error(capitals, serve, reply, settings, status, reason):
    observer = FailingObserver()
    client = capitals(**settings).client(serve(lambda _: reply).url, observer)
    answer = client.post("/v1/chat/completions", json=body_of("法国", inputs={"hint": "塞纳河畔"}))
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == reason
    assert answer.headers["x-qinglan-source"] == "none"
    assert answer.headers["x-qinglan-reason"] == reason
    assert "法国" not in answer.text
    assert observer.served[0][0].source == "none"


ONE, TWO, THREE = (backend(NOWHERE, version) for version in "123")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "routes.json"


def test_a_new_file_counts_once_it_is_looked_for_and_a_broken_one_changes_nothing(
    path, clock, caplog
):
    table = RouteTable(path, clock)
    assert table.pick("a") is None
    Routes(champion=ONE).write(path)
    clock.now += CHECK_EVERY_S
    assert table.pick("a") == ("champion", ONE)
    path.write_text('{"champion": 1}')
    assert table.pick("a") == ("champion", ONE)
    assert table.problem is None
    for _ in range(2):
        clock.now += CHECK_EVERY_S
        assert table.pick("a") == ("champion", ONE)
    assert "the routes before it stay" in table.problem
    assert len(caplog.records) == 1
    Routes(champion=TWO).write(path)
    assert table.pick("a") == ("champion", ONE)
    clock.now += CHECK_EVERY_S
    assert table.pick("a") == ("champion", TWO)
    assert table.problem is None
    path.unlink()
    clock.now += CHECK_EVERY_S
    assert table.pick("a") is None


def test_a_dropped_challenger_stays_out_until_the_file_says_otherwise(path, clock):
    Routes(champion=ONE, challenger=TWO, share=1.0).write(path)
    table = RouteTable(path, clock)
    assert table.pick("a") == ("challenger", TWO)
    table.drop_challenger("it failed")
    assert table.pick("a") == ("champion", ONE)
    assert table.routes.share == 0.0
    assert table.dropped_reason == "it failed"
    Routes(champion=ONE, challenger=TWO, share=0.5).write(path)
    clock.now += CHECK_EVERY_S
    assert table.pick("a") == ("champion", ONE)
    # The canary of the dropped one is over.
    table.allow_challenger()
    assert table.routes.challenger == TWO
    table.drop_challenger("it failed again")
    Routes(champion=ONE, challenger=THREE, share=1.0).write(path)
    clock.now += CHECK_EVERY_S
    assert table.pick("a") == ("challenger", THREE)
    assert table.dropped_reason is None


def test_the_split_is_sticky_and_as_large_as_asked(path):
    ids = [f"{number:016x}" for number in range(4000)]

    def chosen(challenger: Backend, share: float) -> set[str]:
        Routes(champion=ONE, challenger=challenger, share=share).write(path)
        table = RouteTable(path)
        return {row_id for row_id in ids if table.pick(row_id) == ("challenger", challenger)}

    tenth = chosen(TWO, 0.1)
    assert 330 < len(tenth) < 470
    assert tenth < chosen(TWO, 0.2)
    assert tenth != chosen(THREE, 0.1)
    assert chosen(TWO, 0.0) == set()
    assert chosen(TWO, 1.0) == set(ids)


def test_a_circuit_opens_after_failures_in_a_row_and_lets_one_request_through_after_a_pause(clock):
    circuit = CircuitBreaker(3, 1.0, clock)
    for has_ended in (circuit.failed, circuit.answered, circuit.failed, circuit.failed):
        circuit.sent()
        has_ended()
    assert (circuit.is_open, circuit.wait_s()) == (False, 0)
    circuit.failed()
    assert (circuit.is_open, circuit.wait_s()) == (True, 1.0)
    clock.now += 1
    assert circuit.wait_s() == 0
    circuit.sent(ends_within_s=10)
    assert circuit.wait_s() == 10, "one request at a time"
    clock.now += 2
    circuit.failed()
    assert circuit.wait_s() == 1
    circuit.answered()
    assert (circuit.is_open, circuit.wait_s()) == (False, 0)
