"""Ends an engine that stalls: verl waits for ever for a lost sample."""

import time
from contextlib import suppress
from pathlib import Path

from qinglan.runs.artifacts import PROGRESS_FILE
from qinglan.runs.launcher import StalledError
from qinglan.tasks.attempts import STARTED
from qinglan.tasks.stage import Stage

LOOK_EVERY_S = 15.0


class Watchdog:
    """Watches one attempt of an engine, which is to write something now and then.

    A training has to write more than its log, which grows also while it waits for a lost sample.
    """

    def __init__(self, stage: Stage, name: str, log: Path, *, trains: bool) -> None:
        self._stage = stage
        self._name = name
        self._log = log
        # The stage writes these itself.
        self._ignored_names = {STARTED, PROGRESS_FILE}
        if trains:
            self._ignored_names.add(log.name)
        self._limit_s = stage.run.profile.trainer.stalled_after_s
        self._look_every_s = min(LOOK_EVERY_S, self._limit_s / 10)
        self._started_s = time.monotonic()
        self._looked_s = self._started_s
        self._changed_s = self._started_s
        self._newest = (0, "")
        self._has_warned = False

    def __call__(self) -> None:
        """Look at the stage's files, now and then; called while the engine runs.

        Raises:
            StalledError: none of them changed for `trainer.stalled_after_s`.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < self._look_every_s:
            return
        self._looked_s = now_s
        newest = self._newest_file()
        if newest != self._newest:
            self._newest = newest
            self._changed_s = now_s
            self._has_warned = False
            return
        silent_s = now_s - self._changed_s
        last_file = self._newest[1] or "none yet"
        silence = (
            f"{self._name} wrote nothing for {silent_s / 60:.1f} minutes (last file: {last_file})"
        )
        if silent_s > self._limit_s:
            raise StalledError(
                f"{silence}, trainer.stalled_after_s; where its processes waited stands at the end "
                f"of {self._log}, of a job on Ray's dashboard",
                now_s - self._started_s,
            )
        if silent_s > self._limit_s / 3 and not self._has_warned:
            self._has_warned = True
            self._stage.say(f"{silence}; it is ended after {self._limit_s / 60:.0f}")

    def _newest_file(self) -> tuple[int, str]:
        """The time of change, in nanoseconds, and the name of the file that changed last."""
        newest = (0, "")
        for path in self._stage.directory.rglob("*"):
            if path.name in self._ignored_names:
                continue
            # The engine may be removing an old checkpoint.
            with suppress(OSError):
                newest = max(newest, (path.stat().st_mtime_ns, path.name))
        return newest
