"""Artifacts and stage manifests: what one stage hands to the next.

A stage writes its files into its own directory and its manifest last, so a manifest's existence
means that the stage is complete. The manifest's `key` hashes everything that the result depends on;
a stage whose key is found finished, in this run or an earlier one, is not run again.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError

from qinglan.errors import ArtifactError
from qinglan.runs.schema_version import Model, read_record

MANIFEST = "manifest.json"
PROGRESS_FILE = "progress.txt"
REFERENCE = ".reference.json"
"""Ends the name of what MLflow gets in the place of a file of rows."""
_UNREADABLE = "is damaged or of another version of Qinglan; run its stage again"
WEIGHTS = "*.safetensors"
"""The files of a model that hold its weights.

Other files beside them name folders and versions, so that the folders of equal models differ."""
WEIGHTS_SHA256 = "weights_sha256"
"""Name of the weights' digest in a stage's details."""


def sha256_of(path: Path, pattern: str = "*") -> str:
    """Digest of a file, or of the names and contents of a directory's files.

    Of a directory only the files that match the pattern count.
    """
    digest = hashlib.sha256()
    if path.is_dir():
        for file in sorted(path.rglob(pattern)):
            if file.is_file():
                digest.update(file.relative_to(path).as_posix().encode())
                _add_content(digest, file)
    else:
        _add_content(digest, path)
    return digest.hexdigest()


def _add_content(digest: "hashlib._Hash", file: Path) -> None:
    with file.open("rb") as stream:
        hashlib.file_digest(stream, lambda: digest)


def hash_of(*parts: Any) -> str:
    """Digest of JSON-able values, independent of dictionary order."""
    as_json = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(as_json.encode()).hexdigest()


class Artifact(BaseModel, frozen=True):
    """A file or directory, its digest, and how many rows it holds (None where rows make no
    sense)."""

    path: Path
    sha256: str
    rows: int | None = None

    @classmethod
    def of(cls, path: Path, rows: int | None = None) -> "Artifact":
        return cls(path=path.resolve(), sha256=sha256_of(path), rows=rows)

    def verify(self) -> Path:
        """The path; ArtifactError where the content is no longer what it was."""
        if not self.path.exists():
            raise ArtifactError(f"{self.path} is missing; run its stage again")
        if sha256_of(self.path) != self.sha256:
            raise ArtifactError(
                f"{self.path} was changed after it was written; remove its manifest and run again"
            )
        return self.path


class StageResult(BaseModel, frozen=True):
    """A finished stage: what came in, what came out, why rows were dropped, and how long it
    took."""

    stage: str
    key: str
    run_id: str
    """The run that did the work; another than the current one where the result was reused."""
    seconds: float
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = {}
    artifacts: dict[str, Artifact] = {}
    metrics: dict[str, float] = {}
    details: dict[str, Any] = {}
    """All else that the report shows: API usage, training summary."""
    try_again: int = 0
    """Rows that were dropped, or not judged, for a cause that may pass; with any, no later run
    reuses this result."""
    attempt: int = 0
    """The run's attempt that did the work or found it unchanged."""

    def path(self, name: str) -> Path:
        return self.artifacts[name].path

    def load(self, name: str, model: type[Model]) -> Model:
        """The content of an artifact of JSON.

        Raises `ArtifactError` where its file is missing or not readable.
        """
        path = self.path(name)
        try:
            return model.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ArtifactError(f"{path} is missing; run its stage again") from None
        except ValidationError as error:
            raise ArtifactError(f"{path} {_UNREADABLE}") from error

    def with_attempt(self, attempt: int) -> Self:
        return self.model_copy(update={"attempt": attempt})

    @classmethod
    def read(cls, manifest: Path) -> "StageResult":
        return read_record(cls, manifest)


def close_to_others() -> None:
    """Let owner and group alone read what this process and its children write from now on.

    It never opens anything that the process's own mask closes.
    """
    # The mask can only be read by setting another one.
    mask = os.umask(0o027)
    os.umask(mask | 0o027)


def sync(path: Path) -> None:
    """Have a file's content, or a folder's list of names, on the disk.

    It is there before anything that is written later.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems can't do it for folders.
        is_unsupported = path.is_dir() and error.errno == errno.EINVAL
        if not is_unsupported:
            raise
    finally:
        os.close(descriptor)


def sync_all(path: Path) -> None:
    """`sync` a file, or a folder with all that is in it."""
    for file in (*path.rglob("*"), path):
        if not file.is_symlink():
            sync(file)


def point_link(link: Path, name: str) -> None:
    """Have a symbolic link name another folder beside it.

    There is no moment in which it names none.
    """
    partial = link.with_name(f".{link.name}-{name}")
    # A process that was killed right here has left one.
    partial.unlink(missing_ok=True)
    partial.symlink_to(name)
    partial.replace(link)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`.

    Also after a power loss `path` is the old file or the whole new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        yield partial
        # The content must be on the disk before it gets its name, and the name after that.
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    as_json = json.dumps(value, ensure_ascii=False, indent=1, default=str)
    with written_whole(path) as partial:
        partial.write_text(as_json + "\n", encoding="utf-8")


def json_artifact(path: Path, value: Any) -> Artifact:
    """Write JSON that a stage hands on."""
    write_json(path, value)
    return Artifact.of(path)


@contextmanager
def jsonl_writer(path: Path) -> Iterator[Callable[[BaseModel | dict[str, Any]], object]]:
    """A function that writes an object a line.

    The file appears at the end of a block without error.
    """
    with written_whole(path) as partial, partial.open("w", encoding="utf-8") as stream:

        def write(record: BaseModel | dict[str, Any]) -> None:
            if isinstance(record, BaseModel):
                line = record.model_dump_json()
            else:
                line = json.dumps(record, ensure_ascii=False)
            stream.write(line + "\n")

        yield write


def write_jsonl(path: Path, records: Iterable[BaseModel | dict[str, Any]]) -> Artifact:
    rows = 0
    with jsonl_writer(path) as write:
        for record in records:
            write(record)
            rows += 1
    return Artifact.of(path, rows)


def read_jsonl(path: Path, model: type[Model]) -> Iterator[Model]:
    """Read a record a line.

    Raises ArtifactError where a line is damaged or of another version of Qinglan.
    """
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield model.model_validate_json(line)
            except ValidationError as error:
                raise ArtifactError(f"{path}, line {number} {_UNREADABLE}") from error
