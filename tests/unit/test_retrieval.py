"""The RAG's contract over real HTTP: what is sent, what breaks it, what is tried again and how that is counted."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conftest import FakeService, Script, recall

from qinglan.config import Rag
from qinglan.errors import ConfigError, RetrievalError
from qinglan.retrieval import RagClient, read_answer

Serve = Callable[[Script], FakeService]
FOUND = (200, recall(("d1", 0.9), ("d2", 0.4)))


@asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[RagClient]:
    made = RagClient(Rag.model_validate({"kb_name": "kb", "max_retries": 2, "timeout_s": 5} | options), url, "t1")
    try:
        yield made
    finally:
        await made.close()


def script_of(*replies: Any) -> Script:
    left = list(replies)
    return lambda _: left.pop(0) if len(left) > 1 else left[0]


async def test_request_and_answer(serve: Serve):
    service = serve(script_of(FOUND))
    async with client(service.url, top_k=5, score_threshold=0.2) as rag:
        found = await rag.retrieve("原话", "改写")
        await rag.retrieve("原话")
    body = {"query": "原话", "tenant_id": "t1", "kb_name": "kb", "top_k": 5, "score_threshold": 0.2}
    assert service.bodies == [body | {"rewritten_query": "改写"}, body]
    assert (found.ids, found.scores, found.rank("d2")) == (("d1", "d2"), (0.9, 0.4), 2)


def test_numbers_as_ids_and_titles_from_content():
    answer = b'{"data": {"recall": [{"id": 7, "content": "abc", "reranker_score": 1, "extra": 0}]}, "code": 0}'
    found = read_answer(answer, "u")
    assert (found.ids, found.titles) == (("7",), ("abc",))


def test_nothing_recalled_is_an_answer():
    assert read_answer(b'{"data": {"recall": []}}', "u").scores == ()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"recall": []}', "`data` is missing"),
        ('{"data": {"recall": null}}', "`data.recall`"),
        ('{"data": null, "code": 500, "msg": "busy"}', "`data`"),
        ('{"data": {"recall": [{"content": "x", "reranker_score": 1.2}]}}', "less than or equal to 1, got 1.2"),
        ('{"data": {"recall": [{"content": "x", "reranker_score": -3}]}}', "greater than or equal to 0, got -3"),
        ('{"data": {"recall": [{"content": "x", "reranker_score": NaN}]}}', "reranker_score"),
        ('{"data": {"recall": [{"content": "x"}]}}', "`data.recall.0.reranker_score` is missing"),
        ('{"data": {"recall": [{"reranker_score": 0.5}]}}', "`data.recall.0.content` is missing"),
        ("<html>" + 5000 * "x", "`answer`: Invalid JSON"),
        (
            '{"data": {"recall": [{"content": "x", "reranker_score": 0.1}, {"content": "y", "reranker_score": 0.2}]}}',
            "not sorted by reranker_score",
        ),
    ],
)
def test_broken_answers_say_what_is_wrong(answer: str, message: str):
    with pytest.raises(RetrievalError) as caught:
        read_answer(answer.encode(), "http://rag")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert (caught.value.reason, caught.value.transient) == ("rag_bad_answer", False)


@pytest.mark.parametrize("fault", [(503, {}), (429, {}), None])
async def test_weather_is_retried(serve: Serve, fault: Any):
    async with client(serve(script_of(fault, fault, FOUND)).url) as rag:
        assert (await rag.retrieve("q")).ids == ("d1", "d2")
        assert (rag.call_count, rag.failed_count) == (3, 2)


async def test_retries_end(serve: Serve):
    service = serve(script_of((500, {})))
    async with client(service.url) as rag:
        with pytest.raises(RetrievalError, match="HTTP 500") as caught:
            await rag.retrieve("q")
        assert (caught.value.reason, caught.value.transient) == ("rag_unavailable", True)
        assert (rag.call_count, rag.failed_count, len(service.bodies)) == (3, 3, 3)


async def test_retry_after_is_honoured(serve: Serve):
    start = time.monotonic()
    async with client(serve(script_of((429, {}, {"retry-after": "0.3"}), FOUND)).url) as rag:
        await rag.retrieve("q")
    assert time.monotonic() - start >= 0.3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [((400, {"detail": "no such kb"}), "rag_refused"), ((302, b""), "rag_refused"), ((200, {}), "rag_bad_answer")],
)
async def test_a_refusal_or_a_broken_contract_is_not_tried_again_but_counted(serve: Serve, reply: Any, reason: str):
    async with client(serve(script_of(reply)).url) as rag:
        with pytest.raises(RetrievalError) as caught:
            await rag.retrieve("q")
        assert (caught.value.reason, rag.call_count, rag.failed_count) == (reason, 1, 1)


async def test_nobody_there_and_garbled_bodies(serve: Serve):
    garbled = serve(script_of((200, b"not gzip", {"content-encoding": "gzip"})))
    for url in ("http://127.0.0.1:9/q", garbled.url):
        async with client(url, max_retries=0) as rag:
            with pytest.raises(RetrievalError, match="rag http"):
                await rag.retrieve("q")


async def test_the_token_is_sent_but_in_no_error(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAG_KEY", "s3cret")
    service = serve(script_of((403, {"detail": "no"})))
    async with client(service.url, api_key_env="RAG_KEY") as rag:
        with pytest.raises(RetrievalError) as caught:
            await rag.retrieve("q")
    assert service.headers[0]["authorization"] == "Bearer s3cret"
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("value", ["s3cret\nx", "s3crét", "s3cret\x00"])
def test_a_token_that_no_header_can_hold_is_refused_unseen(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setattr("os.environ", {"RAG_KEY": value})
    with pytest.raises(ConfigError, match="rag: the value of RAG_KEY has characters") as caught:
        RagClient(Rag(api_key_env="RAG_KEY"), "http://127.0.0.1:9", "t")
    assert "s3cr" not in str(caught.value)


async def test_no_more_requests_at_once_than_allowed(serve: Serve):
    at_once: list[int] = [0, 0]

    def slow(_: Any) -> Any:
        at_once[0] += 1
        at_once[1] = max(at_once)
        time.sleep(0.03)
        at_once[0] -= 1
        return FOUND

    async with client(serve(slow).url, concurrency=2) as rag:
        await asyncio.gather(*(rag.retrieve(str(n)) for n in range(6)))
    assert at_once[1] == 2
