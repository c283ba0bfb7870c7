"""ms-swift's plug-in (`--external_plugins`): our reward under the name `qinglan`."""

import json
import os
from pathlib import Path
from typing import Any

from scoring import Scoring
from swift.rewards import ORM, orms


class Qinglan(ORM):  # type: ignore[misc]
    """Scores a batch."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        super().__init__(args, **kwargs)
        path = Path(os.environ["QINGLAN_RIVAL_TRAINING"])
        self._scoring = Scoring(json.loads(path.read_text(encoding="utf-8")))

    def __call__(self, completions: list[str], baseline: list[str], **_: Any) -> list[float]:
        """A score per completion; `baseline`: the dataset's column."""
        return self._scoring.scores([json.loads(one) for one in baseline], completions)


orms["qinglan"] = Qinglan
