"""Sections about what Prefect does by itself: notifications, crashes and alarms."""

from typing import Annotated, Literal

from pydantic import Field

from qinglan.config.base import SecretName, Section, Url
from qinglan.config.rl import AlarmName

NotifyFormat = Literal["json", "feishu", "dingtalk", "wecom", "slack"]
NotifyTopic = Literal["failed", "waiting", "running", "alarm", "approval", "refused"]


class Notify(Section):
    """Notifications that Prefect sends (docs/automations.md)."""

    webhook_url_env: SecretName | None = None
    """Environment variable with the webhook's address, which is a secret; without it, no notification is sent.
    `qinglan deploy` hands it to Prefect's server, which keeps it encrypted."""
    format: NotifyFormat = "json"
    """What the webhook understands: a group's robot of Feishu (Lark), DingTalk, WeCom or Slack, or `json`: an object
    with `text`, `topic`, `profile`, `name`, `reason` and `link`."""
    about: tuple[NotifyTopic, ...] = ("failed", "waiting", "running", "alarm", "approval", "refused")
    """`failed`: a flow run failed, crashed or timed out. `waiting`: none of the workers took it within `waiting_s`.
    `running`: it has not ended within `running_s`. `alarm`: a training run raised an alarm. `approval`: the gate waits
    for a person (`gate.approval`). `refused`: the gate did not release the model."""
    waiting_s: Annotated[int, Field(ge=10)] = 7_200
    """A run that is late by this much is reported: the workers may be down, or another run may hold the device."""
    running_s: Annotated[int, Field(ge=10)] = 172_800
    """A run that takes longer than this is reported."""
    ui_url: Url | None = None
    """Where users reach Prefect's UI, for the link; if not given, what the server calls itself (its
    PREFECT_UI_URL)."""


class Automations(Section):
    """What Prefect does by itself about crashes and alarms (docs/automations.md)."""

    crashed_after_s: Annotated[int, Field(ge=10)] = 900
    """A deployed run that sends no heartbeat for this long is marked as crashed. Runs send one every 30 s
    under `qinglan up`, compose.yaml and the charts' values, else every 180 s (PREFECT_FLOWS_HEARTBEAT_FREQUENCY of the
    worker): keep it at three times that or more. One for the whole server: that of the profile deployed last holds."""
    crash_retries: Annotated[int, Field(ge=0, le=5)] = 2
    """How often a crashed run is put back into its queue, where it goes on from its finished stages. One for the whole
    server, as above."""
    retry_after_s: Annotated[int, Field(ge=10)] = 30
    """A crashed run goes back into its queue after this time: its worker reports a crash more than once."""
    pause_at: tuple[AlarmName, ...] = (
        "reward_up_gold_down",
        "reward_up_judge_down",
        "entropy_collapse",
        "reward_down",
    )
    """Alarms after which no training of this profile starts by itself until someone resumes the deployment; the run
    that raised it does what `rl.alarms` says."""
