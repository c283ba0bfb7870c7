"""What a builder makes and the launcher runs."""

from dataclasses import dataclass, field

QUIET_ENV = {"DO_NOT_TRACK": "true", "RAY_USAGE_STATS_ENABLED": "0", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""No process that we start reports home."""


@dataclass(frozen=True)
class Command:
    """An argument list and what to add to the environment; no secret ever stands in either."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    """That the process itself uses, of one node; what it asks of Ray for its workers is not counted."""
