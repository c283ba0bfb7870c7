"""A site's state and runs as one folder, taken while the site works, and brought back again.

The folder is consistent in itself. Here is what `backup.json`, which is written last, says about
it.
"""

from collections import Counter
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from qinglan.errors import ArtifactError, ConfigError
from qinglan.runs.schema_version import first_flaw, read_record

BACKUP_FILE = "backup.json"
MARGIN_BYTES = 50e6
"""Disk space to be left beside what is copied."""
Root = Literal["state", "runs"]


def _within(path: str) -> str:
    parts = PurePosixPath(path).parts
    # `state//etc` has the parts of `state/etc`.
    is_plain = path == str(PurePosixPath(path))
    if not is_plain or not parts or parts[0] not in get_args(Root) or ".." in parts:
        raise ValueError("leads out of the backup")
    return path


def _below_root(path: str) -> str:
    if "/" not in _within(path):
        raise ValueError("leads out of the backup")
    return path


InnerPath = Annotated[str, AfterValidator(_below_root)]
"""A path below the backup's folder; the first part is the root's name."""


class BackupEntry(BaseModel, frozen=True, extra="forbid"):
    """A file, database or link that the backup holds."""

    path: InnerPath
    kind: Literal["file", "database", "link"]
    sha256: str = ""
    bytes: int = 0
    same_as: InnerPath | None = None
    """The first path of a file that has several, by hard links; its content is kept there."""
    target: str = ""
    """The path that a symbolic link points to."""

    def at(self, path: str) -> "BackupEntry":
        """The same file by another of its names."""
        return self.model_copy(update={"path": path, "same_as": self.path})


class BackupFolder(BaseModel, frozen=True, extra="forbid"):
    """A folder, empty ones and the roots themselves included."""

    path: Annotated[str, AfterValidator(_within)]
    mode: int = Field(ge=0, le=0o7777)
    """The accounts that may enter it: as chmod has it, in decimal, as JSON knows no other."""


class SkippedPath(BaseModel, frozen=True, extra="forbid"):
    """A file or folder that was found and is not in the backup."""

    path: str
    reason: str


class Backup(BaseModel, frozen=True, extra="forbid"):
    """The description of a backup: what was kept, where it belongs, and what is not in it."""

    made_at: datetime
    qinglan: str
    """The version that made it."""
    profile: str
    roots: dict[Root, Path]
    """The folders that were kept; they must come back to the same places.

    Runs and MLflow name files by their full paths.
    """
    entries: list[BackupEntry]
    folders: list[BackupFolder] = []
    """The outer one before the inner."""
    left_out: list[SkippedPath] = []
    elsewhere: list[str] = []
    """State of the site that other servers hold."""

    @field_validator("entries", "folders")
    @classmethod
    def _are_apart(cls, items: list[Any], info: ValidationInfo) -> list[Any]:
        """Refuse paths that lie below one another: the lower one would be written through a link.

        The folders are validated after the entries, and together with them.
        """
        earlier_entries = info.data.get("entries", ())
        entry_paths = {entry.path for entry in info.data.get("entries", items)}
        counts = Counter(item.path for item in [*items, *earlier_entries])
        for path, times in counts.items():
            if times > 1:
                raise ValueError(f"{path} is in it twice")
            if not entry_paths.isdisjoint(map(str, PurePosixPath(path).parents)):
                raise ValueError(f"{path} lies below a file or link")
        return items

    @property
    def bytes(self) -> int:
        """The size of the content, hard links counted once."""
        return sum(entry.bytes for entry in self.entries if entry.same_as is None)

    @classmethod
    def read(cls, folder: Path) -> "Backup":
        """The description of a backup.

        Raises `ConfigError` where there is none, `ArtifactError` where it is damaged or newer.
        """
        path = folder / BACKUP_FILE
        try:
            return read_record(cls, path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(f"{folder}: no backup: it has no {BACKUP_FILE}") from error
        except ValidationError as error:
            raise ArtifactError(f"{path}: {first_flaw(error)}; take another backup") from error
