"""`rag.preset` and `rag.mapping`: every product is asked as it documents, and its documented answer
is read."""

import json
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple, get_args

import jmespath
import pytest
from fake_service import SIMULATED, FakeService, Reply
from fixture_types import ProfileOf

from qinglan.clients.rag import RagClient, request_body
from qinglan.clients.rag.answers import read_passages
from qinglan.config import Rag, RagPreset
from qinglan.errors import RetrievalError
from qinglan.ops.preflight import inspect_profile
from qinglan.recipes.keys import scoring_key

Json = dict[str, Any]
DOCUMENTS = (("d1", 0.9), ("d2", 0.4))


class Product(NamedTuple):
    path: str
    request: Json
    text: str
    """JMESPath of the text in the request."""
    passage: Callable[[str, str, float], Json]
    answer: Callable[[list[Json]], Any]
    scores: tuple[float, ...] = (0.9, 0.4)
    header: tuple[str, str] = ("authorization", "Bearer k")


def qinglan_passage(document: str, text: str, score: float) -> Json:
    return {"id": document, "content": text, "reranker_score": score}


def dify_passage(document: str, text: str, score: float) -> Json:
    segment = {
        "id": f"s-{document}",
        "document_id": document,
        "content": text,
        "answer": "",
        "document": {"id": document, "name": f"{document}.txt"},
    }
    return {"segment": segment, "child_chunks": [], "score": score}


def ragflow_passage(document: str, text: str, score: float) -> Json:
    return {
        "id": f"c-{document}",
        "content": text,
        "document_id": document,
        "document_keyword": f"{document}.txt",
        "similarity": score,
        "term_similarity": 1.0,
        "vector_similarity": 0.8,
    }


def fastgpt_passage(document: str, text: str, score: float) -> Json:
    return {
        "id": f"c-{document}",
        "q": text,
        "a": "",
        "collectionId": document,
        "sourceName": f"{document}.pdf",
        "score": [{"type": "embedding", "value": score, "index": 0}],
    }


def older_fastgpt_passage(document: str, text: str, score: float) -> Json:
    return {
        "id": "c",
        "q": text,
        "a": "答",
        "collectionId": document,
        "sourceName": document,
        "score": score,
    }


def chatchat_passage(document: str, text: str, _: float) -> Json:
    return {"id": None, "metadata": {"source": document}, "page_content": text, "score": 3.0}


def elasticsearch_passage(document: str, text: str, score: float) -> Json:
    source = {"title": document, "content": text}
    return {"_index": "kb", "_id": document, "_score": 20 * score, "_source": source}


def qdrant_passage(document: str, text: str, score: float) -> Json:
    payload = {"title": document, "text": text}
    return {"id": document, "version": 0, "score": score, "payload": payload}


def milvus_passage(document: str, text: str, score: float) -> Json:
    return {"id": document, "text": text, "distance": 9 * score}


PRODUCTS: dict[RagPreset, Product] = {
    "qinglan": Product(
        path="/search",
        request={
            "query": "原话",
            "rewritten_query": "改写",
            "tenant_id": "t",
            "kb_name": "k/b",
            "top_k": 2,
            "score_threshold": 0.1,
        },
        text="rewritten_query || query",
        passage=qinglan_passage,
        answer=lambda passages: {"data": {"recall": passages}},
    ),
    "dify": Product(
        path="/v1/datasets/{kb_name}/retrieve",
        request={
            "query": "改写",
            "retrieval_model": {
                "search_method": "semantic_search",
                "reranking_enable": False,
                "top_k": 2,
                "score_threshold_enabled": True,
                "score_threshold": 0.1,
            },
        },
        text="retrieval_model && query",
        passage=dify_passage,
        answer=lambda passages: {"query": {"content": "改写"}, "records": passages},
    ),
    "ragflow": Product(
        path="/api/v1/retrieval",
        request={
            "question": "改写",
            "dataset_ids": ["k/b"],
            "page_size": 2,
            "similarity_threshold": 0.1,
        },
        text="question",
        passage=ragflow_passage,
        answer=lambda passages: {
            "code": 0,
            "data": {"chunks": passages, "doc_aggs": [], "total": 2},
        },
    ),
    "fastgpt": Product(
        path="/api/core/dataset/searchTest",
        request={
            "datasetId": "k/b",
            "text": "改写",
            "limit": 20000,
            "similarity": 0.1,
            "searchMode": "embedding",
            "usingReRank": False,
            "datasetSearchUsingExtensionQuery": False,
        },
        text="datasetId && text",
        passage=fastgpt_passage,
        answer=lambda passages: {
            "code": 200,
            "statusText": "",
            "message": "",
            "data": {"list": passages, "duration": "0.1s"},
        },
    ),
    "chatchat": Product(
        path="/knowledge_base/search_docs",
        request={
            "query": "改写",
            "knowledge_base_name": "k/b",
            "top_k": 2,
            "score_threshold": 2.0,
        },
        text="knowledge_base_name && query",
        passage=chatchat_passage,
        answer=lambda passages: passages,
        scores=(1.0, 0.5),
    ),
    "elasticsearch": Product(
        path="/{kb_name}/_search",
        request={
            "query": {"match": {"content": "改写"}},
            "size": 2,
            "_source": ["title", "content"],
        },
        text="query.match.content",
        passage=elasticsearch_passage,
        answer=lambda passages: {
            "took": 3,
            "timed_out": False,
            "hits": {"max_score": 18.0, "hits": passages},
        },
        scores=(1.0, 0.5),
        header=("authorization", "ApiKey k"),
    ),
    "qdrant": Product(
        path="/collections/{kb_name}/points/query",
        request={
            "query": {"text": "改写", "model": "sentence-transformers/all-minilm-l6-v2"},
            "limit": 2,
            "score_threshold": 0.1,
            "with_payload": True,
        },
        text="query.text",
        passage=qdrant_passage,
        answer=lambda passages: {"result": {"points": passages}, "status": "ok", "time": 0.01},
        header=("api-key", "k"),
    ),
    "milvus": Product(
        path="/v2/vectordb/entities/search",
        request={
            "collectionName": "k/b",
            "data": ["改写"],
            "annsField": "sparse",
            "limit": 2,
            "outputFields": ["text"],
        },
        text="data[0]",
        passage=milvus_passage,
        answer=lambda passages: {"code": 0, "cost": 0, "data": passages},
        scores=(1.0, 0.5),
    ),
}
OLDER_FASTGPT = PRODUCTS["fastgpt"]._replace(
    passage=older_fastgpt_passage,
    answer=lambda passages: {"code": 200, "statusText": "", "data": passages},
)
OPENSEARCH_WITH_USER = PRODUCTS["elasticsearch"]._replace(header=("authorization", "Basic k"))
CASES: list[tuple[RagPreset, Product, Json]] = [
    *((preset, PRODUCTS[preset], {}) for preset in get_args(RagPreset)),
    ("fastgpt", OLDER_FASTGPT, {}),
    ("elasticsearch", OPENSEARCH_WITH_USER, {"key_prefix": "Basic "}),
]


class Server(FakeService):
    """A product that refuses a request without its own fields."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.paths: list[str] = []
        self.url = self.url.removesuffix("/v1") + self.product.path

    def answer(self, method: str, path: str, body: Json) -> Reply:
        self.paths.append(path)
        text = jmespath.search(self.product.text, body)
        if not isinstance(text, str) or not text:
            return 422, {"detail": "a field is missing"}
        passages = [
            self.product.passage(document, f"{text}:{document}", score)
            for document, score in DOCUMENTS
        ]
        return 200, self.product.answer(passages)


@pytest.mark.parametrize(("preset", "product", "mapping"), CASES)
async def test_a_product_is_asked_and_read_as_it_documents(
    preset: RagPreset, product: Product, mapping: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KEY", "k")
    rag = Rag(
        preset=preset,
        mapping=mapping,
        kb_name="k/b",
        top_k=2,
        score_threshold=0.1,
        api_key_env="KEY",
    )
    with closing(Server(product)) as server:
        client = RagClient(rag, server.url, "t", with_passage=True)
        retrieved = await client.retrieve("原话", "改写")
        await client.close()
    assert server.bodies == [product.request]
    assert server.paths == [product.path.replace("{kb_name}", "k%2Fb")]
    header, value = product.header
    assert server.headers[0][header] == value
    assert retrieved.ids == ("d1", "d2")
    assert retrieved.scores == product.scores
    assert retrieved.first_passage.endswith(("改写:d1", "改写:d1\n答"))


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRODUCTS)
def test_doctor_names_the_preset_that_fits(preset: RagPreset, profile_of: ProfileOf):
    def check(configured: str) -> Any:
        profile = profile_of(**SIMULATED, rag={"url": server.url, "preset": configured})
        return next(check for check in inspect_profile(profile, "refresh") if check.name == "rag")

    with closing(Server(PRODUCTS[preset])) as server:
        wrong = check("ragflow" if preset == "qinglan" else "qinglan")
        right = check(preset)
    assert f"; the address answers as {preset} does: set rag.preset: {preset}" in wrong.problem
    assert right.problem is None
    assert ("another text gets another answer" in right.detail) == (preset != "qinglan")
    assert ("only gold documents tell" in (right.note or "")) == (server.product.scores[0] == 1.0)


def scores_of(*scores: float, **mapping: Any) -> list[float]:
    rag = Rag.model_validate(
        {"preset": "elasticsearch", "mapping": mapping, "top_k": 2, "score_threshold": 0.4}
    )
    hits = [{"_id": "d", "_source": {"content": "x"}, "_score": score} for score in scores]
    answer = json.dumps({"hits": {"hits": hits}}).encode()
    return [passage.reranker_score for passage in read_passages(rag, answer, "u")]


def test_scores_are_converted_and_then_cut_by_limit_and_threshold():
    assert scores_of(900.0, 0.0, -900.0, score_as="sigmoid") == [1.0, 0.5]
    assert scores_of(18, 6, score_as="divide_by", divide_by=20) == [0.9]
    assert scores_of(7.0, 9.0, 3.0) == [1.0, 0.5]
    with pytest.raises(
        RetrievalError,
        match=r"`hits\.hits\[0\]\._score` is 30, outside \[0, 1\]; divided by .* 1\.5",
    ):
        scores_of(30, score_as="divide_by", divide_by=20)


def test_a_text_never_changes_the_requests_shape():
    for nasty in ('"}, "size": 9999, "a": "{kb_name}', "{top_k}"):
        body = request_body(Rag(preset="elasticsearch"), "t", "q", nasty)
        assert body["query"] == {"match": {"content": nasty}}


@pytest.mark.parametrize(
    ("preset", "answer", "message"),
    [
        (
            "ragflow",
            {"code": 102, "message": "no"},
            '`data` is missing (found: code, message) and `message` says "no"',
        ),
        ("chatchat", {"detail": "busy"}, 'it is an object and `detail` says "busy"'),
        ("fastgpt", {"data": [{"q": 7}]}, "rag.mapping: `join("),
        (
            "dify",
            {"records": [{"segment": {"text": "x"}}]},
            "`records[0].segment.content` is missing (found: segment)",
        ),
    ],
)
def test_a_flaw_is_named_by_the_mapping(preset: RagPreset, answer: Any, message: str):
    with pytest.raises(RetrievalError, match=re.escape(message)):
        read_passages(Rag(preset=preset), json.dumps(answer).encode(), "u")


def test_the_shape_is_part_of_every_key_and_qinglans_own_of_none(profile_of: ProfileOf):
    def keys(**rag: Any) -> Json:
        return scoring_key(profile_of(**SIMULATED, rag={"url": "http://rag", **rag}))["rag"]

    own_fields = {"url", "kb_name", "top_k", "score_threshold"}
    assert keys().keys() == own_fields
    assert keys(preset="qinglan").keys() == own_fields
    shapes = [keys(preset=preset) for preset in PRODUCTS]
    shapes += [
        keys(preset="dify", mapping={"id": "segment.document.name"}),
        keys(mapping={"title": "name"}),
    ]
    assert len({json.dumps(shape, sort_keys=True) for shape in shapes}) == len(shapes)
