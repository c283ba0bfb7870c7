"""Tells people and Prefect's automations what alarms in a training run, as the trainer writes it down."""

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.tasks.events import tell
from qinglan.tasks.stage import Stage, artifact_key
from qinglan.training.alarms import Alarm, alarms_markdown, read_alarms
from qinglan.training.engines.trainer_settings import ALARMS_FILE


class AlarmFollower:
    """Follows a stage's `alarms.jsonl`. What earlier attempts of the stage left counts, but is not told again, nor what
    a resumed one sees again as it was."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._log = get_run_logger()
        self.alarms: list[Alarm] = []
        """In the order in which they came."""
        self._look()

    def __call__(self) -> None:
        """Look for new alarms and tell of them."""
        for alarm in self._look():
            self._log.warning("%s: step %d: alarm %s: %s", self._stage.name, alarm.step, alarm.name, alarm.message)
            self._emit(alarm)
            self._track(alarm)
            self._show()

    def _look(self) -> list[Alarm]:
        known, self.alarms = self.alarms, read_alarms(self._stage.directory / ALARMS_FILE)
        return [alarm for alarm in self.alarms if alarm not in known]

    def _emit(self, alarm: Alarm) -> None:
        labels = {"stage": self._stage.name, "alarm": alarm.name, "action": alarm.action}
        tell(f"alarm.{alarm.name}", self._stage.run, alarm.model_dump(mode="json"), **labels)

    def _track(self, alarm: Alarm) -> None:
        run_id, steps = self._stage.mlflow_run_id, [seen.step for seen in self.alarms if seen.name == alarm.name]
        self._stage.tracker.log_metrics(run_id, {f"alarms/{alarm.name}": len(steps)}, alarm.step)
        self._stage.tracker.set_tags(run_id, {f"alarm.{alarm.name}": "step " + ", ".join(map(str, steps))})

    def _show(self) -> None:
        text = f"{len(self.alarms)} so far, the last: {self.alarms[-1].name} at step {self.alarms[-1].step}"
        key = artifact_key(f"{self._stage.name}-alarms")
        try:
            create_markdown_artifact(alarms_markdown(self.alarms), key=key, description=text)
        except httpx.HTTPError as error:  # a server that is away for a while must not cost a training run
            self._log.warning("%s: Prefect did not take the table of alarms: %s", self._stage.name, error)
