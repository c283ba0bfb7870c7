"""How a stage runs an engine's process: start it, follow its metrics, count the rows that it leaves out."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qinglan.engines.command import Command
from qinglan.engines.launcher import JsonlTail, LineTail, launch
from qinglan.errors import StageError
from tasks.stage import Stage

Metrics = dict[str, Any]
MAX_LEFT_OUT_SHARE = 0.2
"""An engine that leaves out more of the training rows is stopped: its length limit is not what was meant."""
_SIZE_LINE = re.compile(rb"[Dd]ataset|random samples")


def run_engine(
    stage: Stage, command: Command, *, name: str, log: str, on_poll: Callable[[], None] | None = None
) -> None:
    """Run a training process to its end.

    Raises:
        EngineError: it failed; with the end of its log.
        Exception: whatever `on_poll` raises, after the process has ended.
    """
    launch(command, name=name, log=stage.directory / log, on_poll=on_poll)


class Follower:
    """Hands new metrics of a training process to MLflow and to the people who wait."""

    def __init__(
        self, stage: Stage, path: Path, read: Callable[[Metrics], tuple[int, int, str, Metrics] | None]
    ) -> None:
        self._stage, self._read, self._tail = stage, read, JsonlTail(path)
        self._points: dict[int, Metrics] = {}
        self._unsent: dict[int, Metrics] = {}
        self._flushed_at = time.monotonic()

    def __call__(self) -> None:
        """Look for new lines; called while the process runs and once after."""
        for entry in self._tail.new():
            if (found := self._read(entry)) is None:
                continue
            step, total, text, metrics = found
            self._points.setdefault(step, {}).update(metrics)
            self._unsent.setdefault(step, {}).update(metrics)
            if total:
                self._stage.progress(step, total, text)
        if self._unsent and time.monotonic() - self._flushed_at > 5:
            self.flush()

    def flush(self) -> None:
        """Send what MLflow has not seen."""
        self._stage.tracker.log_steps(self._stage.mlflow_run_id, self._unsent.items())
        self._unsent, self._flushed_at = {}, time.monotonic()

    @property
    def last_step(self) -> int:
        """The highest step seen."""
        return max(self._points, default=0)

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Values of one metric by step; where a step was measured twice, the later one counts."""
        self.flush()
        return [(step, float(metrics[key])) for step, metrics in sorted(self._points.items()) if key in metrics]


class LeftOut:
    """The rows that an engine leaves out as too long, by what this attempt writes to its log."""

    def __init__(self, stage: Stage, log: Path, rows: int, count: Callable[[str], int], setting: str) -> None:
        self.rows, self.count = rows, 0
        self._stage, self._lines, self._read, self._setting = stage, LineTail(log, from_end=True), count, setting
        self._sizes = ""

    def __call__(self) -> None:
        """Look for new lines.

        Raises:
            StageError: more than `MAX_LEFT_OUT_SHARE` of the rows are left out.
        """
        sizes = "".join(line.decode(errors="replace") for line in self._lines.new() if _SIZE_LINE.search(line))
        if not sizes:
            return
        self._sizes += sizes
        if (count := self._read(self._sizes)) == self.count:
            return
        self.count = count
        what = f"{count:,} of {self.rows:,} training rows are longer than {self._setting} tokens"
        if count > MAX_LEFT_OUT_SHARE * self.rows:
            raise StageError(f"{self._stage.name}: {what}, more than {MAX_LEFT_OUT_SHARE:.0%}; raise it")
        self._stage.say(f"{what} and left out")

    @property
    def dropped(self) -> dict[str, int]:
        """As a stage's outcome wants it."""
        return {"prompt_too_long": self.count} if self.count else {}


def first_and_last(name: str, points: list[tuple[int, float]]) -> dict[str, float]:
    """First and last value of a curve, each averaged over a tenth of it against noise."""
    values = [value for _, value in points]
    if not values:
        return {}
    width = max(1, len(values) // 10)
    return {f"{name}_first": sum(values[:width]) / width, f"{name}_last": sum(values[-width:]) / width}
