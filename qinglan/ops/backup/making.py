"""Taking a backup while the site works.

The order makes it consistent: first every database but the ledger, as MLflow names files that were written before; then
the files, of each folder the manifest first, as what it lists was complete by then; the ledger last, so that it knows
every answer that the files hold. SQLite copies a database as of one moment, its write-ahead log included.
"""

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from tempfile import mkdtemp
from urllib.parse import quote

from qinglan.config import Profile, uses_proxy
from qinglan.data.versions import VERSION_FILE
from qinglan.errors import ArtifactError, ConfigError
from qinglan.ledger import ledger_url
from qinglan.ledger.connecting import shown, url_of
from qinglan.ops.backup.records import Backup, BackupEntry, BackupFolder, Root, SkippedPath
from qinglan.ops.prefect.server import LOCK_FILE, SERVER_FILE, announced_url, find_server
from qinglan.runs.artifacts import MANIFEST, sha256_of
from qinglan.runs.processes import Say
from qinglan.runs.run import RUN_FILE
from qinglan.text import size

LEDGER = "state/ledger.db"
_SQLITE = b"SQLite format 3\0"
_SQLITE_WAIT_S = 60.0
_MARGIN_BYTES = 50e6
_Identity = tuple[int, ...]
_FIRST = (RUN_FILE, MANIFEST, VERSION_FILE)
_BESIDE_A_DATABASE = ("-wal", "-shm", "-journal")
_CACHE = "a cache of models from the hub"
_SKIPPED_FOLDERS = {
    # Each in its place only: engines name folders as they like, and verl's checkpoints have a `huggingface` each.
    "state/datasets/*/.partial-*": "unfinished",
    "state/models/*/.partial-*": "unfinished",
    "state/datasets/*/.removing-*": "being removed",
    "runs/.removing-*": "being removed",
    "state/.restoring": "of an interrupted restore",
    "runs/.restoring": "of an interrupted restore",
    "state/.replaced-*": "put aside by a restore",
    "runs/.replaced-*": "put aside by a restore",
    "state/huggingface": _CACHE,  # HF_HOME in compose.yaml
}


def make_backup(profile: Profile, target: Path, say: Say, *, runs: bool = True) -> Backup:
    """Write one into `target`, a folder that is there only once it is complete.

    Args:
        runs: the folders of runs too, checkpoints and models included.

    Raises:
        ConfigError: `target` holds something, or lies in what it is to keep.
        ArtifactError: a file can't be read, a database is damaged, or the disk is too small.
    """
    target = target.expanduser().resolve()
    roots: dict[Root, Path] = {"state": profile.paths.state.resolve()}
    if runs:
        roots["runs"] = profile.paths.runs.resolve()
    _require_target(target, profile)
    with _partial(target) as partial:
        backup = _fill(partial, profile, roots, say)
        _require_target(target, profile)  # another backup may have been quicker
        if target.exists():
            target.rmdir()
        partial.rename(target)
    return backup


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A folder beside it that is nobody else's, gone after an error; one of a backup that was killed stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Its owner's only: questions, answers and whatever Prefect's blocks hold are nobody else's business.
    partial = Path(mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fill(partial: Path, profile: Profile, roots: dict[Root, Path], say: Say) -> Backup:
    made = _Maker(partial, roots, apart={profile.paths.state.resolve(), profile.paths.runs.resolve()})
    for root in roots:
        made.find(root)
    made.require_disk_space()
    say(f"{len(made.files):,} files and {len(made.databases)} databases, {size(made.bytes)}")
    made.copy()
    backup = Backup(
        made_at=datetime.now(UTC),
        qinglan=version("qinglan"),
        profile=profile.name,
        roots=roots,
        entries=made.entries,
        folders=list(made.folders_with_modes()),
        left_out=made.left_out,
        elsewhere=list(_elsewhere(profile)),
    )
    backup.write(partial)
    return backup


class _Maker:
    def __init__(self, folder: Path, roots: dict[Root, Path], apart: set[Path]) -> None:
        self._folder, self._roots, self._apart = folder, roots, apart
        self.files: dict[str, Path] = {}
        self.databases: dict[str, Path] = {}
        self.bytes = 0
        self.entries: list[BackupEntry] = []
        self.folders: dict[str, Path] = {}
        self.left_out: list[SkippedPath] = []
        self._counted: set[_Identity] = set()
        self._linked: dict[_Identity, BackupEntry] = {}
        """Files with several names."""

    def find(self, root: Root) -> None:
        """What there is to copy; links are kept at once, as what they name is there now."""
        top = self._roots[root]
        for at, folders, names in os.walk(top, onerror=lambda error: self._lost(root, error)):
            here = Path(at)
            self.folders[self._name(root, here)] = here
            for name in sorted(folders):
                reason = _reason_to_skip(self._name(root, here / name), here / name)
                if reason or here / name in self._apart:
                    folders.remove(name)
                    if reason:
                        self._leave_out(root, here / name, reason)
                elif (here / name).is_symlink():
                    folders.remove(name)
                    names.append(name)
            folders.sort()
            for name in sorted(names, key=lambda name: (name not in _FIRST, name)):
                self._find_file(root, here / name)

    def require_disk_space(self) -> None:
        """Fail before the disk is full."""
        free = shutil.disk_usage(self._folder).free
        if free < self.bytes + _MARGIN_BYTES:
            raise ArtifactError(
                f"{self._folder.parent}: has {size(free)} free, the backup takes {size(self.bytes)}; free disk "
                "space, give another folder, or leave the runs out with --no-runs"
            )

    def copy(self) -> None:
        """All of it, in the order that makes it consistent."""
        for path, source in self.databases.items():
            if path != LEDGER:
                self._copy_database(path, source)
        for path, source in self.files.items():
            self._copy_file(path, source)
        if LEDGER in self.databases:
            self._copy_database(LEDGER, self.databases[LEDGER])

    def folders_with_modes(self) -> Iterator[BackupFolder]:
        """Asked once all is copied: a run that a clean-up took meanwhile does not come back as an empty folder."""
        for path, source in self.folders.items():
            with suppress(FileNotFoundError):
                yield BackupFolder(path=path, mode=stat.S_IMODE(source.stat().st_mode))

    def _find_file(self, root: Root, source: Path) -> None:
        path = self._name(root, source)
        try:
            if source.is_symlink():
                self.entries.append(BackupEntry(path=path, kind="link", target=str(source.readlink())))
                return
            if reason := _reason_against(path, source):
                self._leave_out(root, source, reason)
                return
            found = self.databases if _is_database(source) else self.files
            self._count(source.stat(), whole=found is self.databases)
        except FileNotFoundError:
            self.left_out.append(SkippedPath(path=path, reason=_VANISHED))
            return
        except OSError as error:
            _complain(error)
        found[path] = source

    def _count(self, status: os.stat_result, *, whole: bool) -> None:
        """A file with several names is copied once, a database each time."""
        if status.st_nlink > 1 and not whole:
            if _identity(status) in self._counted:
                return
            self._counted.add(_identity(status))
        self.bytes += status.st_size

    def _copy_file(self, path: str, source: Path) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            status = source.stat()
            if status.st_nlink > 1 and (first := self._linked.get(_identity(status))):
                self.entries.append(first.model_copy(update={"path": path, "same_as": first.path}))
                return
            shutil.copy2(source, target)
        except FileNotFoundError:
            target.unlink(missing_ok=True)
            self.left_out.append(SkippedPath(path=path, reason=_VANISHED))
            return
        entry = BackupEntry(path=path, kind="file", sha256=sha256_of(target), bytes=target.stat().st_size)
        self.entries.append(entry)
        if status.st_nlink > 1:
            self._linked[_identity(status)] = entry

    def _copy_database(self, path: str, source: Path) -> None:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy_database(source, target)
        except sqlite3.Error as error:
            raise ArtifactError(f"{source}: can't be copied as a database: {error}; no backup was made") from error
        shutil.copymode(source, target)
        entry = BackupEntry(path=path, kind="database", sha256=sha256_of(target), bytes=target.stat().st_size)
        self.entries.append(entry)

    def _lost(self, root: Root, error: OSError) -> None:
        """A folder that can't be listed: a clean-up may have taken it away, and a site without runs has none."""
        if not isinstance(error, FileNotFoundError):
            _complain(error)
        elif Path(error.filename) != self._roots[root]:
            self._leave_out(root, Path(error.filename), _VANISHED)

    def _leave_out(self, root: Root, source: Path, reason: str) -> None:
        self.left_out.append(SkippedPath(path=self._name(root, source), reason=reason))

    def _name(self, root: Root, source: Path) -> str:
        return (PurePosixPath(root) / source.relative_to(self._roots[root])).as_posix()


_VANISHED = "removed before it could be copied"


def copy_database(source: Path, target: Path) -> None:
    """A SQLite database as of one moment, while others write to it; checked, and without a write-ahead log.

    Raises:
        sqlite3.Error: it can't be read, or is damaged.
    """
    address = f"file:{quote(str(source))}?mode=rw"  # `ro` could not open one whose log nobody has open
    with (
        closing(sqlite3.connect(address, uri=True, timeout=_SQLITE_WAIT_S)) as live,
        closing(sqlite3.connect(target)) as copy,
    ):
        live.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")
        (found,) = copy.execute("PRAGMA quick_check").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)


def _identity(status: os.stat_result) -> _Identity:
    """What tells a file from another that got its number later."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_database(source: Path) -> bool:
    with source.open("rb") as stream:
        return stream.read(len(_SQLITE)) == _SQLITE


def _reason_to_skip(path: str, source: Path) -> str | None:
    """Why a folder is not looked into, by its place in the backup."""
    parts = path.count("/")
    for place, reason in _SKIPPED_FOLDERS.items():
        # `match` alone would begin anywhere in the path.
        if parts == place.count("/") and PurePosixPath(path).match(place):
            return reason
    cache = os.environ.get("HF_HOME")
    return _CACHE if cache and source == Path(cache).expanduser().resolve() else None


def _reason_against(path: str, source: Path) -> str | None:
    """Why a file is not kept.

    Raises:
        OSError: what stands beside it can't be read.
    """
    name = source.name
    if path == f"state/{LOCK_FILE}" or (name.endswith(".lock") and source.stat().st_size == 0):
        return "a lock"
    if name.endswith(".partial"):
        return "unfinished"
    if path == f"state/{SERVER_FILE}":
        return "names a server while it runs"
    if name == "profiles.toml":
        return "Prefect's settings may hold keys"
    for ending in _BESIDE_A_DATABASE:
        beside = source.with_name(name.removesuffix(ending))
        if beside != source and beside.is_file() and _is_database(beside):
            return "part of a database that is copied whole"
    return None if source.is_file() else "no file"


def _require_target(target: Path, profile: Profile) -> None:
    state, runs = profile.paths.state.resolve(), profile.paths.runs.resolve()
    if not state.is_dir():
        raise ConfigError(f"paths.state: {state} is not there, so there is nothing to keep")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: is there already and not empty; name a new folder")
    for root in (state, runs):
        if target.is_relative_to(root):
            raise ConfigError(f"{target}: lies in {root}, which is itself to be kept; name a folder elsewhere")


def _elsewhere(profile: Profile) -> Iterator[str]:
    """What this backup can't hold, and how it is kept."""
    state = profile.paths.state.resolve()
    if name := profile.ledger.url_env:
        where = ledger_url(profile.ledger, state)
        kept = shown(where) if not isinstance(where, str) else where
        yield f"the ledger, in the database that {name} names ({kept}): `pg_dump -Fc`, after this backup"
    uri = profile.tracking_uri
    if not uri.startswith("sqlite:"):
        yield f"MLflow, at {_without_password(uri)}: its database with `pg_dump -Fc`, and its artifact store"
    elif not Path(uri.removeprefix("sqlite:///")).resolve().is_relative_to(state):
        yield f"MLflow's database, {uri.removeprefix('sqlite:///')}: outside {state}"
    server = find_server(state)
    if server and not server.is_at(announced_url(state)):
        # While `qinglan up` is down, nothing tells whether its address is meant.
        own = not uses_proxy(server.shown_url) and (state / "prefect" / "prefect.db").exists()
        unless = ", unless it is `qinglan up`'s own, which is in it" if own else ""
        yield f"Prefect, at {server.shown_url}: its database with `pg_dump -Fc`{unless}"
    home = os.environ.get("PREFECT_HOME")
    if home and not Path(home).expanduser().resolve().is_relative_to(state):
        yield f"PREFECT_HOME, {home}: outside {state}"


def _without_password(uri: str) -> str:
    url = url_of(uri)
    return shown(url) if url else "the address in tracking.uri"


def _complain(error: OSError) -> None:
    raise ArtifactError(f"{error.filename}: can't be read ({error.strerror}); run this as the user who owns the site")
