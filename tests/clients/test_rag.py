"""The RAG's contract over real HTTP: what is sent, what breaks it, what is tried again and how that
is counted; and the services that docs/how-to/rag.md shows, run as they stand there."""

import itertools
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_service import recall, script_of, trickle
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from fixture_types import Serve
from pydantic import BaseModel, Field

from qinglan.clients import limits
from qinglan.clients.contract import Ask, examine
from qinglan.clients.rag import CallCount, RagClient, request_body
from qinglan.clients.rag.answers import Passage, read_answer, read_passages
from qinglan.config import Rag
from qinglan.errors import ConfigError, RetrievalError

FOUND = (200, recall(("d1", 0.9), ("d2", 0.4)))
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "rag.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
PRODUCTS = ("鱼油", "维生素C", "钙片", "阿胶", "虾青素")
INTENTS = ("一天吃几粒", "怎么存放")
BOOKS = [product + intent for product in PRODUCTS for intent in INTENTS]
RAG = Rag(kb_name="kb", top_k=3)


@asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[RagClient]:
    settings = {"kb_name": "kb", "max_retries": 2, "timeout_s": 5} | options
    rag_client = RagClient(Rag.model_validate(settings), url, "t1")
    try:
        yield rag_client
    finally:
        await rag_client.close()


async def test_request_and_answer(serve: Serve):
    service = serve(script_of(FOUND))
    async with client(service.url, top_k=5, score_threshold=0.2) as rag:
        retrieved = await rag.retrieve("原话", "改写")
        await rag.retrieve("原话")
    body = {"query": "原话", "tenant_id": "t1", "kb_name": "kb", "top_k": 5, "score_threshold": 0.2}
    assert service.bodies == [body | {"rewritten_query": "改写"}, body]
    assert (retrieved.ids, retrieved.scores) == (("d1", "d2"), (0.9, 0.4))
    assert retrieved.rank("d2") == 2


def test_an_answer_may_be_empty_and_fields_are_read_leniently():
    assert read_answer(RAG, b'{"data": {"recall": []}}', "u").scores == ()
    answer = passages(
        '{"id": 7, "content": "abc", "reranker_score": 1, "title": null, "extra": 0}',
        '{"content": "d", "reranker_score": 1}',
    )
    retrieved = read_answer(RAG, answer.encode(), "u")
    assert retrieved.ids == ("7", None)
    assert retrieved.titles == ("abc", "d")
    assert retrieved.scores == (1.0, 1.0)


def passages(*texts: str) -> str:
    return f'{{"data": {{"recall": [{", ".join(texts)}]}}}}'


def scored(*scores: object) -> str:
    return passages(*(f'{{"content": "x", "reranker_score": {score}}}' for score in scores))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            '{"recall": []}',
            "`data` is missing (found: recall); the passages belong under `data.recall`, as a list",
        ),
        ("{}", "`data` is missing (the object is empty)"),
        ("[]", "it is a list; the passages belong under `data.recall`"),
        ('{"data": []}', "`data` is a list; the passages belong under `data.recall`"),
        (
            '{"data": null, "msg": "kb\\n not \\u001b[31mfound"}',
            '`data` is null and `msg` says "kb not [31mfound"',
        ),
        ('{"data": {"docs": []}}', "`data.recall` is missing (found: docs)"),
        (
            '{"data": {"recall": null}}',
            "`data.recall` is null; the passages belong under `data.recall`, as a",
        ),
        (
            passages('{"reranker_score": 0.5}'),
            "`data.recall[0].content` is missing (found: reranker_score)",
        ),
        (passages('{"page_content": "x"}'), "send `page_content` under this name"),
        (passages('{"content": "x", "score": 1}'), "send `score` under this name, in [0, 1]"),
        (
            passages('{"content": "x", "reranker_score": 1, "id": [1]}'),
            "`data.recall[0].id` is a list",
        ),
        (
            scored(0.9, 1.2),
            "`data.recall[1].reranker_score` is 1.2, outside [0, 1]; "
            "looks like a logit: send its sig",
        ),
        (scored(92.5, 31), "is 92.5, outside [0, 1]; looks like a percentage: divide by 100"),
        (scored(1.0000002, 0.3), "outside [0, 1]; looks like rounding: clip it"),
        (scored("NaN"), "`data.recall[0].reranker_score` is nan; send a number"),
        (scored('"0.9"'), '`data.recall[0].reranker_score` is the text "0.9"; send a number'),
        ("", "the body is empty"),
        ("<html>" + 5000 * "x", 'it is HTML, not JSON: "<html>xxx'),
        ("busy\n" + 5000 * "x", 'it is not JSON: "busy xxx'),
        (scored(0.1, 0.2), "data.recall[1] above the passage before (0.2 after 0.1)"),
        (scored(0.1, 0.2), "all of them rise: if it is a distance"),
        (
            scored(*[0.1, 0.2] * 5),
            "data.recall[1], data.recall[3], data.recall[5] and 2 more above",
        ),
    ],
)
def test_broken_answers_say_what_is_wrong_and_what_to_do(answer: str, message: str):
    with pytest.raises(RetrievalError) as caught:
        read_answer(RAG, answer.encode(), "http://rag")
    text = str(caught.value)
    assert text.startswith("rag http://rag: the answer breaks the contract: ")
    assert message in text
    assert len(text) < 400
    assert text.isprintable()
    assert (caught.value.reason, caught.value.transient) == ("rag_bad_answer", False)


def test_a_wrong_content_type_is_named_where_the_body_is_no_json():
    with pytest.raises(RetrievalError, match=r'content-type "text/html; charset=x"'):
        read_answer(RAG, b"<!doctype html>", "u", "text/html;\tcharset=x")
    assert read_answer(RAG, scored(0.5).encode(), "u", "text/plain").scores == (0.5,)


@pytest.mark.parametrize("fault", [(503, {}), (429, {}), None])
async def test_transient_failures_are_retried(serve: Serve, fault: Any):
    async with client(serve(script_of(fault, fault, FOUND)).url) as rag:
        assert (await rag.retrieve("q")).ids == ("d1", "d2")
        assert (rag.call_count, rag.failed_count, rag.transient_failures) == (3, 2, 0)


@pytest.mark.parametrize(
    ("reply", "reason", "calls"),
    [
        ((400, {"detail": "no such kb"}), "rag_refused", 1),
        ((302, b""), "rag_refused", 1),
        ((200, {}), "rag_bad_answer", 1),
        ((500, {}), "rag_unavailable", 3),
        ((200, recall(("x" * 100, 0.5))), "rag_bad_answer", 1),  # a body without end is not read
    ],
)
async def test_only_transient_failures_are_tried_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, reply: Any, reason: str, calls: int
):
    monkeypatch.setattr(limits, "MOST_BODY_BYTES", 100)
    async with client(serve(script_of(reply)).url) as rag:
        with pytest.raises(RetrievalError) as caught:
            await rag.retrieve("q")
        assert (caught.value.reason, caught.value.transient) == (reason, calls > 1)
        is_too_large = "x" * 100 in str(reply)
        hint = "more than 100 bytes; send fewer or shorter passages"
        assert (hint in str(caught.value)) == is_too_large
        counts = (rag.call_count, rag.failed_count, rag.transient_failures)
        assert counts == (calls, calls, calls > 1)


@pytest.mark.parametrize("status", [400, 200])
async def test_the_token_and_texts_that_a_service_repeats_are_in_no_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, status: int
):
    def echo(body: dict[str, Any]) -> Any:
        return status, {"detail": f"no answer to {body['query']} or {body['rewritten_query']}"}

    monkeypatch.setenv("RAG_KEY", "s3cret")
    service = serve(echo)
    async with client(service.url, api_key_env="RAG_KEY") as rag:
        with pytest.raises(RetrievalError, match="no answer to … or …") as caught:
            await rag.retrieve("我妈能吃虾青素吗", "虾青素 适用人群")
    assert service.headers[0]["authorization"] == "Bearer s3cret"
    assert "虾青素" not in str(caught.value)
    assert "s3cret" not in str(caught.value)


async def test_nobody_there_and_bodies_that_are_garbled_or_trickle(serve: Serve):
    garbled = serve(script_of((200, b"not gzip", {"content-encoding": "gzip"})))
    endless = serve(script_of((200, trickle())))
    late = r"the answer is not whole after 0\.2 s"
    for url, said in (("http://127.0.0.1:9/q", ""), (garbled.url, ""), (endless.url, late)):
        async with client(url, max_retries=0, timeout_s=0.2) as rag:
            with pytest.raises(RetrievalError, match=f"rag http.*{said}") as caught:
                await rag.retrieve("q")
        assert (caught.value.reason, caught.value.transient) == ("rag_unavailable", True)


@pytest.mark.parametrize("value", ["s3cret\nx", "s3crét", "s3cret\x00"])
def test_a_token_that_no_header_can_hold_is_refused_unseen(
    monkeypatch: pytest.MonkeyPatch, value: str
):
    monkeypatch.setattr("os.environ", {"RAG_KEY": value})
    with pytest.raises(ConfigError, match="rag: the value of RAG_KEY has characters") as caught:
        RagClient(Rag(api_key_env="RAG_KEY"), "http://127.0.0.1:9", "t")
    assert "s3cr" not in str(caught.value)


async def test_a_caller_can_count_its_own_requests_and_forgo_retries(serve: Serve):
    service = serve(script_of((503, {}), FOUND, (503, {})))
    first_count = CallCount()
    second_count = CallCount()
    async with client(service.url) as rag:
        await rag.retrieve("q", count=first_count)
        with pytest.raises(RetrievalError):
            await rag.retrieve("q", count=second_count, max_retries=0)
        assert (rag.call_count, rag.failed_count) == (3, 2)
    assert first_count == CallCount(2, 1)
    assert second_count == CallCount(1, 1)


def likeness(text: str, book: str) -> float:
    return len(set(text) & set(book)) / len(set(text) | set(book))


def guide_service(block: str, names: dict[str, Any], path: str, app: FastAPI) -> Ask:
    exec(compile(block, str(GUIDE), "exec"), names)
    if "kb_router" in names:
        app.include_router(names["kb_router"])
    client = TestClient(app)

    def ask(query: str, rewritten_query: str | None) -> list[Passage]:
        response = client.post(path, json=request_body(RAG, "t", query, rewritten_query))
        assert response.status_code == 200, response.text
        return read_passages(RAG, response.content, path)

    return ask


def returning(value: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def answer(*words: Any, **options: Any) -> Any:
        return value(*words, **options)

    return answer


def passage(text: str, book: str) -> SimpleNamespace:
    return SimpleNamespace(id=book, content=book, score=likeness(text, book))


def books_like(text: str, count: int) -> list[str]:
    return sorted(BOOKS, key=lambda book: -likeness(text, book))[:count]


def passages_like(text: str, books: list[str]) -> list[SimpleNamespace]:
    return [passage(text, book) for book in books]


def test_the_fastapi_service():
    app = FastAPI()
    names = {
        "app": app,
        "BaseModel": BaseModel,
        "Field": Field,
        "Any": Any,
        "rewrite": returning(lambda query: query + "怎么存放"),
        "retrieve": returning(lambda text, _kb, limit: books_like(text, limit)),
        "rerank": returning(passages_like),
    }
    ask = guide_service(BLOCKS[0], names, "/search", app)
    assert [finding.kind for finding in examine(ask, RAG, "鱼油吃几粒", "钙片存放")] == ["honoured"]
    too_long = request_body(RAG, "t", "问", "改" * 501)
    assert TestClient(app).post("/search", json=too_long).status_code == 422


def search_docs(query: str, knowledge_base_name: str, top_k: int, **_: Any) -> list[dict[str, Any]]:
    """Answers as Chatchat does: nothing for an unknown knowledge base, ids mostly null."""
    if knowledge_base_name != "kb":
        return []
    return [
        {"id": None, "page_content": book, "metadata": {"source": f"{book}.md"}, "score": 3.0}
        for book in books_like(query, top_k)
    ]


def test_the_chatchat_route(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("sentence_transformers")
    reranker = SimpleNamespace(predict=lambda pairs: list(itertools.starmap(likeness, pairs)))
    monkeypatch.setattr(module, "CrossEncoder", lambda *_, **__: reranker, raising=False)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    settings = SimpleNamespace(kb_settings=SimpleNamespace(SCORE_THRESHOLD=2.0))
    names = {
        "kb_router": APIRouter(prefix="/knowledge_base"),
        "search_docs": search_docs,
        "Settings": settings,
    }
    ask = guide_service(BLOCKS[1], names, "/knowledge_base/recall", FastAPI())
    assert [finding.kind for finding in examine(ask, RAG, "鱼油吃几粒", "钙片存放")] == ["honoured"]
    assert ask("钙片存放", None)[0].id == "钙片怎么存放.md"
