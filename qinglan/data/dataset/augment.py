"""Training questions with noise: a copy has its row's id, answer, split and group, and only its
question differs.

Which rows are copied, and what noise they get, depends on the seed, the kind of noise and the row's
id alone. Copies are made while the training files are written and are in no list of rows, so they
count as rows nowhere else.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from qinglan.config import NoiseKind, Profile
from qinglan.data.dataset.duplicates import Questions, near_duplicate_groups
from qinglan.noise import add_noise
from qinglan.rows import Row, hash_fraction


def noisy_copies(row: Row, profile: Profile) -> Iterator[tuple[NoiseKind, Row]]:
    """By the kinds of noise that `dataset.augment` draws for this row, the row with noise in its
    question."""
    config = profile.dataset
    for kind, share in sorted(config.augment.items()):
        key = f"augment:{config.seed}:{kind}:{row.id}"
        if hash_fraction(key) >= share:
            continue
        query = add_noise(kind, row.query, Random(key))
        if query != row.query and len(query) <= profile.data.max_query_chars:
            yield kind, row.model_copy(update={"query": query})


class NoisyCopies:
    """The copies that reach the training files."""

    def __init__(self, profile: Profile) -> None:
        self.counts = {
            kind: Counter(sft=0, rl=0, left_out=0) for kind in sorted(profile.dataset.augment)
        }
        self._profile = profile
        self._left_out = frozenset[tuple[str, NoiseKind]]()

    def leave_out_repeating(
        self, rows: Iterable[Row], held_out: Iterable[Row], directory: Path
    ) -> None:
        """Leave out copies that nearly repeat a held-out question: noise can turn one question into
        another.

        `rows` are those of the training split; `held_out` are of dev, test, evaluation workbooks
        and the red team.
        """
        keys: list[tuple[str, NoiseKind]] = []
        with Questions(directory) as questions:
            for row in rows:
                for kind, copy in noisy_copies(row, self._profile):
                    questions.add(copy)
                    keys.append((row.id, kind))
            for row in held_out:
                questions.add_evaluation(row)
            _, repeats = near_duplicate_groups(
                questions, self._profile.dataset.near_duplicate_jaccard
            )
        self._left_out = frozenset(
            key for key, repeated in zip(keys, repeats.tolist(), strict=True) if repeated
        )

    def of(self, row: Row) -> Iterator[tuple[NoiseKind, Row]]:
        """Those of a row; none where it is no training row."""
        for kind, copy in noisy_copies(row, self._profile) if row.split == "train" else ():
            if (row.id, kind) in self._left_out:
                self.counts[kind]["left_out"] += 1
            else:
                yield kind, copy
