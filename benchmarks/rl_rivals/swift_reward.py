"""ms-swift's plug-in (`--external_plugins`): our reward and our clock under names of their own.

They are `qinglan` and `qinglan_clock`.
"""

import json
import os
from pathlib import Path
from typing import Any

from clock import Clock
from scoring import Scoring
from swift.callbacks import callbacks_map
from swift.rewards import ORM, orms


class Qinglan(ORM):  # type: ignore[misc]
    """Scores a batch."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        self._scoring = Scoring(_training())

    def __call__(self, completions: list[str], baseline: list[str], **_: Any) -> list[float]:
        """A score per completion.

        Args:
            baseline: the dataset's column, a JSON text per completion.
        """
        return self._scoring.scores([json.loads(text) for text in baseline], completions)


def _clock(*_: Any) -> Clock:
    return Clock(_training())


def _training() -> dict[str, Any]:
    training: dict[str, Any] = json.loads(
        Path(os.environ["QINGLAN_RIVAL_TRAINING"]).read_text(encoding="utf-8")
    )
    return training


orms["qinglan"] = Qinglan
callbacks_map["qinglan_clock"] = _clock
