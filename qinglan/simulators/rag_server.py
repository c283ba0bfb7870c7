"""The simulated RAG over HTTP.

Start it with `python -m qinglan.simulators.rag_server --knowledge-base kb.jsonl --port 8001`. It
follows the contract for a user's own service; see docs/reference/file-formats.md.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from qinglan.errors import WorkbookError
from qinglan.simulators.retriever import Retriever, load_documents
from qinglan.simulators.server import argument_parser, serve


class RetrieveRequest(BaseModel):
    query: str
    rewritten_query: str | None = None
    """Replaces `query` in the retrieval where it is given."""
    tenant_id: str = "default"
    kb_name: str = "default"
    top_k: Annotated[int, Field(ge=1, le=100)] = 10
    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0


def create_app(retriever: Retriever) -> FastAPI:
    app = FastAPI(title="Qinglan's simulated RAG")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "documents": len(retriever.documents)}

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> JSONResponse:
        hits = retriever.search(request.rewritten_query or request.query, request.top_k)
        recall = [
            asdict(hit.document) | {"reranker_score": hit.score}
            for hit in hits
            if hit.score >= request.score_threshold
        ]
        return JSONResponse({"data": {"recall": recall}})

    return app


def main() -> int:
    parser = argument_parser("A RAG over a JSONL knowledge base (id, title, content).")
    parser.add_argument("--knowledge-base", type=Path, required=True)
    options = parser.parse_args()
    try:
        retriever = Retriever(load_documents(options.knowledge_base))
    except WorkbookError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    serve(create_app(retriever), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
