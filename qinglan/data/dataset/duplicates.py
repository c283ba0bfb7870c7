"""Near-duplicates among a million questions, in bounded memory.

Candidates share a band of their MinHash signatures and are compared exactly, so the hashing can
miss a pair, one in a thousand at the threshold, but never add one. The texts are in a temporary
file. datasketch's own index would hold gigabytes for a million texts; here a band is an array with
four bytes a text, and equal ones are found by sorting.
"""

import hashlib
import heapq
import itertools
import math
import os
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qinglan.rows import Row, normalise

Grams = tuple[set[str], set[str]]
"""Character trigrams of the query, and of query, history and profile together."""

_SMALL_BUCKET = 16
"""Buckets up to this size compare every pair."""
_CROWDED = 64
"""From this size on, questions that share only their query are first separated by their context."""
_PER_GROUP = 32
"""Members of one group that a further question is compared with, for each of its rare trigrams."""
_CACHED_TEXTS = 4096
_PERMUTATIONS = 128
_CANDIDATE_RECALL = 0.999
_CHUNK = 1024


class Questions(AbstractContextManager["Questions"]):
    """Rows' questions, followed by those of evaluation workbooks: texts on disk, 16 bytes of each
    in memory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.rows = 0
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed by __exit__)
        self._starts = array("Q", [0])
        self._fingerprints = array("Q")

    def __len__(self) -> int:
        return len(self._fingerprints)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, row: Row) -> None:
        """Take a row's question; its place is the number of rows taken before."""
        assert self.rows == len(self), "rows come before evaluation questions"
        self.add_evaluation(row)
        self.rows += 1

    def add_evaluation(self, row: Row) -> None:
        """Take a question that rows must not repeat."""
        text = f"{normalise(row.query)}\x1f{normalise(row.history + row.profile)}".encode()
        self._file.write(text)
        self._starts.append(self._starts[-1] + len(text))
        self._fingerprints.append(
            int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        )

    def texts(self, place: int) -> tuple[str, str]:
        self._file.flush()
        start, end = self._starts[place], self._starts[place + 1]
        query, _, context = (
            os.pread(self._file.fileno(), end - start, start).decode().partition("\x1f")
        )
        return query, context

    def grams(self, place: int) -> Grams:
        query, context = self.texts(place)
        of_query = _trigrams(query)
        return of_query, _trigrams(query + context) if context else of_query

    def distinct(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Places of the first of each text, and for every place that of the first with the same
        text."""
        prints = np.array(self._fingerprints, dtype=np.uint64)
        _, first, inverse = np.unique(prints, return_index=True, return_inverse=True)
        return np.sort(first), first[inverse]


def near_duplicate_groups(
    questions: Questions, jaccard: float
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """For every row the place of its group's first row, and whether its group repeats an evaluation
    question.

    Two questions are the same when the character trigrams both of their queries and of query,
    history and profile together reach the Jaccard similarity: a long shared profile does not make
    different questions the same, and a bare "how much is it?" is not the same under different
    histories. Groups are transitive. In buckets of hundreds the comparison with one group ends at
    `_PER_GROUP` members a trigram, so that thousands of copies of one text cost no more than their
    number; there a chain of ever less similar copies may end early.
    """
    links = _Groups(questions.rows)
    first, same = questions.distinct()
    for place in np.flatnonzero(same != np.arange(len(questions))).tolist():
        links.join(int(same[place]), place)
    grams = lru_cache(maxsize=_CACHED_TEXTS)(questions.grams)
    for bucket in _buckets(questions, first, jaccard):
        if len({links.group(place) for place in bucket}) == 1:
            continue
        if len(bucket) <= _SMALL_BUCKET:
            pairs: Iterable[tuple[int, int]] = itertools.combinations(bucket, 2)
        else:
            pairs = _likely_pairs(bucket, grams, links, jaccard)
        for one, other in pairs:
            if not links.known(one, other) and _same(grams(one), grams(other), jaccard):
                links.join(one, other)
    return links.groups(), links.evaluated()


class _Groups:
    """Union-find over rows; an evaluation question marks the rows that repeat it, and joins
    none."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parent = array("q", range(rows))
        self._marked = bytearray(rows)

    def group(self, place: int) -> int:
        """The group of a question, valid until the next `join`; an evaluation question has its
        own."""
        if place >= self._rows:
            return place
        parent = self._parent
        while parent[place] != place:
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    def known(self, one: int, other: int) -> bool:
        """Would joining them change nothing?"""
        low, high = min(one, other), max(one, other)
        if high < self._rows:
            return self.group(low) == self.group(high)
        return low >= self._rows or bool(self._marked[low])

    def join(self, one: int, other: int) -> None:
        low, high = min(one, other), max(one, other)
        if high < self._rows:
            low, high = sorted((self.group(low), self.group(high)))
            self._parent[high] = low
        elif low < self._rows:
            self._marked[low] = 1

    def groups(self) -> NDArray[np.intp]:
        """For every row the place of its group's first."""
        roots = np.array(self._parent, dtype=np.intp)
        while not np.array_equal(above := roots[roots], roots):
            roots = above
        return roots

    def evaluated(self) -> NDArray[np.bool_]:
        """For every row, is one of its group like an evaluation question?"""
        groups = self.groups()
        marked = np.zeros(self._rows, dtype=np.bool_)
        np.logical_or.at(marked, groups, np.array(self._marked, dtype=np.bool_))
        return marked[groups]


def _trigrams(text: str) -> set[str]:
    return {text[i : i + 3] for i in range(max(1, len(text) - 2))}


def _same(one: Grams, other: Grams, jaccard: float) -> bool:
    for mine, theirs in zip(one, other, strict=True):
        small, large = sorted((len(mine), len(theirs)))
        shared = len(mine & theirs) if small / large >= jaccard else 0
        if shared / (small + large - shared) < jaccard:
            return False
    return True


def _likely_pairs(
    bucket: Sequence[int], grams: Callable[[int], Grams], links: _Groups, jaccard: float
) -> Iterator[tuple[int, int]]:
    """The pairs of a large bucket that can be the same at all, a group's further members left out.

    By prefix filtering (Bayardo et al. 2007): with trigrams ordered from the bucket's rarest on,
    two sets that reach the similarity J share one of the first (1 − J)·n + 1 of the larger and the
    first (1 − J)/(1 + J)·n + 1 of the smaller. So thousands of questions of one template are
    compared by what differs in them. The query or the whole text is used, whichever gives fewer
    pairs.
    """
    with_context = any(grams(place)[0] is not grams(place)[1] for place in bucket)
    sides = (_prefixes(bucket, grams, side, jaccard) for side in range(1 + with_context))
    posted: defaultdict[str, list[int]] = defaultdict(list)
    for prefix in min(sides, key=_pair_count):
        for other in {other for gram in prefix.rare for other in posted.get(gram, ())}:
            yield other, prefix.place
        group = links.group(prefix.place)
        for gram in prefix.rare[: prefix.posted]:
            if sum(links.group(other) == group for other in posted[gram]) < _PER_GROUP:
                posted[gram].append(prefix.place)


class _Prefix(NamedTuple):
    place: int
    rare: list[str]
    """The trigrams by which smaller sets are found."""
    posted: int
    """By how many of them larger sets find this one."""


def _prefixes(
    bucket: Sequence[int], grams: Callable[[int], Grams], side: int, jaccard: float
) -> list[_Prefix]:
    """Of query (0) or whole text (1), the smallest set first."""
    counts = Counter(gram for place in bucket for gram in grams(place)[side])
    shared = {gram: gram for gram in counts}  # one object per trigram, not one per text
    found = []
    for size, place in sorted((len(grams(place)[side]), place) for place in bucket):
        asked, posted = (
            size - math.ceil(share * size - 1e-9) + 1
            for share in (jaccard, 2 * jaccard / (1 + jaccard))
        )
        rare = heapq.nsmallest(asked, grams(place)[side], key=lambda gram: (counts[gram], gram))
        found.append(_Prefix(place, [shared[gram] for gram in rare], posted))
    return found


def _pair_count(prefixes: Iterable[_Prefix]) -> int:
    """Roughly how many pairs share a trigram of their prefixes."""
    return sum(
        n * n
        for n in Counter(
            gram for prefix in prefixes for gram in prefix.rare[: prefix.posted]
        ).values()
    )


def _buckets(questions: Questions, places: NDArray[np.intp], jaccard: float) -> Iterator[list[int]]:
    """Places of questions that share a band of their signatures, band by band; large buckets come
    once."""
    by_query, by_whole = _band_keys(questions, places, jaccard)
    for bucket in _unseen(bucket for keys in by_query for bucket in equal_positions(keys)):
        if by_whole is None or len(bucket) < _CROWDED:
            yield places[bucket].tolist()
        else:
            parts = (bucket[part] for keys in by_whole for part in equal_positions(keys[bucket]))
            yield from (places[part].tolist() for part in _unseen(parts))


def _unseen(buckets: Iterable[NDArray[np.intp]]) -> Iterator[NDArray[np.intp]]:
    seen: set[bytes] = set()
    for bucket in buckets:
        digest = (
            hashlib.blake2b(bucket.tobytes(), digest_size=16).digest()
            if len(bucket) >= _CROWDED
            else b""
        )
        if digest not in seen:
            yield bucket
        if digest:
            seen.add(digest)


def _band_keys(
    questions: Questions, places: NDArray[np.intp], jaccard: float
) -> tuple[NDArray[np.uint32], NDArray[np.uint32] | None]:
    """A key per band (first axis) and question, of the queries and of the whole texts; no context,
    no second one."""
    by_query = band_keys(
        (questions.grams(place)[0] for place in places.tolist()), len(places), jaccard
    )
    with_context = np.array(
        [bool(questions.texts(place)[1]) for place in places.tolist()], dtype=np.bool_
    )
    contexts = places[with_context].tolist()
    if not contexts:
        return by_query, None
    by_whole = by_query.copy()
    by_whole[:, with_context] = band_keys(
        (questions.grams(place)[1] for place in contexts), len(contexts), jaccard
    )
    return by_query, by_whole


def band_keys(sets: Iterable[set[str]], count: int, jaccard: float) -> NDArray[np.uint32]:
    """Keys (bands × texts) of which two texts whose sets are as similar as `jaccard` share one,
    almost surely."""
    from datasketch import MinHash  # imports SciPy, which takes 0.8 s

    # The most selective bands that still find a pair at the threshold 999 times in 1,000.
    options = [(_PERMUTATIONS // rows, rows) for rows in range(_PERMUTATIONS // 2, 0, -1)]
    bands, size = next(
        (o for o in options if 1 - (1 - jaccard ** o[1]) ** o[0] >= _CANDIDATE_RECALL), options[-1]
    )
    factors = np.random.default_rng(1).integers(1, 2**63, size, dtype=np.uint64) * 2 + 1
    keys = np.empty((bands, count), dtype=np.uint32)
    shingles = ([gram.encode() for gram in grams] for grams in sets)
    signatures = (m.hashvalues for m in MinHash.generator(shingles, num_perm=_PERMUTATIONS, seed=1))
    for start in range(0, count, _CHUNK):
        chunk = np.stack(list(itertools.islice(signatures, _CHUNK)))[:, : bands * size].astype(
            np.uint64
        )
        mixed = (chunk.reshape(-1, bands, size) * factors).sum(axis=2) >> np.uint64(32)
        keys[:, start : start + _CHUNK] = mixed.T
    return keys


def equal_positions(keys: NDArray[np.uint32]) -> Iterator[NDArray[np.intp]]:
    """Positions of equal keys, where there are several."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(
        np.diff(keys[order], prepend=keys[order[:1]] + 1, append=keys[order[-1:]] + 1)
    )
    for at in np.flatnonzero(np.diff(edges) > 1).tolist():
        yield order[edges[at] : edges[at + 1]]
