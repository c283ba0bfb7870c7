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
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from typing import Literal
from urllib.parse import quote

from qinglan.config import Profile, uses_proxy
from qinglan.data.versions import VERSION_FILE
from qinglan.errors import ArtifactError, ConfigError
from qinglan.ledger import LEDGER_FILE, ledger_url
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
from qinglan.ops.forget.cleaners.sqlite import SQLITE, SQLITE_WAIT_S
from qinglan.ops.forget.outside import BACKUPS_FILE
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

LEDGER = f"state/{LEDGER_FILE}"
_Identity = tuple[int, ...]
_MANIFESTS = (RUN_FILE, MANIFEST, VERSION_FILE)
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
    # HF_HOME in compose.yaml.
    "state/huggingface": _CACHE,
}


def make_backup(profile: Profile, target: Path, say: Say, *, runs: bool = True) -> Backup:
    """Write a backup into `target`, a folder that is there only once it is complete.

    Raises ConfigError where it can't go there, ArtifactError where something can't be copied.
    """
    target = target.expanduser().resolve()
    state_folder = profile.paths.state.resolve()
    runs_folder = profile.paths.runs.resolve()
    roots: dict[Root, Path] = {"state": state_folder}
    if runs:
        roots["runs"] = runs_folder
    if not state_folder.is_dir():
        raise ConfigError(f"paths.state: {state_folder} is not there, so there is nothing to keep")
    for folder in (state_folder, runs_folder):
        if target.is_relative_to(folder):
            problem = f"lies in {folder}, which is itself to be kept; name a folder elsewhere"
            raise ConfigError(f"{target}: {problem}")
    _require_free(target)
    # A mistake in an address shows before anything is copied.
    elsewhere = _kept_elsewhere(profile)
    with _partial_folder(target) as partial:
        # Noted before it is copied, so that a restored site knows of this backup too.
        with (state_folder / BACKUPS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(f"{target}\n")
        copier = _Copier(partial, roots={state_folder, runs_folder})
        for name, folder in roots.items():
            # A site without runs has no folder of them.
            if folder.exists():
                copier.find(name, folder)
        copier.require_disk_space()
        counts = f"{len(copier.files):,} files and {len(copier.databases)} databases"
        say(f"{counts}, {size(copier.bytes)}")
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
    return backup


def _require_free(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: is there already and not empty; name a new folder")


@contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` at the end, or is removed after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Its owner's only: questions, answers and whatever Prefect's blocks hold are nobody else's
    # business.
    partial = Path(mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield partial
        # Another backup may have been quicker.
        _require_free(target)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


class _Copier:
    """Finds what a site has to keep, then copies it into a folder."""

    def __init__(self, target: Path, roots: set[Path]) -> None:
        self._target = target
        self._roots = roots
        """State and runs: a root that lies below the other one is no part of that."""
        self.files: dict[str, Path] = {}
        self.databases: dict[str, Path] = {}
        self.folders: dict[str, Path] = {}
        self.bytes = 0
        self.entries: list[BackupEntry] = []
        self.left_out: list[SkippedPath] = []
        self._counted: set[_Identity] = set()
        """Files whose size is in `bytes`."""
        self._linked: dict[_Identity, BackupEntry] = {}
        """Copied files that have several names, by hard links."""

    def find(self, path: str, folder: Path) -> None:
        """Note what there is to copy; links are kept at once, as what they name is there now."""
        self.folders[path] = folder
        for source in sorted(folder.iterdir(), key=_order_in_folder):
            inner_path = f"{path}/{source.name}"
            try:
                self._find_one(inner_path, source)
            except FileNotFoundError:
                # A clean-up may have taken it away.
                self._leave_out(inner_path, _VANISHED)
            except OSError as error:
                problem = f"{error.filename}: can't be read ({error.strerror})"
                raise ArtifactError(f"{problem}; run this as the user who owns the site") from None

    def _find_one(self, path: str, source: Path) -> None:
        is_folder = source.is_dir()
        is_link = source.is_symlink()
        reason = _reason_to_skip_folder(path, source) if is_folder else None
        if reason is not None:
            self._leave_out(path, reason)
        elif is_link:
            self.entries.append(BackupEntry(path=path, kind="link", target=str(source.readlink())))
        elif is_folder:
            if source not in self._roots:
                self.find(path, source)
        else:
            self._find_file(path, source)

    def _find_file(self, path: str, source: Path) -> None:
        reason = _reason_to_skip_file(path, source)
        if reason is not None:
            self._leave_out(path, reason)
            return
        is_database = _is_database(source)
        status = source.stat()
        if is_database:
            self.databases[path] = source
        else:
            self.files[path] = source
        # A file with several names is copied once, a database each time.
        if is_database or status.st_nlink == 1 or _identity(status) not in self._counted:
            self.bytes += status.st_size
        self._counted.add(_identity(status))

    def _leave_out(self, path: str, reason: str) -> None:
        self.left_out.append(SkippedPath(path=path, reason=reason))

    def require_disk_space(self) -> None:
        free_bytes = shutil.disk_usage(self._target).free
        if free_bytes >= self.bytes + MARGIN_BYTES:
            return
        has = f"has {size(free_bytes)} free, the backup takes {size(self.bytes)}"
        hint = "free disk space, give another folder, or leave out the runs (--no-runs)"
        raise ArtifactError(f"{self._target.parent}: {has}; {hint}")

    def copy(self) -> None:
        """Copy what was found, in the order that the module's first lines explain."""
        for path, source in self.databases.items():
            if path != LEDGER:
                self._copy_database(path, source)
        for path, source in self.files.items():
            try:
                self._copy_file(path, source)
            except FileNotFoundError:
                (self._target / path).unlink(missing_ok=True)
                self._leave_out(path, _VANISHED)
        if LEDGER in self.databases:
            self._copy_database(LEDGER, self.databases[LEDGER])

    def folders_with_modes(self) -> list[BackupFolder]:
        """The folders that are there once all is copied.

        A run that a clean-up took meanwhile does not come back as an empty folder.
        """
        folders = []
        for path, source in self.folders.items():
            with suppress(FileNotFoundError):
                mode = stat.S_IMODE(source.stat().st_mode)
                folders.append(BackupFolder(path=path, mode=mode))
        return folders

    def _copy_file(self, path: str, source: Path) -> None:
        status = source.stat()
        has_other_names = status.st_nlink > 1
        if has_other_names and _identity(status) in self._linked:
            self.entries.append(self._linked[_identity(status)].at(path))
            return
        shutil.copy2(source, self._target_of(path))
        self._add_entry(path, "file")
        if has_other_names:
            self._linked[_identity(status)] = self.entries[-1]

    def _copy_database(self, path: str, source: Path) -> None:
        """Copy a SQLite database as of one moment, while others write to it.

        The copy is checked, and has no write-ahead log.
        """
        target = self._target_of(path)
        # As `ro` SQLite could not open a database whose log nobody has open.
        address = f"file:{quote(str(source))}?mode=rw"
        try:
            with (
                closing(sqlite3.connect(address, uri=True, timeout=SQLITE_WAIT_S)) as live,
                closing(sqlite3.connect(target)) as copy,
            ):
                live.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")
                (verdict,) = copy.execute("PRAGMA quick_check").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
        except sqlite3.Error as error:
            problem = f"can't be copied as a database: {error}; no backup was made"
            raise ArtifactError(f"{source}: {problem}") from error
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


def _order_in_folder(source: Path) -> tuple[bool, bool, str]:
    """A sort key: files before folders, and manifests before the files that they list."""
    return source.is_dir(), source.name not in _MANIFESTS, source.name


def _identity(status: os.stat_result) -> _Identity:
    """A key that tells a file from another that got its number later."""
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
    if cache and source == Path(cache).expanduser().resolve():
        return _CACHE
    return None


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
    # SQLite keeps these files beside its database.
    database = source.with_name(re.sub(r"-(wal|shm|journal)$", "", name))
    if database != source and database.is_file() and _is_database(database):
        return "part of a database that is copied whole"
    return None if source.is_file() else "no file"


def _kept_elsewhere(profile: Profile) -> list[str]:
    """A line for each store that this backup can't hold, with how it is kept."""
    state = profile.paths.state.resolve()
    lines = (
        _ledger_elsewhere(profile, state),
        _request_log_elsewhere(profile, state),
        _mlflow_elsewhere(profile, state),
        _prefect_elsewhere(state),
        _prefect_home_elsewhere(state),
    )
    return [line for line in lines if line is not None]


def _ledger_elsewhere(profile: Profile, state: Path) -> str | None:
    variable = profile.ledger.url_env
    if not variable:
        return None
    address = shown(ledger_url(profile.ledger, state))
    database = f"the database that {variable} names ({address})"
    return f"the ledger, in {database}: `pg_dump -Fc`, after this backup"


def _request_log_elsewhere(profile: Profile, state: Path) -> str | None:
    log = profile.serve.request_log.folder
    if not log or Path(log).resolve().is_relative_to(state):
        return None
    return f"the request log, {log}: outside {state}"


def _mlflow_elsewhere(profile: Profile, state: Path) -> str | None:
    uri = profile.tracking_uri
    if not uri.startswith("sqlite:"):
        url = url_of(uri)
        address = shown(url) if url else "the address in tracking.uri"
        return f"MLflow, at {address}: its database with `pg_dump -Fc`, and its artifact store"
    database = uri.removeprefix("sqlite:///")
    if Path(database).resolve().is_relative_to(state):
        return None
    return f"MLflow's database, {database}: outside {state}"


def _prefect_elsewhere(state: Path) -> str | None:
    server = find_server(state)
    if server is None or server.is_at(announced_url(state)):
        return None
    # While `qinglan up` is down, nothing tells whether its address is meant.
    may_be_of_up = not uses_proxy(server.api_url) and (state / "prefect" / "prefect.db").exists()
    unless = ", unless it is `qinglan up`'s own, which is in it" if may_be_of_up else ""
    return f"Prefect, at {server.api_url}: its database with `pg_dump -Fc`{unless}"


def _prefect_home_elsewhere(state: Path) -> str | None:
    home = prefect_home()
    if home is None or home.resolve().is_relative_to(state):
        return None
    return f"PREFECT_HOME, {home}: outside {state}"
