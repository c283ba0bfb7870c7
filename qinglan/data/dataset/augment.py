"""Training questions with noise.

A copy has its row's id, answer, split and group, and only its question differs. Which rows are
copied, and what noise they get, depends on the seed, the kind of noise and the row's id alone.
Copies are made while the training files are written and are in no list of rows, so they count as
rows nowhere else.
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
    """The row with noise in its question, for each kind that `dataset.augment` draws for it."""
    config = profile.dataset
    for kind, share in sorted(config.augment.items()):
        key = f"augment:{config.seed}:{kind}:{row.id}"
        if hash_fraction(key) >= share:
            continue
        query = add_noise(kind, row.query, Random(key))
        # Noise may find nothing to change, or make the question too long to be asked.
        if query != row.query and len(query) <= profile.data.max_query_chars:
            yield kind, row.with_query(query)


class NoisyCopies:
    """The copies that reach the training files."""

    def __init__(self, profile: Profile) -> None:
        self.counts: dict[NoiseKind, Counter[str]] = {}
        for kind in sorted(profile.dataset.augment):
            self.counts[kind] = Counter(sft=0, rl=0, left_out=0)
        self._profile = profile
        self._left_out: set[tuple[str, NoiseKind]] = set()

    def leave_out_repeating(
        self, rows: Iterable[Row], held_out: Iterable[Row], directory: Path
    ) -> None:
        """Leave out copies that nearly repeat a held-out question.

        Noise can turn one question into another.

        Args:
            rows: those of the training split.
            held_out: questions of dev, test, evaluation workbooks and the red team.
        """
        keys: list[tuple[str, NoiseKind]] = []
        with Questions(directory) as questions:
            for row in rows:
                for kind, copy in noisy_copies(row, self._profile):
                    questions.add(copy)
                    keys.append((row.id, kind))
            for row in held_out:
                questions.add_evaluation(row)
            jaccard = self._profile.dataset.near_duplicate_jaccard
            _, repeats = near_duplicate_groups(questions, jaccard)
        for key, is_repeat in zip(keys, repeats.tolist(), strict=True):
            if is_repeat:
                self._left_out.add(key)

    def of(self, row: Row) -> Iterator[tuple[NoiseKind, Row]]:
        """The copies of a row; none where it is no training row."""
        if row.split != "train":
            return
        for kind, copy in noisy_copies(row, self._profile):
            if (row.id, kind) in self._left_out:
                self.counts[kind]["left_out"] += 1
            else:
                yield kind, copy
