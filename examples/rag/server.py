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

# Paragraphs of 100 characters and more: a shorter one goes with the next.
PARAGRAPHS = re.compile(r"\S.{100,}?(?=\n\s*\n|\Z)|\S.*\Z", re.DOTALL)
# Pairs of Chinese characters, as 鱼油 and 油好 of 鱼油好, and words of other letters.
WORD = re.compile(r"(?=([一-鿿]{2}))[一-鿿]|[^\W一-鿿]+|(?<![一-鿿])[一-鿿](?![一-鿿])")
K1 = 1.2
B = 0.75


class SearchRequest(BaseModel):
    # The tenant_id and kb_name come too; one folder has no use for them.
    query: str = Field(max_length=2000)
    rewritten_query: str | None = Field(None, max_length=500)
    top_k: int = Field(10, ge=1, le=100)
    score_threshold: float = Field(0.0, ge=0, le=1)


def words(text: str) -> Counter[str]:
    return Counter(match[1] or match[0] for match in WORD.finditer(text.lower()))


def bm25(texts: list[str]) -> Callable[[str], list[float]]:
    counts = [words(text) for text in texts]
    mean_length = sum(count.total() for count in counts) / (len(counts) or 1)
    damping = [K1 * (1 - B + B * count.total() / mean_length) for count in counts]

    def score(text: str) -> list[float]:
        sums = [0.0] * len(texts)
        rarities = 0.0
        for word in words(text):
            places = [place for place, count in enumerate(counts) if word in count]
            rarity = math.log(1 + (len(texts) - len(places) + 0.5) / (len(places) + 0.5))
            rarities += rarity
            for place in places:
                times = counts[place][word]
                sums[place] += rarity * times * (K1 + 1) / (times + damping[place])
        return [below_one(passage_sum, rarities) for passage_sum in sums]

    return score


def below_one(bm25_sum: float, rarities: float) -> float:
    # BM25 has no upper end, so it is compared with what a passage of mean length gets with each
    # word once: hits get 0.7 of that and more, misses some 0.2. The curve makes 0.73 and 0.06 of
    # these, and never reaches 1.
    return bm25_sum**3 / (bm25_sum**3 + (rarities / 2) ** 3) if bm25_sum else 0.0


def cosine(texts: list[str], model_name: str) -> Callable[[str], list[float]]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(model_name)
    vectors = model.encode(texts, normalize_embeddings=True)
    return lambda text: (
        (vectors @ model.encode(text, normalize_embeddings=True)).clip(0, 1).tolist()
    )


def create_app(folder: Path, model_name: str | None = None) -> FastAPI:
    passages = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".txt", ".md"):
            name = {"id": str(path.relative_to(folder)), "title": path.stem}
            for part in PARAGRAPHS.findall(path.read_text("utf-8", "replace")):
                passages.append({**name, "content": part})
    texts = [f"{passage['title']}\n{passage['content']}" for passage in passages]
    score = cosine(texts, model_name) if model_name else bm25(texts)
    app = FastAPI()

    @app.post("/search")
    def search(request: SearchRequest) -> dict[str, object]:
        scores = score(request.rewritten_query or request.query)
        best_first = sorted(zip(scores, passages, strict=True), key=lambda pair: -pair[0])
        recall = []
        for passage_score, passage in best_first[: request.top_k]:
            if passage_score and passage_score >= request.score_threshold:
                recall.append({**passage, "reranker_score": passage_score})
        return {"data": {"recall": recall}}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    similarity = "rank by its cosine similarity, with sentence-transformers, not BM25"
    parser.add_argument("model", nargs="?", help=similarity)
    parser.add_argument("--port", type=int, default=7861, help="of http://127.0.0.1:PORT/search")
    options = parser.parse_args()
    uvicorn.run(create_app(options.folder, options.model), port=options.port)
