"""The log of scored samples: a line for each, scored or not, and for each outage.

The flow follows it.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

from qinglan.runs.launcher import JsonlTail

_MAX_ERROR_CHARS = 500


def write_sample(log: BinaryIO, entry: dict[str, Any], error: Exception | None = None) -> None:
    """Add a line to a log that has no buffer.

    One write, so that a killed process leaves whole lines.

    Args:
        error: why the sample has no score.
    """
    if error is not None:
        text = str(error) or type(error).__name__
        entry["invalid"] = " ".join(text.split())[:_MAX_ERROR_CHARS]
    log.write((json.dumps(entry, ensure_ascii=False) + "\n").encode())


class SampleWatch:
    """Follows the samples log from outside, for its figures.

    They are of the whole log, over all attempts of the stage. The trainer itself stops a step whose
    samples can't be scored.
    """

    def __init__(
        self,
        samples_log: Path,
        dev_rows: Collection[str] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Count what the log holds already, without a word about it.

        Args:
            dev_rows: rows of the dev split, as verl's reward functions do not know whether verl
                validates.
            say: gets a sentence when a service goes down or comes back.
        """
        self._tail = JsonlTail(samples_log)
        self._dev_rows = frozenset(dev_rows)
        self._sums: Counter[str] = Counter()
        self._say: Callable[[str], None] | None = None
        self.last_invalid = ""
        """Why the last sample without a score has none."""
        self()
        self._say = say

    def __call__(self) -> None:
        for entry in self._tail.new():
            if "outage" in entry:
                self._add_outage(entry)
            else:
                self._add_sample(entry)

    @property
    def summary(self) -> dict[str, float]:
        """Samples of training and of dev validation, those of both without a score by what failed,
        outages, cost."""
        names = (
            "samples",
            "dev_samples",
            "samples_invalid",
            "samples_invalid_rag",
            "samples_invalid_judge",
            "rag_outage_s",
            "judge_outage_s",
            "judge_cost_usd",
        )
        return {name: self._sums[name] for name in names}

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """Use of the RAG, as its client counts it, and of the judge's cache.

        The ledger knows the judge's calls.
        """
        return {
            "rag": {name: self._sums[f"rag_{name}"] for name in ("calls", "failed", "cached")},
            "judge": {name: self._sums[f"judge_{name}"] for name in ("asked", "cached")},
        }

    def _add_sample(self, entry: dict[str, Any]) -> None:
        is_dev = entry.get("row_id") in self._dev_rows
        self._sums["dev_samples" if is_dev else "samples"] += 1
        if "invalid" in entry:
            self._sums["samples_invalid"] += 1
            self.last_invalid = entry["invalid"]
        failed_by = entry.get("failed_by")
        if failed_by:
            self._sums[f"samples_invalid_{failed_by}"] += 1
        for name in (
            "rag_calls",
            "rag_failed",
            "rag_cached",
            "judge_asked",
            "judge_cached",
            "judge_cost_usd",
        ):
            self._sums[name] += entry.get(name, 0)

    def _add_outage(self, entry: dict[str, Any]) -> None:
        service = entry["outage"]
        seconds = entry["seconds"]
        self._sums[f"{service}_outage_s"] += seconds
        if self._say is None:
            return
        sentences = {
            "began": f"the {service} is down, samples wait for it: {entry.get('error')}",
            "ended": f"the {service} is back after {seconds:.0f} s",
            "given up": (
                f"the {service} was still down after {seconds:.0f} s; its samples have no score"
            ),
        }
        self._say(sentences[entry["state"]])
