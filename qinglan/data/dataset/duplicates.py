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
"""Signatures that are made into keys at a time."""


class Grams(NamedTuple):
    """Character trigrams of a question."""

    query: set[str]
    whole: set[str]
    """Those of query, history and profile together; the same set where it has no context."""

    @property
    def has_context(self) -> bool:
        return self.whole is not self.query


class Questions(AbstractContextManager["Questions"]):
    """Rows' questions, followed by those of evaluation workbooks.

    Texts are on disk; 16 bytes of each are in memory.
    """

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
        digest = hashlib.blake2b(text, digest_size=8).digest()
        self._fingerprints.append(int.from_bytes(digest, "little"))

    def texts(self, place: int) -> tuple[str, str]:
        """The normalised query and context of a question."""
        # Reading goes past the file object's buffer.
        self._file.flush()
        start = self._starts[place]
        size = self._starts[place + 1] - start
        text = os.pread(self._file.fileno(), size, start).decode()
        query, _, context = text.partition("\x1f")
        return query, context

    def grams(self, place: int) -> Grams:
        """The trigrams of a question."""
        query, context = self.texts(place)
        of_query = _trigrams(query)
        if not context:
            return Grams(of_query, of_query)
        return Grams(of_query, _trigrams(query + context))

    def distinct(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Places of the first question of each text, in ascending order.

        With them, for every place the place of the first question with the same text.
        """
        fingerprints = np.array(self._fingerprints, dtype=np.uint64)
        _, first, inverse = np.unique(fingerprints, return_index=True, return_inverse=True)
        return np.sort(first), first[inverse]


def near_duplicate_groups(
    questions: Questions, jaccard: float
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Group rows by their questions: places of groups, and whether they repeat an evaluation's.

    Both are arrays with an entry a row. A group's place is that of its first row.

    Two questions are the same when the character trigrams both of their queries and of query,
    history and profile together reach the Jaccard similarity: a long shared profile does not make
    different questions the same, and a bare "how much is it?" is not the same under different
    histories. Groups are transitive. In buckets of hundreds the comparison with one group ends at
    `_PER_GROUP` members a trigram, so that thousands of copies of one text cost no more than their
    number; there a chain of ever less similar copies may end early.
    """
    links = _Groups(questions.rows)
    first, same = questions.distinct()
    repeats = np.flatnonzero(same != np.arange(len(questions)))
    for place in repeats.tolist():
        links.join(int(same[place]), place)

    grams = lru_cache(maxsize=_CACHED_TEXTS)(questions.grams)
    for bucket in _buckets(questions, first, jaccard):
        groups_in_bucket = {links.group(place) for place in bucket}
        if len(groups_in_bucket) == 1:
            continue
        if len(bucket) <= _SMALL_BUCKET:
            pairs: Iterable[tuple[int, int]] = itertools.combinations(bucket, 2)
        else:
            pairs = _likely_pairs(bucket, grams, links, jaccard)
        for a, b in pairs:
            if not links.known(a, b) and _same(grams(a), grams(b), jaccard):
                links.join(a, b)
    return links.groups(), links.evaluated()


class _Groups:
    """Union-find over rows.

    An evaluation question has a place after those of the rows. It marks the rows that repeat it,
    and joins none of them.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._parent = array("q", range(rows))
        self._marked = bytearray(rows)

    def group(self, place: int) -> int:
        """The group of a question, valid until the next `join`.

        An evaluation question has its own.
        """
        if place >= self._rows:
            return place
        parent = self._parent
        while parent[place] != place:
            # Halving the path on the way keeps later searches short.
            parent[place] = parent[parent[place]]
            place = parent[place]
        return place

    def known(self, a: int, b: int) -> bool:
        """Would joining them change nothing?"""
        low = min(a, b)
        high = max(a, b)
        if high < self._rows:
            return self.group(low) == self.group(high)
        # Two evaluation questions have nothing to join; a row can be marked only once.
        return low >= self._rows or bool(self._marked[low])

    def join(self, a: int, b: int) -> None:
        """Note that two questions are the same."""
        low = min(a, b)
        high = max(a, b)
        if high < self._rows:
            low_group, high_group = sorted((self.group(low), self.group(high)))
            # The lower place is the root, so that a group is named by its first row.
            self._parent[high_group] = low_group
        elif low < self._rows:
            self._marked[low] = 1

    def groups(self) -> NDArray[np.intp]:
        """Place of the first row of every row's group."""
        roots = np.array(self._parent, dtype=np.intp)
        while True:
            grandparents = roots[roots]
            if np.array_equal(grandparents, roots):
                return roots
            roots = grandparents

    def evaluated(self) -> NDArray[np.bool_]:
        """Tell for every row whether one of its group is like an evaluation question."""
        groups = self.groups()
        marked = np.zeros(self._rows, dtype=np.bool_)
        np.logical_or.at(marked, groups, np.array(self._marked, dtype=np.bool_))
        return marked[groups]


def _trigrams(text: str) -> set[str]:
    """The trigrams of a text; a shorter text, also an empty one, is its only trigram."""
    return {text[start : start + 3] for start in range(max(1, len(text) - 2))}


def _same(a: Grams, b: Grams, jaccard: float) -> bool:
    """Tell whether two questions are the same, by their queries and by their whole texts."""
    return _similar(a.query, b.query, jaccard) and _similar(a.whole, b.whole, jaccard)


def _similar(a: set[str], b: set[str], jaccard: float) -> bool:
    """Tell whether two sets reach the Jaccard similarity."""
    small, large = sorted((len(a), len(b)))
    # Even if one set were a part of the other, their sizes differ too much.
    if small / large < jaccard:
        return False
    shared = len(a & b)
    return shared / (small + large - shared) >= jaccard


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
    has_context = any(grams(place).has_context for place in bucket)
    candidates = [_prefixes(bucket, lambda place: grams(place).query, jaccard)]
    if has_context:
        candidates.append(_prefixes(bucket, lambda place: grams(place).whole, jaccard))
    postings: defaultdict[str, list[int]] = defaultdict(list)
    for prefix in min(candidates, key=_pair_count):
        partners: set[int] = set()
        for gram in prefix.rare:
            partners.update(postings.get(gram, ()))
        for partner in partners:
            yield partner, prefix.place
        # By now the caller has joined what is the same, so that the group is the final one.
        group = links.group(prefix.place)
        for gram in prefix.rare[: prefix.posted]:
            members = sum(links.group(place) == group for place in postings[gram])
            if members < _PER_GROUP:
                postings[gram].append(prefix.place)


class _Prefix(NamedTuple):
    """The rarest trigrams of a question, the rarest first."""

    place: int
    rare: list[str]
    """The trigrams by which smaller sets are found."""
    posted: int
    """Number of them by which larger sets find this one."""


def _prefixes(
    bucket: Sequence[int], grams_of: Callable[[int], set[str]], jaccard: float
) -> list[_Prefix]:
    """Prefixes of a bucket's questions, those of the smallest sets first."""
    counts: Counter[str] = Counter()
    for place in bucket:
        counts.update(grams_of(place))
    # One object per trigram, not one per text.
    shared_objects = {gram: gram for gram in counts}
    prefixes: list[_Prefix] = []
    for place in sorted(bucket, key=lambda place: (len(grams_of(place)), place)):
        grams = grams_of(place)
        length = _prefix_length(len(grams), jaccard)
        rare = heapq.nsmallest(length, grams, key=lambda gram: (counts[gram], gram))
        posted = _prefix_length(len(grams), 2 * jaccard / (1 + jaccard))
        prefixes.append(_Prefix(place, [shared_objects[gram] for gram in rare], posted))
    return prefixes


def _prefix_length(size: int, share: float) -> int:
    """Number of trigrams of which one must be shared, where this share of them all must be."""
    # The margin keeps a product such as 0.55 · 100 = 55.00000000000001 from being rounded up.
    return size - math.ceil(share * size - 1e-9) + 1


def _pair_count(prefixes: Iterable[_Prefix]) -> int:
    """Roughly how many pairs share a trigram of their prefixes."""
    counts: Counter[str] = Counter()
    for prefix in prefixes:
        counts.update(prefix.rare[: prefix.posted])
    return sum(count * count for count in counts.values())


def _buckets(questions: Questions, places: NDArray[np.intp], jaccard: float) -> Iterator[list[int]]:
    """Places of questions that share a band of their signatures, band by band.

    A large bucket comes once, however many bands have it.
    """
    by_query, by_whole = _band_keys(questions, places, jaccard)
    for bucket in _unseen(itertools.chain.from_iterable(map(equal_positions, by_query))):
        if by_whole is None or len(bucket) < _CROWDED:
            yield places[bucket].tolist()
            continue
        for part in _unseen(_parts(bucket, by_whole)):
            yield places[part].tolist()


def _parts(bucket: NDArray[np.intp], keys: NDArray[np.uint32]) -> Iterator[NDArray[np.intp]]:
    """Parts of a bucket in which keys are equal, band by band."""
    for band in keys:
        for positions in equal_positions(band[bucket]):
            yield bucket[positions]


def _unseen(buckets: Iterable[NDArray[np.intp]]) -> Iterator[NDArray[np.intp]]:
    """The buckets, without large ones that came before."""
    digests: set[bytes] = set()
    for bucket in buckets:
        # Small ones are compared again sooner than remembered.
        if len(bucket) < _CROWDED:
            yield bucket
            continue
        digest = hashlib.blake2b(bucket.tobytes(), digest_size=16).digest()
        if digest not in digests:
            yield bucket
            digests.add(digest)


def _band_keys(
    questions: Questions, places: NDArray[np.intp], jaccard: float
) -> tuple[NDArray[np.uint32], NDArray[np.uint32] | None]:
    """Keys by band (first axis) and question: those of the queries, and those of the whole texts.

    There are none of the whole texts where no question has a context.
    """
    all_places = places.tolist()
    query_grams = (questions.grams(place).query for place in all_places)
    by_query = band_keys(query_grams, len(all_places), jaccard)

    has_context = [bool(questions.texts(place)[1]) for place in all_places]
    with_context = np.array(has_context, dtype=np.bool_)
    context_places = places[with_context].tolist()
    if not context_places:
        return by_query, None
    # The whole text of a question without a context is its query.
    by_whole = by_query.copy()
    whole_grams = (questions.grams(place).whole for place in context_places)
    by_whole[:, with_context] = band_keys(whole_grams, len(context_places), jaccard)
    return by_query, by_whole


def band_keys(sets: Iterable[set[str]], count: int, jaccard: float) -> NDArray[np.uint32]:
    """Keys (bands × texts), of which two texts share one, almost surely, if their sets are similar.

    Args:
        count: number of sets.
        jaccard: similarity from which on sets are similar.
    """
    # datasketch imports SciPy, which takes 0.8 s.
    from datasketch import MinHash

    bands, size = _bands(jaccard)
    # Odd factors, so that the multiplication modulo 2⁶⁴ loses nothing of a signature.
    factors = np.random.default_rng(1).integers(1, 2**63, size, dtype=np.uint64) * 2 + 1
    keys = np.empty((bands, count), dtype=np.uint32)
    minhashes = MinHash.generator(map(_encoded, sets), num_perm=_PERMUTATIONS, seed=1)
    signatures = (minhash.hashvalues for minhash in minhashes)
    for start in range(0, count, _CHUNK):
        chunk = np.stack(list(itertools.islice(signatures, _CHUNK)))
        values = chunk[:, : bands * size].astype(np.uint64).reshape(-1, bands, size)
        mixed = (values * factors).sum(axis=2) >> np.uint64(32)
        keys[:, start : start + _CHUNK] = mixed.T
    return keys


def _encoded(grams: set[str]) -> list[bytes]:
    return [gram.encode() for gram in grams]


def _bands(jaccard: float) -> tuple[int, int]:
    """Number of bands of a signature, and number of hash values in each.

    They are the most selective ones that still find a pair at the threshold 999 times in 1,000.
    """
    for size in range(_PERMUTATIONS // 2, 1, -1):
        bands = _PERMUTATIONS // size
        recall = 1 - (1 - jaccard**size) ** bands
        if recall >= _CANDIDATE_RECALL:
            return bands, size
    return _PERMUTATIONS, 1


def equal_positions(keys: NDArray[np.uint32]) -> Iterator[NDArray[np.intp]]:
    """Positions of equal keys, for each key that there is several times."""
    order = np.argsort(keys, kind="stable")
    # A key that surely differs, before the first and after the last, makes edges of both ends.
    before = keys[order[:1]] + 1
    after = keys[order[-1:]] + 1
    edges = np.flatnonzero(np.diff(keys[order], prepend=before, append=after))
    for index in np.flatnonzero(np.diff(edges) > 1).tolist():
        yield order[edges[index] : edges[index + 1]]
