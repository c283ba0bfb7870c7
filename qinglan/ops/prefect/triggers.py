"""Triggers of automations: on flow runs' states and on Qinglan's events."""

import glob
from collections.abc import Sequence
from typing import Any

from qinglan.config import Profile

Spec = dict[str, Any]
"""An automation, or its trigger, as Prefect's API takes it."""
RUN_PREFIX = "prefect.flow-run."
ANY_RUN = f"{RUN_PREFIX}*"
ENDED = (
    "Completed",
    "Skipped",
    "Failed",
    "TimedOut",
    "Crashed",
    "Superseded",
    "Cancelled",
    "Cancelling",
)
"""Names of the states of a run that no process works on, or that is about to end."""


def reactive_trigger(states: Sequence[str], within_s: float = 0) -> Spec:
    """A trigger that fires when a flow run enters one of the states.

    It fires once in `within_s` for the same run.
    """
    return {
        "type": "event",
        "posture": "Reactive",
        "match": {"prefect.resource.id": ANY_RUN},
        "for_each": ["prefect.resource.id"],
        "threshold": 1,
        "expect": [f"{RUN_PREFIX}{state}" for state in states],
        "within": within_s,
    }


def proactive_trigger(states: Sequence[str], after: Sequence[str], within_s: float) -> Spec:
    """A trigger that fires when a flow run enters none of the states in time.

    Its time `within_s` begins when the run enters one of the states `after`.
    """
    waiting = {"posture": "Proactive", "after": [f"{RUN_PREFIX}{state}" for state in after]}
    return reactive_trigger(states, within_s) | waiting


def event_trigger(profile: Profile, *events: str) -> Spec:
    """A trigger that fires at events of the profile's runs.

    `emit_run_event` in tasks/stage.py emits them.
    """
    match = {
        "prefect.resource.id": "qinglan.run.*",
        "qinglan.profile": glob.escape(profile.name),
    }
    expected = [f"qinglan.{event}" for event in events]
    return reactive_trigger(()) | {"expect": expected, "match": match}
