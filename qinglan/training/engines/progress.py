"""What a training run has measured so far: dev values with their intervals, the best step, alarms, why it ended.

The trainer inside verl owns one `TrainingProgress`. In a resumed run it reads what the earlier attempts measured.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from qinglan.runs.artifacts import write_json
from qinglan.statistics import mean_ci
from qinglan.training.alarms import Alarm, AlarmWatch
from qinglan.training.engines.trainer_settings import (
    ALARMS_FILE,
    DEV_HIGH,
    DEV_LOW,
    DEV_VALUE,
    STOPPED_FILE,
    TrainerSettings,
)
from qinglan.training.engines.verl import checkpoints, read_metrics

DEV_RESAMPLES = 2_000


class TrainingProgress:
    def __init__(self, settings: TrainerSettings, resumed_at: int = 0) -> None:
        """`resumed_at`: the checkpoint's step; what was measured after it will be measured again."""
        self._settings = settings
        self._watch = AlarmWatch(settings.alarms, settings.primary_metric, labels_act=settings.use_labels)
        self._dev: dict[int, float] = {}
        self._earlier = {step: known for step, known in read_metrics(settings.folder).items() if step <= resumed_at}
        self.not_in_checkpoint: list[Alarm] = []
        """Alarms of the step that training goes on from: its checkpoint was saved before their actions were taken."""
        for step, known in self._earlier.items():
            if DEV_VALUE in known:
                self._dev[step] = known[DEV_VALUE]
            alarms = self._watch.update(step, known)
            self.not_in_checkpoint = alarms if step == resumed_at else []

    def last_known(self, metric: str) -> float | None:
        return next((known[metric] for known in reversed(self._earlier.values()) if metric in known), None)

    def validated(self, step: int, values: Sequence[float | None], groups: Sequence[str]) -> dict[str, float]:
        """Add the dev rows' values; returns their mean and its 95% interval from a bootstrap over groups."""
        by_row = {str(row): value for row, value in enumerate(values)}
        found = mean_ci(by_row, dict(zip(by_row, groups, strict=True)), DEV_RESAMPLES)
        if found.mean is None:
            return {}
        low, high = found.ci95 or (found.mean, found.mean)
        self._dev[step] = found.mean
        return {DEV_VALUE: found.mean, DEV_LOW: low, DEV_HIGH: high}

    def stepped(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Add the metrics of one step; returns its new alarms, which are also written to `ALARMS_FILE`."""
        alarms = self._watch.update(step, metrics)
        with (self._settings.folder / ALARMS_FILE).open("a", encoding="utf-8") as stream:
            stream.writelines(alarm.model_dump_json() + "\n" for alarm in alarms)
        return alarms

    def early_stopping_reason(self) -> str | None:
        """Why training should end here, if the last `patience` validations were not better than the best one."""
        if self._settings.patience is None or not self._dev:
            return None
        best = max(self._dev, key=lambda step: (self._dev[step], -step))  # the earlier one in a tie
        since = sum(step > best for step in self._dev)
        if since < self._settings.patience:
            return None
        return f"{since} validations since step {best} ({self._dev[best]:.3f}) brought nothing better on dev"

    def prune(self, checkpoint_folder: Path) -> None:
        if (keep := self._settings.keep_checkpoints) is None or not self._dev:
            return
        saved = checkpoints(checkpoint_folder)
        best = max((step for step in saved if step in self._dev), key=lambda s: (self._dev[s], s), default=None)
        for step in sorted(saved)[:-keep]:
            if step != best:  # renamed first: a half-deleted folder must not pass for a checkpoint
                renamed = saved[step].rename(saved[step].with_name(f"deleted_{step}"))
                shutil.rmtree(renamed, ignore_errors=True)

    def stop(self, reason: str, *, failed: bool) -> None:
        """Write why training ends before its last step; `failed`: it gave up, and must not be restarted."""
        write_json(self._settings.folder / STOPPED_FILE, {"reason": reason, "failed": failed})


def read_stop(folder: Path) -> tuple[str, bool] | None:
    """Why training ended before its last step, and whether it failed; None where it did not."""
    path = folder / STOPPED_FILE
    if not path.exists():
        return None
    stopped = json.loads(path.read_text(encoding="utf-8"))
    return stopped["reason"], stopped["failed"]
