"""Training questions with noise: a copy has its row's id, answer, split and group, and only its question differs.

Which rows are copied, and what noise they get, depends on the seed, the kind of noise and the row's id alone. Copies
are made while the training files are written and are in no list of rows, so they count as rows nowhere else.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from qinglan.config import NoiseKind, Profile
from qinglan.data.dataset.duplicates import Questions, near_duplicate_groups
from qinglan.noise import add_noise
from qinglan.rows import Row, hash_fraction


def noisy_copies(row: Row, profile: Profile) -> Iterator[tuple[NoiseKind, Row]]:
    """By the kinds of noise that `dataset.augment` draws for this row, the row with noise in its question."""
    config = profile.dataset
    for kind, share in sorted(config.augment.items()):
        key = f"augment:{config.seed}:{kind}:{row.id}"
        if hash_fraction(key) >= share:
            continue
        query = add_noise(kind, row.query, Random(key))
        if query != row.query and len(query) <= profile.data.max_query_chars:
            yield kind, row.model_copy(update={"query": query})


def repeating_copies(
    rows: Iterable[Row], held_out: Iterable[Row], profile: Profile, directory: Path
) -> frozenset[tuple[str, NoiseKind]]:
    """Row id and kind of the copies that nearly repeat a held-out question, as noise can turn one into another.

    Args:
        rows: those of the training split.
        held_out: questions of dev, test, evaluation workbooks and the red team.
        directory: for the temporary file of the questions' texts.
    """
    keys: list[tuple[str, NoiseKind]] = []
    with Questions(directory) as questions:
        for row in rows:
            for kind, copy in noisy_copies(row, profile):
                questions.add(copy)
                keys.append((row.id, kind))
        for row in held_out:
            questions.add_evaluation(row)
        _, repeats = near_duplicate_groups(questions, profile.dataset.near_duplicate_jaccard)
    return frozenset(key for key, repeated in zip(keys, repeats.tolist(), strict=True) if repeated)
