"""The simulated RAG's retrieval: BM25 recall over character bigrams, then a lexical reranker with
scores in [0, 1].

The reranker sees query and passage only, as a real one does: how much of the query the passage
covers and how much of the title the query covers, both weighted by idf. Exact wording scores
higher, so a policy gains by finding wordings that the teacher does not know.
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

_RUN = re.compile(r"[\u4e00-\u9fff]+|[a-z0-9α-ω]+")


class Hit(NamedTuple):
    document: Document
    score: float
    """The reranker's, in [0, 1]."""


def tokens(text: str) -> list[str]:
    """Character bigrams of Chinese runs (a lone character as it is), and alphanumeric runs
    whole."""
    return bigrams(_RUN.findall(text.lower()))


class Retriever:
    """An index over one knowledge base; thread-safe once built."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        corpus = [tokens(f"{document.title}\n{document.content}") for document in self.documents]
        self._passages = [frozenset(words) for words in corpus]
        self._titles = [frozenset(tokens(document.title)) for document in self.documents]
        frequencies = Counter(word for passage in self._passages for word in passage)
        count = len(corpus)
        self._idf = {
            word: math.log(1 + (count - df + 0.5) / (df + 0.5)) for word, df in frequencies.items()
        }
        self._unseen_idf = math.log(1 + (count + 0.5) / 0.5)
        self._title_weights = [self._weight(title) for title in self._titles]
        self._bm25 = bm25s.BM25(k1=1.2, b=0.75)
        self._bm25.index(corpus, show_progress=False)

    def search(self, query: str, top_k: int = 10) -> list[Hit]:
        """The best documents, best first; none where no word of the query is known."""
        words = tokens(query)
        known = [word for word in words if word in self._idf]
        if not known:
            return []
        recalled = self._bm25.get_scores(known)
        count = min(max(RECALL, top_k), len(recalled))
        # Those as good as the last one come too: which of them a partition takes differs between
        # processors.
        worst = np.partition(recalled, -count)[-count]
        best = np.flatnonzero((recalled >= worst) & (recalled > 0)).tolist()
        asked = frozenset(words)
        asked_weight = self._weight(asked)
        scored = [
            (round(self._rerank(asked, asked_weight, i), 6), float(recalled[i]), i) for i in best
        ]
        scored.sort(key=lambda item: (-item[0], -item[1], item[2]))
        return [Hit(self.documents[i], score) for score, _, i in scored[:top_k]]

    def _rerank(self, asked: frozenset[str], asked_weight: float, index: int) -> float:
        coverage = self._weight(asked & self._passages[index]) / asked_weight
        title_weight = self._title_weights[index]
        title = self._weight(asked & self._titles[index]) / title_weight if title_weight else 0.0
        return COVERAGE_WEIGHT * coverage + TITLE_WEIGHT * title

    def _weight(self, words: Iterable[str]) -> float:
        # fsum is exact, hence independent of the set's order, which changes from process to
        # process.
        return math.fsum(self._idf.get(word, self._unseen_idf) for word in words)


def load_documents(path: Path) -> list[Document]:
    """Read a knowledge base from JSONL with `id`, `title` and `content`; other keys are ignored."""
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).splitlines()
    except OSError as error:
        raise WorkbookError(f"knowledge base {path}: can't be read: {error}") from error
    found, as_document = dict[str, Document](), TypeAdapter(Document)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"knowledge base {path}, line {number}"
        try:
            document = as_document.validate_json(line, strict=True)
        except ValidationError as error:
            raise WorkbookError(
                f"{where}: {first_flaw(error)}; expected an object with id, title, content"
            ) from error
        if document.id in found:
            raise WorkbookError(f"{where}: id {document.id!r} occurs twice")
        found[document.id] = document
    if not any(tokens(document.title + document.content) for document in found.values()):
        raise WorkbookError(
            f"knowledge base {path}: holds no text; expected one JSON object a line"
        )
    return list(found.values())
