"""What training takes, in the callbacks of transformers' trainer, which TRL's and ms-swift's
are."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):  # type: ignore[misc]
    """Writes at the end of each step of ours, its updates included, the seconds since training
    began less saving."""

    def __init__(self, training: Mapping[str, Any]) -> None:
        self._path = Path(training["times"])
        self._updates = training["samples"] // training["update"]
        self._began = self._stepped = self._saving = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start-up is over."""
        self._began = time.monotonic()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """An update was made."""
        self._stepped = time.monotonic()
        if state.global_step % self._updates == 0:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self._stepped - self._began - self._saving) + "\n")

    def on_save(self, *_: Any, **__: Any) -> None:
        """A checkpoint was saved, which is done right after an update."""
        self._saving += time.monotonic() - self._stepped
