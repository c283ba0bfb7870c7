"""Locality-sensitive hashing with datasketch's MinHash signatures, kept small.

datasketch's own index holds every signature's bands in dictionaries, gigabytes for a million texts. Here a band is an
array with four bytes a text, and equal ones are found by sorting.
"""

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

_PERMUTATIONS = 128
_CANDIDATE_RECALL = 0.999
_CHUNK = 1024


def band_keys(sets: Iterable[set[str]], count: int, jaccard: float) -> NDArray[np.uint32]:
    """Keys (bands × texts) of which two texts whose sets are as similar as `jaccard` share one, almost surely."""
    from datasketch import MinHash  # brings SciPy: 0.8 s that only this stage should pay

    bands, size = _bands(jaccard)
    factors = np.random.default_rng(1).integers(1, 2**63, size, dtype=np.uint64) * 2 + 1
    keys = np.empty((bands, count), dtype=np.uint32)
    shingles = ([gram.encode() for gram in grams] for grams in sets)
    signatures = (m.hashvalues for m in MinHash.generator(shingles, num_perm=_PERMUTATIONS, seed=1))
    for start in range(0, count, _CHUNK):
        chunk = np.stack(list(itertools.islice(signatures, _CHUNK)))[:, : bands * size].astype(np.uint64)
        mixed = (chunk.reshape(-1, bands, size) * factors).sum(axis=2) >> np.uint64(32)
        keys[:, start : start + _CHUNK] = mixed.T
    return keys


def equal(keys: NDArray[np.uint32]) -> Iterator[NDArray[np.intp]]:
    """Positions of equal keys, where there are several."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order], prepend=keys[order[:1]] + 1, append=keys[order[-1:]] + 1))
    for at in np.flatnonzero(np.diff(edges) > 1).tolist():
        yield order[edges[at] : edges[at + 1]]


def _bands(jaccard: float) -> tuple[int, int]:
    """Bands and rows of the LSH: the most selective that still finds a pair at the threshold 999 times in 1,000."""
    options = [(_PERMUTATIONS // rows, rows) for rows in range(_PERMUTATIONS // 2, 0, -1)]
    return next((o for o in options if 1 - (1 - jaccard ** o[1]) ** o[0] >= _CANDIDATE_RECALL), options[-1])
