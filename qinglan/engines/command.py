"""What a builder makes and the launcher runs."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """An argument list and what to add to the environment; no secret ever stands in either."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
