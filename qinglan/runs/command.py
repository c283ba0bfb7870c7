"""A command: made by the engines' builders, started by the launcher."""

from dataclasses import dataclass, field

QUIET_ENV = {"DO_NOT_TRACK": "true", "RAY_USAGE_STATS_ENABLED": "0", "MLFLOW_DISABLE_TELEMETRY": "true"}
"""No process that is started here sends telemetry."""


@dataclass(frozen=True)
class Command:
    """An argument list and what to add to the environment; neither ever holds a secret."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    """GPUs of one node that the process itself uses; those that it requests from Ray for its workers do not count."""
