"""What Prefect does by itself: crashed runs go on, alarms pause training, people are told. See docs/automations.md.

Prefect's automations are made over its HTTP API; the core knows no Prefect. Those of a profile are called
`qinglan: PROFILE: …`, the server's own `qinglan: …`; others are never touched.
"""

from qinglan.ops.automations.applying import apply_automations, webhook_address
from qinglan.ops.automations.deployments import TRAIN_DEPLOYMENT, Deployment, deployments_of, training_of
from qinglan.ops.automations.lost import crash_lost, crash_retries_on, requeue_crashed

__all__ = [
    "TRAIN_DEPLOYMENT",
    "Deployment",
    "apply_automations",
    "crash_lost",
    "crash_retries_on",
    "deployments_of",
    "requeue_crashed",
    "training_of",
    "webhook_address",
]
