"""The log of scored samples: a line for each, scored or not, which the flow follows."""

import json
from collections import Counter, deque
from collections.abc import Collection
from pathlib import Path
from typing import Any, BinaryIO

from qinglan.config import Reward
from qinglan.engines.launcher import JsonlTail
from qinglan.errors import StageError


def open_log(path: Path) -> BinaryIO:
    return path.open("ab", buffering=0)  # one write a line, so that the lines of several workers don't mix


def write_sample(log: BinaryIO, entry: dict[str, Any]) -> None:
    log.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())


def invalid(error: Exception) -> dict[str, str]:
    return {"invalid": " ".join(f"{error or type(error).__name__}".split())[:500]}


class SampleWatch:
    """Follows the samples log from outside and stops a run whose samples can't be scored.

    The figures are of the whole log, over all attempts of the stage; the alarm looks at this attempt only.
    """

    def __init__(self, samples_log: Path, config: Reward, dev_rows: Collection[str] = ()) -> None:
        """`dev_rows`: rows of the dev split, as verl does not tell a reward function that it validates."""
        self._tail, self._config, self._dev_rows = JsonlTail(samples_log), config, frozenset(dev_rows)
        self._recent: deque[bool] = deque(maxlen=config.invalid_window)
        self._counts: Counter[str] = Counter()
        for entry in self._tail.new():
            self._count(entry)

    def __call__(self) -> None:
        """Look for new samples.

        Raises:
            StageError: too many of the last `invalid_window` samples have no score.
        """
        for entry in self._tail.new():
            self._count(entry)
            self._recent.append("invalid" in entry)
            limit = self._config.max_invalid_share * self._config.invalid_window
            if sum(self._recent) > limit:
                raise StageError(
                    f"rl: {sum(self._recent)} of the last {len(self._recent)} samples could not be scored, more than "
                    f"reward.max_invalid_share = {self._config.max_invalid_share:.0%} of {self._config.invalid_window} "
                    f"allows; last: {entry.get('invalid')}. Mend the service and run again; it continues from the "
                    "last checkpoint"
                )

    @property
    def summary(self) -> dict[str, int]:
        """Samples of training and of dev validation, and those of both without a score, by what failed."""
        names = ("samples", "dev_samples", "invalid", "invalid_rag", "invalid_judge")
        return {name if "samples" in name else f"samples_{name}": self._counts[name] for name in names}

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """Use of the RAG, as its client counts it, and of the judge's cache; the ledger knows the judge's calls."""
        roles = {"rag": ("calls", "failed", "cached"), "judge": ("asked", "cached")}
        return {role: {name: self._counts[f"{role}_{name}"] for name in names} for role, names in roles.items()}

    def _count(self, entry: dict[str, Any]) -> None:
        failed_by = entry.get("failed_by")
        self._counts["dev_samples" if entry.get("row_id") in self._dev_rows else "samples"] += 1
        self._counts["invalid"] += "invalid" in entry
        if failed_by:
            self._counts[f"invalid_{failed_by}"] += 1
        self._counts["rag_calls"] += entry.get("rag_calls", 0)
        self._counts["rag_failed"] += entry.get("rag_failed", 0)
        self._counts["rag_cached"] += bool(entry.get("rag_cached"))
        self._counts["judge_asked"] += "judge_cached" in entry or failed_by == "judge"
        self._counts["judge_cached"] += bool(entry.get("judge_cached"))
