"""Reports the alarms of a training run to users and to Prefect's automations, as the trainer writes them."""

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger

from qinglan.tasks.stage import Stage, artifact_key, emit_run_event
from qinglan.training.alarms import Alarm, alarms_markdown, read_alarms
from qinglan.training.engines.trainer_settings import ALARMS_FILE


class AlarmFollower:
    """Follows a stage's `alarms.jsonl`. What earlier attempts of the stage left counts, but is not reported again."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._log = get_run_logger()
        self.alarms: list[Alarm] = []
        """In the order in which they came."""
        self._read()

    def __call__(self) -> None:
        for alarm in self._read():
            self._log.warning("%s: step %d: alarm %s: %s", self._stage.name, alarm.step, alarm.name, alarm.message)
            labels = {"stage": self._stage.name, "alarm": alarm.name, "action": alarm.action}
            emit_run_event(f"alarm.{alarm.name}", self._stage.run, alarm.model_dump(mode="json"), **labels)
            run_id, steps = self._stage.mlflow_run_id, [seen.step for seen in self.alarms if seen.name == alarm.name]
            self._stage.tracker.log_metrics(run_id, {f"alarms/{alarm.name}": len(steps)}, alarm.step)
            self._stage.tracker.set_tags(run_id, {f"alarm.{alarm.name}": "step " + ", ".join(map(str, steps))})
            self._show()

    def _read(self) -> list[Alarm]:
        known, self.alarms = self.alarms, read_alarms(self._stage.directory / ALARMS_FILE)
        return [alarm for alarm in self.alarms if alarm not in known]

    def _show(self) -> None:
        text = f"{len(self.alarms)} so far, the last: {self.alarms[-1].name} at step {self.alarms[-1].step}"
        key = artifact_key(f"{self._stage.name}-alarms")
        try:
            create_markdown_artifact(alarms_markdown(self.alarms), key=key, description=text)
        except httpx.HTTPError as error:  # a server that is away for a while must not cost a training run
            self._log.warning("%s: Prefect did not take the table of alarms: %s", self._stage.name, error)
