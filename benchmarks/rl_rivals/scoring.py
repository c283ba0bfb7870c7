"""Our reward for another trainer: takes a batch of texts, gives scores, and writes their mean."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from qinglan.errors import StageError
from qinglan.recipes import get_recipe
from qinglan.training.reward_service.scorer import Scorer
from qinglan.training.reward_service.settings import RewardService


class Scoring:
    """Scores batches, on an event loop of its own.

    So the clients keep their connections between steps.
    """

    def __init__(self, training: Mapping[str, Any]) -> None:
        self._service = RewardService.model_validate_json(
            Path(training["reward"]).read_text(encoding="utf-8")
        )
        self._runner = asyncio.Runner()
        self._scorer: Scorer | None = None
        self._rewards = Path(training["rewards"])

    def scores(self, infos: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float]:
        """A score per text; a call that failed after its retries ends the training."""
        scores = self._runner.run(self._score(infos, texts))
        with self._rewards.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"samples": len(scores), "reward": fmean(scores)}) + "\n")
        return scores

    async def _score(self, infos: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> list[float]:
        # Opened on this loop, to which its clients' connections belong.
        self._scorer = self._scorer or Scorer(self._service, get_recipe(self._service.recipe))
        scored = await asyncio.gather(*map(self._scorer.score, map(dict, infos), texts))
        failed = sum(bool(sample["invalid"]) for sample in scored)
        if failed:
            raise StageError(
                f"{failed} of {len(scored)} samples have no score; see {self._service.samples_log}"
            )
        return [sample["score"] for sample in scored]
