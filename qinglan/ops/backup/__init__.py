"""A site's state and runs as one folder that is consistent in itself, taken while the site works, and back again.

Here is what `backup.json`, which is written last, says about it.
"""

from collections import Counter
from collections.abc import Set as AbstractSet
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from qinglan.errors import ArtifactError, ConfigError
from qinglan.runs.schema_version import read_record

BACKUP_FILE = "backup.json"
Root = Literal["state", "runs"]


def _kept(path: str) -> str:
    parts = PurePosixPath(path).parts
    is_plain = path == str(PurePosixPath(path))  # `state//etc` has the parts of `state/etc`
    if not is_plain or not parts or parts[0] not in ("state", "runs") or ".." in parts:
        raise ValueError("leads out of the backup")
    return path


def _inside(path: str) -> str:
    if "/" not in _kept(path):
        raise ValueError("leads out of the backup")
    return path


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


InnerPath = Annotated[str, AfterValidator(_inside)]
"""Below the backup's folder; the first part is the root's name."""


class BackupEntry(_Record):
    """A file, database or link that the backup holds."""

    path: InnerPath
    kind: Literal["file", "database", "link"]
    sha256: str = ""
    bytes: int = 0
    same_as: InnerPath | None = None
    """The first path of a file that has several, by hard links; its content is kept there."""
    target: str = ""
    """Of a symbolic link."""


class BackupFolder(_Record):
    """A folder, empty ones and the roots themselves included."""

    path: Annotated[str, AfterValidator(_kept)]
    mode: int = Field(ge=0, le=0o7777)
    """Who may enter it: as chmod has it, in decimal, as JSON knows no other."""


class SkippedPath(_Record):
    """What was found and is not in the backup."""

    path: str
    reason: str


class Backup(_Record):
    """What was kept, where it belongs, and what is not in it."""

    made_at: datetime
    qinglan: str
    """The version that made it."""
    profile: str
    roots: dict[Root, Path]
    """Where they were, which is where they must come back to: runs and MLflow name files by their full paths."""
    entries: list[BackupEntry]
    folders: list[BackupFolder] = []
    """The outer one before the inner."""
    left_out: list[SkippedPath] = []
    elsewhere: list[str] = []
    """State of the site that other servers hold."""

    @field_validator("entries")
    @classmethod
    def _are_apart(cls, entries: list[BackupEntry]) -> list[BackupEntry]:
        """No entry is a folder: one below another would be written through a link."""
        paths = Counter(entry.path for entry in entries)
        for path, times in paths.items():
            if times > 1:
                raise ValueError(f"{path} is in it twice")
            _require_apart(path, paths.keys())
        return entries

    @field_validator("folders")
    @classmethod
    def _are_no_entries(cls, folders: list[BackupFolder], info: ValidationInfo) -> list[BackupFolder]:
        """A link's target would get the mode."""
        paths = {entry.path for entry in info.data.get("entries", ())}
        for folder in folders:
            if folder.path in paths:
                raise ValueError(f"{folder.path} is in it twice")
            _require_apart(folder.path, paths)
        return folders

    @property
    def bytes(self) -> int:
        """Of the content, hard links counted once."""
        return sum(entry.bytes for entry in self.entries if entry.same_as is None)

    @classmethod
    def read(cls, folder: Path) -> "Backup":
        """Read a backup's description.

        Raises:
            ConfigError: the folder is no backup.
            ArtifactError: its description is damaged, or of a newer Qinglan.
        """
        path = folder / BACKUP_FILE
        try:
            return read_record(cls, path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"{folder}: no backup: it has no {BACKUP_FILE}") from error
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "content"
            raise ArtifactError(f"{path}: `{where}`: {problem['msg']}; take another backup") from error


def _require_apart(path: str, entries: AbstractSet[str]) -> None:
    if not entries.isdisjoint(map(str, PurePosixPath(path).parents)):
        raise ValueError(f"{path} lies below a file or link")
