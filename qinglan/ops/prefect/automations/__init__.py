"""What Prefect does by itself: crashed runs go on, alarms pause training, messages are sent. See docs/automations.md.

The automations of a profile are called `qinglan: PROFILE: …`, the server's own `qinglan: …`; others are never changed.
"""

from qinglan.ops.prefect.automations.apply import apply_automations, webhook_address

__all__ = ["apply_automations", "webhook_address"]
