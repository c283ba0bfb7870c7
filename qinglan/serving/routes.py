"""Who answers: one small file that the site writes and the router reads, replaced whole at every change."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from qinglan.runs.artifacts import write_json

ModelRole = Literal["champion", "challenger"]


class Backend(BaseModel):
    """A model's server that was seen healthy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    """Up to and including `/v1`."""
    model: str
    """The name that the server knows it by."""
    version: str
    """Of the registered model."""


class Routes(BaseModel):
    """The models in service; with none, every answer is the original question."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    champion: Backend | None = None
    challenger: Backend | None = None
    share: float = 0.0
    """Of the requests that go to the challenger, 0 to 1."""

    def write(self, path: Path) -> None:
        """Replace the file; a reader sees the old one or the new one."""
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> "Routes":
        """What the site wrote last; none where it wrote nothing yet."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
