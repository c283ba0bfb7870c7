"""What our trainer inside verl needs to know beside verl's own configuration; written as JSON beside it.

No torch here: the flow writes it, the trainer in `ppo_trainer` reads it.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from qinglan.config import Alarms
from qinglan.recipes.kinds.common import PrimaryMetric

ALARMS_FILE, STOPPED_FILE = "alarms.jsonl", "stopped.json"
"""In `TrainerSettings.folder`: what was alarming, by step; and why training ended before its last step."""
DEV_VALUE, DEV_LOW, DEV_HIGH = "dev/value", "dev/ci_low", "dev/ci_high"
"""Metrics of a validation: the dev split's mean of `TrainerSettings.dev_metric` and its 95% interval."""


class TrainerSettings(BaseModel):
    """How much may fail, what is watched, when to stop, what to keep."""

    model_config = ConfigDict(frozen=True)

    folder: Path
    """The stage's directory, which also holds the metrics of earlier attempts."""
    max_invalid_share: float
    """Of a step's samples, or of a validation's; with more unscored ones training stops."""
    use_labels: bool
    """Whether an alarm that goes by labels may do more than warn."""
    dev_metric: str
    """Which of the reward's parts, averaged over the dev split, chooses the model."""
    primary_metric: PrimaryMetric
    """Which of them the alarm watches that the reward rises while it falls."""
    patience: int | None
    """Validations without a better one after which training stops; never if None."""
    keep_checkpoints: int | None
    """The newest so many and the best; all if None."""
    alarms: Alarms
