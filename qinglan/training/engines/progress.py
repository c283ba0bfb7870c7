"""The record of a training run: metrics and checkpoints, dev values, the best step, alarms, and why
it ended.

The trainer inside verl owns one `TrainingProgress`. In a resumed run it reads what the earlier
attempts measured. The flow reads the same files, and writes the trainer's settings as JSON. This
module imports no torch.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from qinglan.config import Alarms
from qinglan.errors import ArtifactError
from qinglan.recipes import PrimaryMetric
from qinglan.runs.artifacts import write_json, write_jsonl
from qinglan.runs.launcher import JsonlTail
from qinglan.statistics import ArmScores, compare, mean_ci
from qinglan.training.alarms import Alarm, AlarmWatch

ALARMS_FILE = "alarms.jsonl"
"""File in `TrainerSettings.folder` with the alarms, by step."""
DEV_FILE = "dev.jsonl"
"""File beside it with the dev rows' values, by step."""
STOPPED_FILE = "stopped.json"
"""File beside it that says why training ended before its last step."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File in verl's folder of checkpoints with the newest one's step; written last."""
DEV_VALUE = "dev/value"
"""Metric of a validation: the dev split's mean of `TrainerSettings.dev_metric`."""
DEV_LOW = "dev/ci_low"
DEV_HIGH = "dev/ci_high"
"""Ends of that mean's 95% interval."""
DEV_RESAMPLES = 2_000


class TrainerSettings(BaseModel, frozen=True):
    """The settings of our trainer inside verl that verl's own configuration has no place for."""

    folder: Path
    """The stage's directory, which also holds the metrics of earlier attempts."""
    max_invalid_share: float
    """Share of a step's samples, or of a validation's, that may be unscored; with more of them
    training stops."""
    use_labels: bool
    """May an alarm about the primary metric do more than warn?"""
    dev_metric: str
    """Part of the reward whose average over the dev split chooses the model."""
    dev_rows: frozenset[str]
    """Ids of the dev rows that have it."""
    primary_metric: PrimaryMetric
    """Part of the reward that raises an alarm where it falls while the reward rises."""
    patience: int | None
    """Early stopping: number of validations without a better one that end training; never if
    None."""
    keep_checkpoints: int | None
    """Number of the newest checkpoints that are kept, beside the best; all if None."""
    alarms: Alarms


class TrainingProgress:
    """Measurements of a run, those of earlier attempts included, and what follows from them."""

    def __init__(self, settings: TrainerSettings, resumed_at: int = 0) -> None:
        """`resumed_at`: the checkpoint's step; what was measured after it will be measured
        again."""
        self._settings = settings
        self._watch = AlarmWatch(
            settings.alarms, settings.primary_metric, labels_act=settings.use_labels
        )
        self._dev: dict[int, float] = {}
        self._earlier = {
            step: metrics
            for step, metrics in read_metrics(settings.folder).items()
            if step <= resumed_at
        }
        for name in (ALARMS_FILE, DEV_FILE):
            _cut_to_step(settings.folder / name, resumed_at)
        self.not_in_checkpoint: list[Alarm] = []
        """Alarms of the newest step, whose checkpoint does not hold what they change."""
        for step, metrics in self._earlier.items():
            if DEV_VALUE in metrics:
                self._dev[step] = metrics[DEV_VALUE]
            alarms = self._watch.update(step, metrics)
            self.not_in_checkpoint = alarms if step == resumed_at else []

    def last_known(self, metric: str) -> float | None:
        """The latest value of a metric in earlier attempts; None where it was never measured."""
        for metrics in reversed(self._earlier.values()):
            if metric in metrics:
                return metrics[metric]
        return None

    def validated(
        self, step: int, values: Mapping[str, float], groups: Mapping[str, str]
    ) -> dict[str, float]:
        """Add the dev rows' values, by row id; returns their mean and its 95% interval, resampled
        by group."""
        interval = mean_ci(values, groups, DEV_RESAMPLES)
        if interval.mean is None:
            return {}
        entry = {"step": step, "values": dict(values), "groups": dict(groups)}
        with (self._settings.folder / DEV_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
        low, high = interval.ci95 or (interval.mean, interval.mean)
        self._dev[step] = interval.mean
        return {DEV_VALUE: interval.mean, DEV_LOW: low, DEV_HIGH: high}

    def stepped(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Add the metrics of one step; returns its new alarms, which are also written to
        `ALARMS_FILE`."""
        alarms = self._watch.update(step, metrics)
        self.not_in_checkpoint = alarms
        with (self._settings.folder / ALARMS_FILE).open("a", encoding="utf-8") as stream:
            stream.writelines(alarm.model_dump_json() + "\n" for alarm in alarms)
        return alarms

    def early_stopping_reason(self) -> str | None:
        """Why training should end here, if the last `patience` validations were not better than the
        best one."""
        if self._settings.patience is None or not self._dev:
            return None
        # In a tie the earlier one is the best: a later one that is as good brought nothing.
        best = max(self._dev, key=lambda step: (self._dev[step], -step))
        later_count = sum(step > best for step in self._dev)
        if later_count < self._settings.patience:
            return None
        return (
            f"{later_count} validations since step {best} ({self._dev[best]:.3f}) "
            "brought nothing better on dev"
        )

    def prune(self, checkpoint_folder: Path) -> None:
        """Delete checkpoints beyond `keep_checkpoints`, but not the best one."""
        keep = self._settings.keep_checkpoints
        if keep is None or not self._dev:
            return
        saved = checkpoints(checkpoint_folder)
        validated_steps = [step for step in saved if step in self._dev]
        best = max(validated_steps, key=lambda step: (self._dev[step], step), default=None)
        for step in sorted(saved)[:-keep]:
            if step == best:
                continue
            # Renamed first: a half-deleted folder must not pass for a checkpoint.
            renamed = saved[step].rename(saved[step].with_name(f"deleted_{step}"))
            shutil.rmtree(renamed, ignore_errors=True)

    def stop(self, reason: str, *, failed: bool) -> None:
        """Write why training ends before its last step; `failed`: it gave up, and must not be
        restarted."""
        write_json(self._settings.folder / STOPPED_FILE, {"reason": reason, "failed": failed})


def _cut_to_step(path: Path, last_step: int) -> None:
    """Drop later steps' lines, and half a line that a killed process left, which would spoil the
    next."""
    write_jsonl(path, [entry for entry in JsonlTail(path).new() if entry["step"] <= last_step])


class Stop(NamedTuple):
    """The end of a training before its last step."""

    reason: str
    failed: bool


def read_stop(folder: Path) -> Stop | None:
    """The training's early end; None where it had none."""
    path = folder / STOPPED_FILE
    if not path.exists():
        return None
    stopped = json.loads(path.read_text(encoding="utf-8"))
    return Stop(stopped["reason"], stopped["failed"])


def next_metrics_path(folder: Path) -> Path:
    """The file for the next attempt's metrics: verl would overwrite those of an earlier one."""
    attempts = len(list(folder.glob("metrics.*.jsonl")))
    return folder / f"metrics.{attempts + 1}.jsonl"


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step over all attempts; where two measured the same, the later one counts.

    A resumed run validates first, under the step that it resumes from.
    """
    steps: dict[int, dict[str, float]] = {}
    step_before = 0
    for entry in JsonlTail(folder / "metrics.*.jsonl").new():
        step = entry["step"]
        if step < step_before:
            # From here on another attempt went on. What the one before measured later is of a
            # policy that is lost.
            steps = {earlier: metrics for earlier, metrics in steps.items() if earlier <= step}
        metrics = {name: value for name, value in entry["data"].items() if value is not None}
        steps.setdefault(step, {}).update(metrics)
        step_before = step
    return dict(sorted(steps.items()))


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """Complete checkpoints by step; verl writes its tracker last, so a folder with a later step may
    be incomplete."""
    folders = {
        int(path.name.removeprefix("global_step_")): path
        for path in output_dir.glob("global_step_*")
    }
    newest = _newest_complete(output_dir / TRACKER, folders)
    return {step: path for step, path in sorted(folders.items()) if step <= newest}


def _newest_complete(tracker: Path, folders: Mapping[int, Path]) -> int:
    text = tracker.read_text().strip() if tracker.exists() else "0"
    if text.isdigit():
        return int(text)
    # verl was killed while it wrote the tracker, which is empty then. It wrote data.pt just before.
    return max((step for step, path in folders.items() if (path / "data.pt").exists()), default=0)


def repair_checkpoints(output_dir: Path) -> None:
    """Repair an empty tracker file, and delete incomplete folders before a later step makes them
    look complete."""
    tracker = output_dir / TRACKER
    saved = checkpoints(output_dir)
    if tracker.exists() and not tracker.read_text().strip().isdigit():
        if saved:
            tracker.write_text(str(max(saved)))
        else:
            tracker.unlink()
    for incomplete in set(output_dir.glob("global_step_*")) - set(saved.values()):
        shutil.rmtree(incomplete)


def best_checkpoint(output_dir: Path, metrics_folder: Path) -> tuple[int, Path | None]:
    """Step and folder of the checkpoint to go on with: the most trained one that is not worse on
    the dev split than the best, as far as the dev split can tell.

    The best of several noisy values is often the luckiest, and more training is worth more than
    luck. The policy before training counts as step 0, without a folder, where it was validated.
    Where no checkpoint is above it, it goes on.
    """
    saved = checkpoints(output_dir)
    measured = read_metrics(metrics_folder)
    values = {
        step: measured[step][DEV_VALUE]
        for step in (0, *saved)
        if DEV_VALUE in measured.get(step, {})
    }
    if not values:
        raise ArtifactError(
            f"nothing was validated before training ended: no checkpoint under {output_dir} has "
            f"{DEV_VALUE}; set rl.val_before_train, or rl.choose = last"
        )
    # In a tie the policy before training is the best, then the most trained one.
    best = max(values, key=lambda step: (values[step], step == 0, step))
    if best == 0:
        return 0, None
    # Where a step was validated twice, the later values count.
    dev_entries = {entry["step"]: entry for entry in JsonlTail(metrics_folder / DEV_FILE).new()}
    later_steps = [step for step in values if step > best]
    steps_as_good = [step for step in later_steps if not _is_worse(dev_entries, step, best)]
    chosen = max(steps_as_good, default=best)
    return chosen, saved.get(chosen)


def _is_worse(dev_entries: Mapping[int, dict[str, dict[str, Any]]], step: int, best: int) -> bool:
    """Does the 95% interval of the difference, row by row, lie below 0?"""
    if step not in dev_entries or best not in dev_entries:
        return True
    comparison = compare(
        ArmScores(arm=str(step), scores={"dev": dev_entries[step]["values"]}),
        ArmScores(arm=str(best), scores={"dev": dev_entries[best]["values"]}),
        "dev",
        dev_entries[best]["groups"] | dev_entries[step]["groups"],
        DEV_RESAMPLES,
    )
    if comparison.diff is None:
        return True
    # One group of rows alone has no interval.
    high = comparison.ci95[1] if comparison.ci95 else comparison.diff
    return high < 0


def last_checkpoint(output_dir: Path) -> tuple[int, Path]:
    """Step and folder of the newest checkpoint, validated or not."""
    saved = checkpoints(output_dir)
    if not saved:
        raise ArtifactError(f"no checkpoint under {output_dir}")
    newest = max(saved)
    return newest, saved[newest]
