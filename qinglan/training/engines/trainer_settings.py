"""The settings of our trainer inside verl that verl's own configuration has no place for.

The flow writes them as JSON, the trainer in `ppo_trainer` reads them. This module imports no torch.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from qinglan.config import Alarms
from qinglan.recipes import PrimaryMetric

ALARMS_FILE, STOPPED_FILE = "alarms.jsonl", "stopped.json"
"""In `TrainerSettings.folder`: the alarms, by step; and why training ended before its last step."""
DEV_VALUE, DEV_LOW, DEV_HIGH = "dev/value", "dev/ci_low", "dev/ci_high"
"""Metrics of a validation: the dev split's mean of `TrainerSettings.dev_metric` and its 95% interval."""


class TrainerSettings(BaseModel):
    model_config = ConfigDict(frozen=True)

    folder: Path
    """The stage's directory, which also holds the metrics of earlier attempts."""
    max_invalid_share: float
    """Of a step's samples, or of a validation's; with more unscored ones training stops."""
    use_labels: bool
    """Whether an alarm about the primary metric may do more than warn."""
    dev_metric: str
    """Which of the reward's parts, averaged over the dev split, chooses the model."""
    primary_metric: PrimaryMetric
    """The part of which a fall while the reward rises is an alarm."""
    patience: int | None
    """Early stopping: so many validations without a better one end training; never if None."""
    keep_checkpoints: int | None
    """How many of the newest are kept, beside the best; all if None."""
    alarms: Alarms
