"""What a training run has measured so far: metrics and checkpoints, dev values, the best step,
alarms, why it ended.

The trainer inside verl owns one `TrainingProgress`. In a resumed run it reads what the earlier
attempts measured. The flow reads the same files, and writes the trainer's settings as JSON. This
module imports no torch.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from qinglan.config import Alarms
from qinglan.errors import ArtifactError
from qinglan.recipes import PrimaryMetric
from qinglan.runs.artifacts import write_json, write_jsonl
from qinglan.runs.launcher import JsonlTail
from qinglan.statistics import ArmScores, compare, mean_ci
from qinglan.training.alarms import Alarm, AlarmWatch

ALARMS_FILE, DEV_FILE, STOPPED_FILE = "alarms.jsonl", "dev.jsonl", "stopped.json"
"""In `TrainerSettings.folder`: the alarms, and the dev rows' values, by step; why training ended
before its last."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File in verl's folder of checkpoints with the newest one's step; written last."""
DEV_VALUE, DEV_LOW, DEV_HIGH = "dev/value", "dev/ci_low", "dev/ci_high"
"""Metrics of a validation: the dev split's mean of `TrainerSettings.dev_metric` and its 95%
interval."""
DEV_RESAMPLES = 2_000


class TrainerSettings(BaseModel, frozen=True):
    """The settings of our trainer inside verl that verl's own configuration has no place for."""

    folder: Path
    """The stage's directory, which also holds the metrics of earlier attempts."""
    max_invalid_share: float
    """Of a step's samples, or of a validation's; with more unscored ones training stops."""
    use_labels: bool
    """Whether an alarm about the primary metric may do more than warn."""
    dev_metric: str
    """Which of the reward's parts, averaged over the dev split, chooses the model."""
    dev_rows: frozenset[str]
    """Ids of the dev rows that have it."""
    primary_metric: PrimaryMetric
    """The part of which a fall while the reward rises is an alarm."""
    patience: int | None
    """Early stopping: so many validations without a better one end training; never if None."""
    keep_checkpoints: int | None
    """How many of the newest are kept, beside the best; all if None."""
    alarms: Alarms


class TrainingProgress:
    def __init__(self, settings: TrainerSettings, resumed_at: int = 0) -> None:
        """`resumed_at`: the checkpoint's step; what was measured after it will be measured
        again."""
        self._settings = settings
        self._watch = AlarmWatch(
            settings.alarms, settings.primary_metric, labels_act=settings.use_labels
        )
        self._dev: dict[int, float] = {}
        self._earlier = {
            step: known
            for step, known in read_metrics(settings.folder).items()
            if step <= resumed_at
        }
        for path in (
            settings.folder / ALARMS_FILE,
            settings.folder / DEV_FILE,
        ):  # half a line would spoil the next
            write_jsonl(
                path, [entry for entry in JsonlTail(path).new() if entry["step"] <= resumed_at]
            )
        self.not_in_checkpoint: list[Alarm] = []
        """Alarms of the newest step, whose checkpoint does not hold what they change."""
        for step, known in self._earlier.items():
            if DEV_VALUE in known:
                self._dev[step] = known[DEV_VALUE]
            alarms = self._watch.update(step, known)
            self.not_in_checkpoint = alarms if step == resumed_at else []

    def last_known(self, metric: str) -> float | None:
        return next(
            (known[metric] for known in reversed(self._earlier.values()) if metric in known), None
        )

    def validated(
        self, step: int, values: Mapping[str, float], groups: Mapping[str, str]
    ) -> dict[str, float]:
        """Add the dev rows' values, by row id; returns their mean and its 95% interval, resampled
        by group."""
        found = mean_ci(values, groups, DEV_RESAMPLES)
        if found.mean is None:
            return {}
        with (self._settings.folder / DEV_FILE).open("a", encoding="utf-8") as stream:
            stream.write(
                json.dumps({"step": step, "values": dict(values), "groups": dict(groups)}) + "\n"
            )
        low, high = found.ci95 or (found.mean, found.mean)
        self._dev[step] = found.mean
        return {DEV_VALUE: found.mean, DEV_LOW: low, DEV_HIGH: high}

    def stepped(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Add the metrics of one step; returns its new alarms, which are also written to
        `ALARMS_FILE`."""
        alarms = self.not_in_checkpoint = self._watch.update(step, metrics)
        with (self._settings.folder / ALARMS_FILE).open("a", encoding="utf-8") as stream:
            stream.writelines(alarm.model_dump_json() + "\n" for alarm in alarms)
        return alarms

    def early_stopping_reason(self) -> str | None:
        """Why training should end here, if the last `patience` validations were not better than the
        best one."""
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
        best = max(
            (step for step in saved if step in self._dev),
            key=lambda s: (self._dev[s], s),
            default=None,
        )
        for step in sorted(saved)[:-keep]:
            if step != best:  # renamed first: a half-deleted folder must not pass for a checkpoint
                renamed = saved[step].rename(saved[step].with_name(f"deleted_{step}"))
                shutil.rmtree(renamed, ignore_errors=True)

    def stop(self, reason: str, *, failed: bool) -> None:
        """Write why training ends before its last step; `failed`: it gave up, and must not be
        restarted."""
        write_json(self._settings.folder / STOPPED_FILE, {"reason": reason, "failed": failed})


def read_stop(folder: Path) -> tuple[str, bool] | None:
    """Why training ended before its last step, and whether it failed; None where it did not."""
    path = folder / STOPPED_FILE
    if not path.exists():
        return None
    stopped = json.loads(path.read_text(encoding="utf-8"))
    return stopped["reason"], stopped["failed"]


def next_metrics_path(folder: Path) -> Path:
    return folder / f"metrics.{len(list(folder.glob('metrics.*.jsonl'))) + 1}.jsonl"


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step over all attempts; where two measured the same, the later one counts.

    A resumed run validates first, under the step that it resumes from.
    """
    steps: dict[int, dict[str, float]] = {}
    before = 0
    for entry in JsonlTail(folder / "metrics.*.jsonl").new():
        if entry["step"] < before:  # from here on another attempt went on; the later steps are lost
            steps = {step: known for step, known in steps.items() if step <= entry["step"]}
        known = {name: value for name, value in entry["data"].items() if value is not None}
        before = entry["step"]
        steps.setdefault(before, {}).update(known)
    return dict(sorted(steps.items()))


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """Complete checkpoints by step; verl writes its tracker last, so a folder with a later step may
    be incomplete."""
    found = {
        int(path.name.removeprefix("global_step_")): path
        for path in output_dir.glob("global_step_*")
    }
    tracker = output_dir / TRACKER
    text = tracker.read_text().strip() if tracker.exists() else "0"
    if (
        not text.isdigit()
    ):  # verl empties the file before it writes it, and wrote data.pt just before
        text = str(
            max((step for step, path in found.items() if (path / "data.pt").exists()), default=0)
        )
    return {step: path for step, path in sorted(found.items()) if step <= int(text)}


def repair_checkpoints(output_dir: Path) -> None:
    """Repair an empty tracker file, and delete incomplete folders before a later step makes them
    look complete."""
    tracker, saved = output_dir / TRACKER, checkpoints(output_dir)
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
    saved, measured = checkpoints(output_dir), read_metrics(metrics_folder)
    values = {
        step: measured[step][DEV_VALUE]
        for step in (0, *saved)
        if DEV_VALUE in measured.get(step, {})
    }
    if not values:
        problem = f"no checkpoint under {output_dir} has {DEV_VALUE}; set rl.val_before_train, or rl.choose = last"
        raise ArtifactError(f"nothing was validated before training ended: {problem}")
    best = max(values, key=lambda step: (values[step], step == 0, step))
    # Of a step that was validated twice, the later values count.
    rows = {entry["step"]: entry for entry in JsonlTail(metrics_folder / DEV_FILE).new()}
    as_good = [step for step in values if step > best > 0 and not _is_worse(rows, step, best)]
    step = max(as_good, default=best)
    return step, saved.get(step)


def _is_worse(rows: Mapping[int, dict[str, dict[str, Any]]], step: int, best: int) -> bool:
    """Does the 95% interval of the difference, row by row, lie below 0?"""
    if step not in rows or best not in rows:
        return True
    a, b = (ArmScores(arm=str(each), scores={"dev": rows[each]["values"]}) for each in (step, best))
    found = compare(a, b, "dev", rows[best]["groups"] | rows[step]["groups"], DEV_RESAMPLES)
    return found.diff is None or (found.ci95 or (0.0, found.diff))[1] < 0


def last_checkpoint(output_dir: Path) -> tuple[int, Path]:
    """Step and folder of the newest checkpoint, validated or not."""
    if not (saved := checkpoints(output_dir)):
        raise ArtifactError(f"no checkpoint under {output_dir}")
    return max(saved), saved[max(saved)]
