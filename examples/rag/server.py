"""A RAG over a folder of .txt and .md files that keeps Qinglan's contract."""

import argparse
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, Field

PARAGRAPHS = re.compile(
    r"\S.{100,}?(?=\n\s*\n|\Z)|\S.*\Z", re.DOTALL
)  # of 100 characters: short ones with the next
WORD = re.compile(
    r"(?=([一-鿿]{2}))[一-鿿]|[^\W一-鿿]+|(?<![一-鿿])[一-鿿](?![一-鿿])"
)  # of 鱼油好: 鱼油, 油好


class SearchRequest(BaseModel):  # tenant_id and kb_name come too; one folder has no use for them
    query: str = Field(max_length=2000)
    rewritten_query: str | None = Field(None, max_length=500)
    top_k: int = Field(10, ge=1, le=100)
    score_threshold: float = Field(0.0, ge=0, le=1)


def words(text: str) -> Counter[str]:
    return Counter(match[1] or match[0] for match in WORD.finditer(text.lower()))


def bm25(texts: list[str]) -> Callable[[str], list[float]]:
    counts = [words(text) for text in texts]
    mean_length = sum(count.total() for count in counts) / (len(counts) or 1)
    damping = [
        1.2 * (0.25 + 0.75 * count.total() / mean_length) for count in counts
    ]  # k1 = 1.2, b = 0.75

    def score(text: str) -> list[float]:
        found, most = [0.0] * len(texts), 0.0
        for word in words(text):
            having = {i: count[word] for i, count in enumerate(counts) if word in count}
            rarity = math.log(1 + (len(texts) - len(having) + 0.5) / (len(having) + 0.5))
            most += rarity
            for i, n in having.items():
                found[i] += rarity * n * 2.2 / (n + damping[i])
        # BM25 has no upper end, so it is compared with what a passage of mean length gets with each
        # word once: hits get 0.7 of that and more, misses some 0.2. The curve makes 0.73 and 0.06
        # of these, and never reaches 1.
        return [each**3 / (each**3 + (most / 2) ** 3) if each else 0.0 for each in found]

    return score


def cosine(texts: list[str], model_name: str) -> Callable[[str], list[float]]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(model_name)
    vectors = model.encode(texts, normalize_embeddings=True)
    return lambda text: (
        (vectors @ model.encode(text, normalize_embeddings=True)).clip(0, 1).tolist()
    )


def create_app(folder: Path, model_name: str | None = None) -> FastAPI:
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".md")]
    parts = [
        (file, part)
        for file in files
        for part in PARAGRAPHS.findall(file.read_text("utf-8", "replace"))
    ]
    passages = [
        {"id": str(file.relative_to(folder)), "title": file.stem, "content": part}
        for file, part in parts
    ]
    texts = [f"{file.stem}\n{part}" for file, part in parts]
    score, app = cosine(texts, model_name) if model_name else bm25(texts), FastAPI()

    @app.post("/search")
    def search(request: SearchRequest) -> dict[str, object]:
        scored = zip(score(request.rewritten_query or request.query), passages, strict=True)
        best = sorted(scored, key=lambda pair: -pair[0])[: request.top_k]
        return {
            "data": {
                "recall": [
                    p | {"reranker_score": n} for n, p in best if n and n >= request.score_threshold
                ]
            }
        }

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "model",
        nargs="?",
        help="rank by its cosine similarity, with sentence-transformers, not BM25",
    )
    parser.add_argument("--port", type=int, default=7861, help="of http://127.0.0.1:PORT/search")
    given = parser.parse_args()
    uvicorn.run(create_app(given.folder, given.model), port=given.port)
