"""The services that docs/rag-service.md shows are run as they stand there, and pass the contract check."""

import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from qinglan.clients.contract import examine
from qinglan.clients.rag import Passage, read_passages, request_body
from qinglan.config import Rag

GUIDE = Path(__file__).parents[2] / "docs" / "rag-service.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
BOOKS = [f"{what}{how}" for what in ("鱼油", "维生素C", "钙片", "阿胶", "虾青素") for how in ("一天吃几粒", "怎么存放")]
RAG = Rag(kb_name="kb", top_k=3)


def likeness(text: str, book: str) -> float:
    return len(set(text) & set(book)) / len(set(text) | set(book))


def service(block: str, names: dict[str, Any], path: str, app: FastAPI) -> Callable[[str, str | None], list[Passage]]:
    exec(compile(block, str(GUIDE), "exec"), names)
    router = names.get("kb_router")
    if router:
        app.include_router(router)
    client = TestClient(app)

    def ask(query: str, rewritten_query: str | None) -> list[Passage]:
        response = client.post(path, json=request_body(RAG, "t", query, rewritten_query))
        assert response.status_code == 200, response.text
        return read_passages(response.content, path)

    return ask


def returning(value: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def answer(*words: Any, **options: Any) -> Any:
        return value(*words, **options)

    return answer


def passage(text: str, book: str) -> SimpleNamespace:
    return SimpleNamespace(id=book, content=book, score=likeness(text, book))


def test_the_fastapi_service():
    app = FastAPI()
    names = {
        "app": app, "BaseModel": BaseModel, "Field": Field, "Any": Any,
        "rewrite": returning(lambda query: query + "怎么存放"),
        "retrieve": returning(lambda text, _kb, limit: sorted(BOOKS, key=lambda book: -likeness(text, book))[:limit]),
        "rerank": returning(lambda text, books: [passage(text, book) for book in books]),
    }  # fmt: skip
    ask = service(BLOCKS[0], names, "/search", app)
    assert [finding.kind for finding in examine(ask, RAG, "鱼油吃几粒", "钙片存放")] == ["honoured"]
    assert TestClient(app).post("/search", json=request_body(RAG, "t", "问", "改" * 501)).status_code == 422


class CrossEncoder:
    """Stands in for the reranker's model."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing to load."""

    def predict(self, pairs: list[tuple[str, str]]) -> list[float]:
        return [likeness(*pair) for pair in pairs]


def search_docs(query: str, knowledge_base_name: str, top_k: int, **_: Any) -> list[dict[str, Any]]:
    """Answers as Chatchat does: nothing for an unknown knowledge base, ids mostly null."""
    found = sorted(BOOKS, key=lambda book: -likeness(query, book))[:top_k] if knowledge_base_name == "kb" else []
    return [{"id": None, "page_content": book, "metadata": {"source": f"{book}.md"}, "score": 3.0} for book in found]


def test_the_chatchat_route(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("sentence_transformers")
    monkeypatch.setattr(module, "CrossEncoder", CrossEncoder, raising=False)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    settings = SimpleNamespace(kb_settings=SimpleNamespace(SCORE_THRESHOLD=2.0))
    names = {"kb_router": APIRouter(prefix="/knowledge_base"), "search_docs": search_docs, "Settings": settings}
    ask = service(BLOCKS[1], names, "/knowledge_base/recall", FastAPI())
    assert [finding.kind for finding in examine(ask, RAG, "鱼油吃几粒", "钙片存放")] == ["honoured"]
    assert ask("钙片存放", None)[0].id == "钙片怎么存放.md"
