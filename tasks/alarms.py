"""Tells people and Prefect's automations what alarms in a training run, as the trainer writes it down."""

from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event
from prefect.logging import get_run_logger
from pydantic import ValidationError

from qinglan.alarms import Alarm, alarms_markdown, counts, with_alarm
from qinglan.engines.launcher import JsonlTail
from qinglan.engines.trainer_settings import ALARMS_FILE
from tasks.stage import Stage, artifact_key

EVENT = "qinglan.alarm.{name}"
RESOURCE = "qinglan.run.{run_id}"


class AlarmFollower:
    """Follows a stage's `alarms.jsonl`. What earlier attempts of the stage left counts, but is not told again."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._tail = stage, JsonlTail(stage.directory / ALARMS_FILE)
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

    @property
    def summary(self) -> dict[str, int]:
        """How often each sounded, over all attempts."""
        return counts(self.alarms)

    def _look(self) -> list[Alarm]:
        found = []
        for entry in self._tail.new():
            try:
                found.append(Alarm.model_validate(entry))
            except ValidationError:  # a killed process left half of it
                continue
            self.alarms = with_alarm(self.alarms, found[-1])
        return found

    def _emit(self, alarm: Alarm) -> None:
        run = self._stage.run
        emit_event(
            EVENT.format(name=alarm.name),
            resource={
                "prefect.resource.id": RESOURCE.format(run_id=run.id),
                "prefect.resource.name": run.id,
                "qinglan.profile": run.profile.name,
                "qinglan.tenant": run.profile.tenant.id,
                "qinglan.stage": self._stage.name,
                "qinglan.alarm": alarm.name,
                "qinglan.action": alarm.action,
            },
            payload=alarm.model_dump(mode="json"),
        )

    def _track(self, alarm: Alarm) -> None:
        run_id, steps = self._stage.mlflow_run_id, [seen.step for seen in self.alarms if seen.name == alarm.name]
        self._stage.tracker.log_metrics(run_id, {f"alarms/{alarm.name}": len(steps)}, alarm.step)
        self._stage.tracker.set_tags(run_id, {f"alarm.{alarm.name}": "step " + ", ".join(map(str, steps))})

    def _show(self) -> None:
        text = f"{len(self.alarms)} so far, the last: {self.alarms[-1].name} at step {self.alarms[-1].step}"
        create_markdown_artifact(
            alarms_markdown(self.alarms), key=artifact_key(f"{self._stage.name}-alarms"), description=text
        )
