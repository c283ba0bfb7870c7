"""What a training run has shown so far: dev values with their intervals, the best step, alarms, why it ended.

Pure but for the files in the stage's directory; the trainer inside verl owns one, and a resumed run's knows what the
earlier attempts measured.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from qinglan.alarms import Alarm, AlarmWatch
from qinglan.artifacts import write_json
from qinglan.engines.trainer_settings import ALARMS_FILE, DEV_HIGH, DEV_LOW, DEV_VALUE, STOPPED_FILE, TrainerSettings
from qinglan.engines.verl import checkpoints, read_metrics
from qinglan.statistics import mean_ci

DEV_RESAMPLES = 2_000
Metrics = Mapping[str, float]


class TrainingProgress:
    """Follows one run's steps and validations."""

    def __init__(self, settings: TrainerSettings, resumed_at: int = 0) -> None:
        """`resumed_at`: the step of the checkpoint; what was measured after it is measured again."""
        self._settings, self._watch = settings, AlarmWatch(settings.alarms)
        self._dev: dict[int, float] = {}
        self.earlier = {step: known for step, known in read_metrics(settings.folder).items() if step <= resumed_at}
        for step, known in self.earlier.items():
            self._note(step, known)
            self._watch.update(step, known)

    def dev_metrics(self, values: Sequence[float | None], groups: Sequence[str]) -> dict[str, float]:
        """Mean of the dev rows' values, and its 95% interval from a bootstrap over groups; empty without values."""
        by_row = {str(row): value for row, value in enumerate(values)}
        found = mean_ci(by_row, dict(zip(by_row, groups, strict=True)), DEV_RESAMPLES)
        if found.mean is None:
            return {}
        low, high = found.ci95 or (found.mean, found.mean)
        return {DEV_VALUE: found.mean, DEV_LOW: low, DEV_HIGH: high}

    def stepped(self, step: int, metrics: Metrics) -> list[Alarm]:
        """Take in all that one step measured; returns what is newly alarming, which is also written down."""
        self._note(step, metrics)
        alarms = self._watch.update(step, metrics)
        with (self._settings.folder / ALARMS_FILE).open("a", encoding="utf-8") as stream:
            stream.writelines(alarm.model_dump_json() + "\n" for alarm in alarms)
        return alarms

    def out_of_patience(self) -> str | None:
        """Why training should end here, if the last validations brought nothing better."""
        patience, measured = self._settings.patience, sorted(self._dev)
        if patience is None or not measured:
            return None
        best = self.best_step
        since = [step for step in measured if step > best]
        if len(since) < patience:
            return None
        return f"{len(since)} validations since step {best} ({self._dev[best]:.3f}) brought nothing better on dev"

    @property
    def best_step(self) -> int:
        """The step with the highest dev value; the earlier one in a tie, as nothing better came since."""
        return max(self._dev, key=lambda step: (self._dev[step], -step))

    def prune(self, checkpoint_folder: Path) -> None:
        """Delete checkpoints but the newest few and the best of those that were validated."""
        keep = self._settings.keep_checkpoints
        saved = checkpoints(checkpoint_folder)
        if keep is None or not self._dev:
            return
        best = max((step for step in saved if step in self._dev), key=lambda s: (self._dev[s], s), default=None)
        for step in sorted(saved)[:-keep]:
            if step != best:
                shutil.rmtree(saved[step])

    def stop(self, reason: str, *, failed: bool) -> None:
        """Write down why training ends before its last step; `failed`: nobody should just start it again."""
        write_json(self._settings.folder / STOPPED_FILE, {"reason": reason, "failed": failed})

    def _note(self, step: int, metrics: Metrics) -> None:
        if DEV_VALUE in metrics:
            self._dev[step] = metrics[DEV_VALUE]


def read_stop(folder: Path) -> tuple[str, bool] | None:
    """Why training ended before its last step, and whether it failed; None where it did not."""
    path = folder / STOPPED_FILE
    if not path.exists():
        return None
    stopped = json.loads(path.read_text(encoding="utf-8"))
    return stopped["reason"], stopped["failed"]
