"""The simulated RAG's retrieval: BM25 recall, then a lexical reranker with scores in [0, 1].

BM25 works on character bigrams. The reranker sees query and passage only, as a real one does: how
much of the query the passage covers and how much of the title the query covers, both weighted by
idf. Exact wording scores higher, so a policy gains by finding wordings that the teacher does not
know.
"""

import math
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import bm25s
import numpy as np
from pydantic import TypeAdapter, ValidationError

from qinglan.errors import WorkbookError
from qinglan.rows import bigrams
from qinglan.runs.schema_version import first_flaw
from qinglan.simulators.domains.query_rewrite.facts import Document

COVERAGE_WEIGHT = 0.55
TITLE_WEIGHT = 0.45
RECALL = 20
"""Candidates that BM25 hands to the reranker, at least."""

_SCORE_DIGITS = 6
_RUN = re.compile(r"[\u4e00-\u9fff]+|[a-z0-9α-ω]+")
_DOCUMENT = TypeAdapter(Document)


class Hit(NamedTuple):
    document: Document
    score: float
    """The reranker's score, in [0, 1]."""


class _Candidate(NamedTuple):
    place: int
    """The document's place in the knowledge base."""
    reranker_score: float
    bm25_score: float

    @property
    def rank(self) -> tuple[float, float, int]:
        """Sort key: the best candidate has the smallest."""
        return -self.reranker_score, -self.bm25_score, self.place


def tokens(text: str) -> list[str]:
    """Character bigrams of Chinese runs, and alphanumeric runs whole.

    A Chinese character that stands alone is a token as it is.
    """
    return bigrams(_RUN.findall(text.lower()))


class Retriever:
    """An index over one knowledge base; thread-safe once built."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        corpus = [tokens(f"{document.title}\n{document.content}") for document in self.documents]
        self._passages = list(map(frozenset, corpus))
        self._titles = [frozenset(tokens(document.title)) for document in self.documents]
        document_frequencies = Counter[str]()
        for passage in self._passages:
            document_frequencies.update(passage)
        self._idf = {
            word: _inverse_document_frequency(frequency, len(corpus))
            for word, frequency in document_frequencies.items()
        }
        self._unseen_idf = _inverse_document_frequency(0, len(corpus))
        self._title_weights = list(map(self._weight, self._titles))
        self._bm25 = bm25s.BM25(k1=1.2, b=0.75)
        self._bm25.index(corpus, show_progress=False)

    def search(self, query: str, top_k: int = 10) -> list[Hit]:
        """The best documents, best first; none where no word of the query is in any document."""
        query_words = tokens(query)
        indexed_words = [word for word in query_words if word in self._idf]
        if not indexed_words:
            return []
        bm25_scores = self._bm25.get_scores(indexed_words)
        count = min(max(RECALL, top_k), len(bm25_scores))
        # Those as good as the last one come too: which of them a partition takes differs between
        # processors.
        lowest_recalled = np.partition(bm25_scores, -count)[-count]
        is_recalled = (bm25_scores >= lowest_recalled) & (bm25_scores > 0)
        distinct_words = frozenset(query_words)
        query_weight = self._weight(distinct_words)
        candidates = []
        for place in np.flatnonzero(is_recalled).tolist():
            score = self._rerank(distinct_words, query_weight, place)
            candidates.append(
                _Candidate(place, round(score, _SCORE_DIGITS), float(bm25_scores[place]))
            )
        candidates.sort(key=lambda candidate: candidate.rank)
        return [
            Hit(self.documents[candidate.place], candidate.reranker_score)
            for candidate in candidates[:top_k]
        ]

    def _rerank(self, query_words: frozenset[str], query_weight: float, place: int) -> float:
        """Score a document by what passage and query cover of each other.

        Args:
            query_words: the distinct words of the query.
            query_weight: their weight, which is the same for every document.
            place: the document's place in the knowledge base.
        """
        query_coverage = self._weight(query_words & self._passages[place]) / query_weight
        title_weight = self._title_weights[place]
        title_coverage = 0.0
        if title_weight:
            title_coverage = self._weight(query_words & self._titles[place]) / title_weight
        return COVERAGE_WEIGHT * query_coverage + TITLE_WEIGHT * title_coverage

    def _weight(self, words: Iterable[str]) -> float:
        # fsum is exact, hence independent of the set's order, which changes from process to
        # process.
        return math.fsum(self._idf.get(word, self._unseen_idf) for word in words)


def _inverse_document_frequency(frequency: int, document_count: int) -> float:
    """BM25's weight of a word that is in `frequency` documents."""
    return math.log(1 + (document_count - frequency + 0.5) / (frequency + 0.5))


def load_documents(path: Path) -> list[Document]:
    """Read a knowledge base from JSONL with `id`, `title` and `content`; other keys are ignored.

    Raises WorkbookError where the file can't be read, a line is no document, an id occurs twice, or
    no document holds text.
    """
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        raise WorkbookError(f"knowledge base {path}: can't be read: {error}") from error
    documents: dict[str, Document] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"knowledge base {path}, line {number}"
        document = _parse_document(line, place)
        if document.id in documents:
            raise WorkbookError(f"{place}: id {document.id!r} occurs twice")
        documents[document.id] = document
    if not any(tokens(document.title + document.content) for document in documents.values()):
        raise WorkbookError(
            f"knowledge base {path}: holds no text; expected one JSON object a line"
        )
    return list(documents.values())


def _parse_document(line: bytes, place: str) -> Document:
    try:
        return _DOCUMENT.validate_json(line, strict=True)
    except ValidationError as error:
        raise WorkbookError(
            f"{place}: {first_flaw(error)}; expected an object with id, title, content"
        ) from error
