"""Seconds of training, by the callbacks of transformers' trainer: TRL's and ms-swift's are such."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback


class Clock(TrainerCallback):  # type: ignore[misc]
    """Writes the seconds since training began, less saving, at the end of each step of ours.

    A step of ours has several updates, which are the trainer's steps.
    """

    def __init__(self, training: Mapping[str, Any]) -> None:
        self._path = Path(training["times"])
        self._updates = training["samples"] // training["update"]
        self._began_s = 0.0
        self._updated_s = 0.0
        self._saving_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin to count once start-up is over."""
        self._began_s = time.monotonic()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Write the seconds if the update was the last one of a step of ours."""
        # Saving begins here, if a checkpoint is due: see `on_save`.
        self._updated_s = time.monotonic()
        if state.global_step % self._updates == 0:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self._updated_s - self._began_s - self._saving_s) + "\n")

    def on_save(self, *_: Any, **__: Any) -> None:
        """Leave out the time since the last update: a checkpoint is saved right after one."""
        self._saving_s += time.monotonic() - self._updated_s
