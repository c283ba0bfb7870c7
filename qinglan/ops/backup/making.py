"""Taking a backup while the site works.

The order makes it consistent: every database but the ledger first, as MLflow names files that were
written before; then the files, each folder's manifest first, as what it lists is complete; the
ledger last, so that it knows every answer.
"""

import os
import re
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import Literal
from urllib.parse import quote

from qinglan.config import Profile, uses_proxy
from qinglan.data.versions import VERSION_FILE
from qinglan.errors import ArtifactError, ConfigError
from qinglan.ledger import ledger_url
from qinglan.ledger.database import shown, url_of
from qinglan.ops.backup import (
    BACKUP_FILE,
    MARGIN_BYTES,
    Backup,
    BackupEntry,
    BackupFolder,
    Root,
    SkippedPath,
)
from qinglan.ops.forget import BACKUPS_FILE, SQLITE, SQLITE_WAIT_S
from qinglan.ops.prefect.server import (
    LOCK_FILE,
    SERVER_FILE,
    announced_url,
    find_server,
    prefect_home,
)
from qinglan.runs.artifacts import MANIFEST, sha256_of, write_json
from qinglan.runs.processes import Say
from qinglan.runs.run import RUN_FILE
from qinglan.runs.schema_version import dump_record
from qinglan.text import size

LEDGER = "state/ledger.db"
_Identity = tuple[int, ...]
_FIRST = (RUN_FILE, MANIFEST, VERSION_FILE)
_VANISHED = "removed before it could be copied"
_CACHE = "a cache of models from the hub"
_SKIPPED_FOLDERS = {
    # Each in its place only: engines name folders as they like, and verl's checkpoints have a
    # `huggingface` each.
    "state/datasets/*/.partial-*": "unfinished",
    "state/models/*/.partial-*": "unfinished",
    "state/datasets/*/.removing-*": "being removed",
    "runs/.removing-*": "being removed",
    "*/.restoring": "of an interrupted restore",
    "*/.replaced-*": "put aside by a restore",
    "state/huggingface": _CACHE,  # HF_HOME in compose.yaml
}


def make_backup(profile: Profile, target: Path, say: Say, *, runs: bool = True) -> Backup:
    """Write a backup into `target`, a folder that is there only once it is complete."""
    target = target.expanduser().resolve()
    state_folder, runs_folder = profile.paths.state.resolve(), profile.paths.runs.resolve()
    roots: dict[Root, Path] = {"state": state_folder}
    if runs:
        roots["runs"] = runs_folder
    if not state_folder.is_dir():
        raise ConfigError(f"paths.state: {state_folder} is not there, so there is nothing to keep")
    for root in (state_folder, runs_folder):
        if target.is_relative_to(root):
            raise ConfigError(
                f"{target}: lies in {root}, which is itself to be kept; name a folder elsewhere"
            )
    _require_free(target)
    elsewhere = list(
        _kept_elsewhere(profile)
    )  # a mistake in an address shows before anything is copied
    target.parent.mkdir(parents=True, exist_ok=True)
    # Its owner's only: questions, answers and whatever Prefect's blocks hold are nobody else's
    # business.
    partial = Path(mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
    try:
        with (state_folder / BACKUPS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(
                f"{target}\n"
            )  # before it is copied, so that a restored site knows of this backup too
        copier = _Copier(partial, apart={state_folder, runs_folder})
        for name, folder in roots.items():
            if folder.exists():  # a site without runs has none
                copier.find(name, folder)
        copier.require_disk_space()
        say(
            f"{len(copier.files):,} files and {len(copier.databases)} databases, {size(copier.bytes)}"
        )
        copier.copy()
        backup = Backup(
            made_at=datetime.now(UTC),
            qinglan=version("qinglan"),
            profile=profile.name,
            roots=roots,
            entries=copier.entries,
            folders=copier.folders_with_modes(),
            left_out=copier.left_out,
            elsewhere=elsewhere,
        )
        write_json(partial / BACKUP_FILE, dump_record(backup))
        _require_free(target)  # another backup may have been quicker
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return backup


def _require_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: is there already and not empty; name a new folder")


class _Copier:
    def __init__(self, target: Path, apart: set[Path]) -> None:
        self._target, self._apart = target, apart
        self.files: dict[str, Path] = {}
        self.databases: dict[str, Path] = {}
        self.folders: dict[str, Path] = {}
        self.bytes = 0
        self.entries: list[BackupEntry] = []
        self.left_out: list[SkippedPath] = []
        self._counted: set[_Identity] = set()
        self._linked: dict[_Identity, BackupEntry] = {}
        """Files with several names."""

    def find(self, path: str, folder: Path) -> None:
        """What there is to copy; links are kept at once, as what they name is there now."""
        self.folders[path] = folder
        # What lies in a folder before what lies further down.
        for source in sorted(
            folder.iterdir(), key=lambda each: (each.is_dir(), each.name not in _FIRST, each.name)
        ):
            try:
                self._find_one(f"{path}/{source.name}", source)
            except FileNotFoundError:  # a clean-up may have taken it away
                self.left_out.append(SkippedPath(path=f"{path}/{source.name}", reason=_VANISHED))
            except OSError as error:
                problem = f"{error.filename}: can't be read ({error.strerror})"
                raise ArtifactError(f"{problem}; run this as the user who owns the site") from None

    def _find_one(self, path: str, source: Path) -> None:
        is_link, is_folder = source.is_symlink(), source.is_dir()
        if is_folder and (reason := _reason_to_skip_folder(path, source)):
            self.left_out.append(SkippedPath(path=path, reason=reason))
        elif is_link:
            self.entries.append(BackupEntry(path=path, kind="link", target=str(source.readlink())))
        elif is_folder:
            if source not in self._apart:
                self.find(path, source)
        elif reason := _reason_to_skip_file(path, source):
            self.left_out.append(SkippedPath(path=path, reason=reason))
        else:
            is_database, status = _is_database(source), source.stat()
            (self.databases if is_database else self.files)[path] = source
            # A file with several names is copied once, a database each time.
            if is_database or status.st_nlink == 1 or _identity(status) not in self._counted:
                self.bytes += status.st_size
            self._counted.add(_identity(status))

    def require_disk_space(self) -> None:
        free = shutil.disk_usage(self._target).free
        if free < self.bytes + MARGIN_BYTES:
            problem = (
                f"{self._target.parent}: has {size(free)} free, the backup takes {size(self.bytes)}"
            )
            raise ArtifactError(
                f"{problem}; free disk space, give another folder, or leave out the runs (--no-runs)"
            )

    def copy(self) -> None:
        for path, source in self.databases.items():
            if path != LEDGER:
                self._copy_database(path, source)
        for path, source in self.files.items():
            try:
                self._copy_file(path, source)
            except FileNotFoundError:
                (self._target / path).unlink(missing_ok=True)
                self.left_out.append(SkippedPath(path=path, reason=_VANISHED))
        if LEDGER in self.databases:
            self._copy_database(LEDGER, self.databases[LEDGER])

    def folders_with_modes(self) -> list[BackupFolder]:
        """Asked once all is copied: a run that a clean-up took meanwhile does not come back as an
        empty folder."""
        found = []
        for path, source in self.folders.items():
            with suppress(FileNotFoundError):
                found.append(BackupFolder(path=path, mode=stat.S_IMODE(source.stat().st_mode)))
        return found

    def _copy_file(self, path: str, source: Path) -> None:
        status = source.stat()
        if status.st_nlink > 1 and (first := self._linked.get(_identity(status))):
            self.entries.append(first.model_copy(update={"path": path, "same_as": first.path}))
            return
        shutil.copy2(source, self._target_of(path))
        self._add_entry(path, "file")
        if status.st_nlink > 1:
            self._linked[_identity(status)] = self.entries[-1]

    def _copy_database(self, path: str, source: Path) -> None:
        """A SQLite database as of one moment, while others write to it; checked, and without a
        write-ahead log."""
        target, address = self._target_of(path), f"file:{quote(str(source))}?mode=rw"
        try:  # as `ro` it could not open one whose log nobody has open
            with (
                closing(sqlite3.connect(address, uri=True, timeout=SQLITE_WAIT_S)) as live,
                closing(sqlite3.connect(target)) as copy,
            ):
                live.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
                (found,) = copy.execute("PRAGMA quick_check").fetchone()
            if found != "ok":
                raise sqlite3.DatabaseError(found)
        except sqlite3.Error as error:
            raise ArtifactError(
                f"{source}: can't be copied as a database: {error}; no backup was made"
            ) from error
        shutil.copymode(source, target)
        self._add_entry(path, "database")

    def _target_of(self, path: str) -> Path:
        target = self._target / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _add_entry(self, path: str, kind: Literal["file", "database"]) -> None:
        copy = self._target / path
        self.entries.append(
            BackupEntry(path=path, kind=kind, sha256=sha256_of(copy), bytes=copy.stat().st_size)
        )


def _identity(status: os.stat_result) -> _Identity:
    """What tells a file from another that got its number later."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_database(source: Path) -> bool:
    with source.open("rb") as stream:
        return stream.read(len(SQLITE)) == SQLITE


def _reason_to_skip_folder(path: str, source: Path) -> str | None:
    for place, reason in _SKIPPED_FOLDERS.items():
        # `match` alone would begin anywhere in the path.
        if path.count("/") == place.count("/") and PurePosixPath(path).match(place):
            return reason
    cache = os.environ.get("HF_HOME")
    return _CACHE if cache and source == Path(cache).expanduser().resolve() else None


def _reason_to_skip_file(path: str, source: Path) -> str | None:
    name = source.name
    if path == f"state/{LOCK_FILE}" or (name.endswith(".lock") and source.stat().st_size == 0):
        return "a lock"
    if name.endswith(".partial"):
        return "unfinished"
    if path == f"state/{SERVER_FILE}":
        return "names a server while it runs"
    if name == "profiles.toml":
        return "Prefect's settings may hold keys"
    beside = source.with_name(re.sub(r"-(wal|shm|journal)$", "", name))
    if beside != source and beside.is_file() and _is_database(beside):
        return "part of a database that is copied whole"
    return None if source.is_file() else "no file"


def _kept_elsewhere(profile: Profile) -> Iterator[str]:
    """What this backup can't hold, and how it is kept."""
    state = profile.paths.state.resolve()
    if name := profile.ledger.url_env:
        kept = shown(ledger_url(profile.ledger, state))
        yield f"the ledger, in the database that {name} names ({kept}): `pg_dump -Fc`, after this backup"
    if (log := profile.serve.request_log.folder) and not Path(log).resolve().is_relative_to(state):
        yield f"the request log, {log}: outside {state}"
    uri, server = profile.tracking_uri, find_server(state)
    if not uri.startswith("sqlite:"):
        where = shown(url) if (url := url_of(uri)) else "the address in tracking.uri"
        yield f"MLflow, at {where}: its database with `pg_dump -Fc`, and its artifact store"
    elif not Path(uri.removeprefix("sqlite:///")).resolve().is_relative_to(state):
        yield f"MLflow's database, {uri.removeprefix('sqlite:///')}: outside {state}"
    if server and not server.is_at(announced_url(state)):
        # While `qinglan up` is down, nothing tells whether its address is meant.
        own = not uses_proxy(server.api_url) and (state / "prefect" / "prefect.db").exists()
        unless = ", unless it is `qinglan up`'s own, which is in it" if own else ""
        yield f"Prefect, at {server.api_url}: its database with `pg_dump -Fc`{unless}"
    if (home := prefect_home()) and not home.resolve().is_relative_to(state):
        yield f"PREFECT_HOME, {home}: outside {state}"
