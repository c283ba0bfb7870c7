"""A stage's view of an engine that runs: its metrics, its alarms, and the rows that it leaves out.

Each follower is called again and again while the engine runs, and once after.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.errors import StageError
from qinglan.evaluation.reasons import alarm_words
from qinglan.runs.launcher import JsonlTail, LineTail, Metrics
from qinglan.tasks.stage import Stage, emit_run_event
from qinglan.text import markdown_table, slug
from qinglan.training.alarms import Alarm, read_alarms
from qinglan.training.engines.progress import ALARMS_FILE

MAX_LEFT_OUT_SHARE = 0.2
"""Share of the training rows that an engine may leave out as too long.

With more of them it is stopped: its length limit is not the one that was meant.
"""
_FLUSH_EVERY_S = 5
_SIZE_LINE = re.compile(rb"[Dd]ataset|num_rows|random samples")
"""A line of an engine's log about the number of its rows."""

LoggedStep = tuple[int, int, str, Metrics]
"""One line of a metrics file: the step, the steps in all, a text for people, and the metrics.

The steps in all are 0 where the line is not about progress.
"""


class Follower:
    """Hands new metrics of a training process to MLflow and to the people who wait."""

    def __init__(
        self, stage: Stage, path: Path, read: Callable[[Metrics], LoggedStep | None]
    ) -> None:
        """Follow a metrics file.

        Args:
            path: the file; its name may be a pattern, where each attempt has a file of its own.
            read: what a line of it says; None for a line without metrics.
        """
        self.last_step = 0
        self._stage = stage
        self._read = read
        self._tail = JsonlTail(path)
        self._flushed_at = time.monotonic()
        self._points: dict[int, Metrics] = {}
        self._unsent: dict[int, Metrics] = {}

    def __call__(self) -> None:
        """Look for new lines."""
        for entry in self._tail.new():
            logged = self._read(entry)
            if logged is None:
                continue
            step, total, text, metrics = logged
            self.last_step = max(self.last_step, step)
            self._points.setdefault(step, {}).update(metrics)
            self._unsent.setdefault(step, {}).update(metrics)
            if total:
                self._stage.progress(step, total, text)
        if self._unsent and time.monotonic() - self._flushed_at > _FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send MLflow what it does not have yet, several steps in one request."""
        self._stage.tracker.log_steps(self._stage.mlflow_run_id, self._unsent.items())
        self._unsent = {}
        self._flushed_at = time.monotonic()

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Values of one metric by step; where a step was measured twice, the later one counts."""
        self.flush()
        return [
            (step, float(metrics[key]))
            for step, metrics in sorted(self._points.items())
            if key in metrics
        ]


def first_and_last(name: str, points: list[tuple[int, float]]) -> dict[str, float]:
    """First and last value of a curve, each averaged over a tenth of it against noise."""
    values = [value for _, value in points]
    if not values:
        return {}
    width = max(1, len(values) // 10)
    return {
        f"{name}_first": sum(values[:width]) / width,
        f"{name}_last": sum(values[-width:]) / width,
    }


class AlarmFollower:
    """Reports the alarms of a training run to users and to Prefect's automations.

    What earlier attempts of the stage left in its `alarms.jsonl` counts, but is not reported again.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._log = get_run_logger()
        self._file = stage.directory / ALARMS_FILE
        self.alarms = read_alarms(self._file)
        """All alarms, in the order in which they came."""
        self._reported = list(self.alarms)
        """The alarms that are not to be reported again.

        Those of steps that a resume discarded are among them: they may come again.
        """

    def __call__(self) -> None:
        """Report new alarms, as the trainer writes them."""
        self.alarms = read_alarms(self._file)
        # A resumed training cuts the file to its checkpoint: what comes again was reported.
        new_alarms = [alarm for alarm in self.alarms if alarm not in self._reported]
        for alarm in new_alarms:
            self._reported.append(alarm)
            self._report(alarm)
            self._show_all()

    def _report(self, alarm: Alarm) -> None:
        """Tell the log, Prefect's automations and MLflow of an alarm."""
        stage = self._stage
        message = alarm_words(alarm).en
        self._log.warning("%s: step %d: alarm %s: %s", stage.name, alarm.step, alarm.name, message)
        emit_run_event(
            f"alarm.{alarm.name}",
            stage.run,
            {**alarm.model_dump(mode="json"), "message": message},
            stage=stage.name,
            alarm=alarm.name,
            action=alarm.action,
        )
        steps = [same.step for same in self.alarms if same.name == alarm.name]
        counts = {f"alarms/{alarm.name}": len(steps)}
        stage.tracker.log_metrics(stage.mlflow_run_id, counts, alarm.step)
        listed_steps = ", ".join(map(str, steps))
        tags = {f"alarm.{alarm.name}": f"step {listed_steps}"}
        stage.tracker.set_tags(stage.mlflow_run_id, tags)

    def _show_all(self) -> None:
        """Show a table of all alarms in Prefect."""
        stage = self._stage
        last = self.alarms[-1]
        summary = f"{len(self.alarms)} so far, the last: {last.name} at step {last.step}"
        rows = [
            (f"{alarm.step:,}", f"`{alarm.name}`", alarm.action, alarm_words(alarm).en)
            for alarm in self.alarms
        ]
        table = markdown_table(("Step", "Alarm", "Action", "What was seen"), rows, "r")
        key = slug(f"{stage.name}-alarms")
        try:
            create_markdown_artifact(f"{table}\n", key=key, description=summary)
        except httpx.HTTPError as error:
            # A server that is away for a while must not cost a training run.
            self._log.warning("%s: Prefect did not take the table of alarms: %s", stage.name, error)


class LeftOut:
    """Counts the rows that an engine leaves out as too long, by what it writes to its log.

    They are the same in every attempt.
    """

    def __init__(
        self,
        stage: Stage,
        log: Path,
        rows: int,
        count: Callable[[str], int],
        setting: str,
        least: int = 0,
    ) -> None:
        """Follow an engine's log.

        Args:
            rows: the training rows that the engine was given.
            count: how many it left out, by the lines about its rows; 0 while they don't say.
            setting: the length limit and its value, for people.
            least: the training rows that must remain.
        """
        self.rows = rows
        self.count = 0
        self.dropped: dict[str, int] = {}
        """The count, by the reason that a stage's result has for it."""
        self._stage = stage
        self._lines = LineTail(log)
        self._read_count = count
        self._setting = setting
        self._least = least
        self._size_lines = ""

    def __call__(self) -> None:
        """Look for new lines.

        Raises:
            StageError: more than `MAX_LEFT_OUT_SHARE` of the rows are left out, or too few remain.
        """
        # The lines that say it together may come apart, so those of earlier calls are read again.
        for line in self._lines.new():
            if _SIZE_LINE.search(line):
                self._size_lines += line.decode(errors="replace")
        count = self._read_count(self._size_lines)
        if count == self.count:
            return
        self.count = count
        self.dropped = {"prompt_too_long": count}
        stage = self._stage
        finding = f"{count:,} of {self.rows:,} training rows are longer than {self._setting} tokens"
        if count > MAX_LEFT_OUT_SHARE * self.rows:
            raise StageError(
                f"{stage.name}: {finding}, more than {MAX_LEFT_OUT_SHARE:.0%}; raise it"
            )
        if self.rows - count < self._least:
            raise StageError(
                f"{stage.name}: {finding}; the others fill no batch of {self._least}; add questions"
            )
        stage.say(f"{finding} and left out")
