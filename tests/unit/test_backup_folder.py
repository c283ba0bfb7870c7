"""Backup and restore on plain files and SQLite databases."""

import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from filelock import FileLock

from qinglan.backup import BACKUP_FILE, Backup, make_backup, restore_backup, restoring
from qinglan.backup.records import Entry
from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.up.lock import only_one

ProfileOf = Callable[..., Profile]


def quiet(_: str) -> None:
    """Says nothing."""


def count(database: Path) -> int:
    with closing(sqlite3.connect(database)) as db:
        found: int = db.execute("SELECT count(*) FROM t").fetchone()[0]
        return found


@pytest.fixture
def profile(profile_of: ProfileOf) -> Profile:
    """Of a site with a database whose rows are in its log only, a linked file, and a pointer to the newest run."""
    made = profile_of()
    state, run = made.paths.state, made.paths.runs / "r1"
    (state / "prefect").mkdir(parents=True)
    (state / "datasets" / "v1").mkdir(parents=True)
    (run / "dataset").mkdir(parents=True)
    writer = sqlite3.connect(state / "ledger.db", isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    writer.execute("CREATE TABLE t (n INTEGER)")
    writer.execute("INSERT INTO t VALUES (1)")
    writer.close()
    (state / "prefect" / "profiles.toml").write_text("PREFECT_API_KEY = 'pnu_secret'\n")
    (state / "prefect_api_url").write_text("http://127.0.0.1:4200/api")
    (state / "up.lock").touch()
    (run / "run.json").write_text("{}")
    (run / "dataset" / "rows.jsonl").write_text("{}\n" * 100)
    (run / "dataset" / "more.jsonl.partial").write_text("{")
    os.link(run / "dataset" / "rows.jsonl", state / "datasets" / "v1" / "rows.jsonl")
    (state / "datasets" / "v1" / "rows.jsonl").chmod(0o444)
    (made.paths.runs / "latest").symlink_to("r1")
    return made


def wipe(profile: Profile) -> None:
    shutil.rmtree(profile.paths.state)
    shutil.rmtree(profile.paths.runs)


def test_what_was_lost_comes_back(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet)
    wipe(profile)
    restore_backup(profile, tmp_path / "kept", quiet)
    state, runs = profile.paths.state, profile.paths.runs
    assert count(state / "ledger.db") == 1
    assert (runs / "latest" / "run.json").read_text() == "{}"
    rows = state / "datasets" / "v1" / "rows.jsonl"
    assert rows.samefile(runs / "r1" / "dataset" / "rows.jsonl")
    assert rows.stat().st_mode & 0o777 == 0o444
    assert sorted(each.name for each in state.iterdir()) == ["datasets", "ledger.db", "up.lock"]


def test_whatever_is_left_out_is_said(profile: Profile, tmp_path: Path):
    made = make_backup(profile, tmp_path / "kept", quiet)
    assert {each.path: each.reason for each in made.left_out} == {
        "runs/r1/dataset/more.jsonl.partial": "unfinished",
        "state/prefect/profiles.toml": "Prefect's settings may hold keys",
        "state/prefect_api_url": "names a server while it runs",
        "state/up.lock": "a lock",
    }
    assert Backup.read(tmp_path / "kept") == made


def test_no_key_and_no_password_is_in_it(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_LEDGER", "postgresql://me:s3cret@db.internal/qinglan?sslpassword=s3cret")
    tracked = profile.tracking.model_copy(update={"uri": "postgresql://me:s3cret@db.internal/mlflow"})
    ledger = profile.ledger.model_copy(update={"url_env": "A_LEDGER"})
    made = make_backup(
        profile.model_copy(update={"tracking": tracked, "ledger": ledger}), tmp_path / "kept", quiet, runs=False
    )
    assert [what.partition(",")[0] for what in made.elsewhere] == ["the ledger", "MLflow"]
    kept = b"".join(path.read_bytes() for path in (tmp_path / "kept").rglob("*") if path.is_file())
    assert b"s3cret" not in kept
    assert b"pnu_secret" not in kept
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0


def test_a_database_is_copied_as_of_one_moment_while_it_is_written(profile: Profile, tmp_path: Path):
    database, over = profile.paths.state / "ledger.db", threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(database, isolation_level=None, timeout=60)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            while not over.is_set():
                db.execute("BEGIN IMMEDIATE")
                db.execute("INSERT INTO t VALUES (1)")
                db.execute("INSERT INTO t VALUES (2)")
                db.execute("COMMIT")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while count(database) < 50:
            pass
        made = make_backup(profile, tmp_path / "kept", quiet)
    finally:
        over.set()
        writer.join()
    copied = count(tmp_path / "kept" / "state" / "ledger.db")
    assert copied >= 50
    assert copied % 2 == 1  # one from before, and pairs
    assert made.entries[-1].path == "state/ledger.db"  # it knows every answer that the files hold


def test_a_site_that_is_there_is_not_overwritten(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet)
    (profile.paths.state / "newer").write_text("newer")
    with pytest.raises(ConfigError, match="is not empty; --replace puts aside"):
        restore_backup(profile, tmp_path / "kept", quiet)
    said: list[str] = []
    restore_backup(profile, tmp_path / "kept", said.append, replace=True)
    assert not (profile.paths.state / "newer").exists()
    assert [path.read_text() for path in profile.paths.state.glob(".replaced-*/newer")] == ["newer"]
    assert "delete it when you don't need it" in said[-1]
    again = make_backup(profile, tmp_path / "again", quiet)
    assert again.reasons["put aside by a restore"] == 2


def test_a_restore_waits_for_nobody_at_work(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet)
    with (
        FileLock(profile.paths.runs / "r1" / ".lock"),
        pytest.raises(ConfigError, match=r"r1/\.lock: a process is at work there"),
    ):
        restore_backup(profile, tmp_path / "kept", quiet, replace=True)


def test_runs_at_work_are_looked_for_also_where_the_backup_has_none(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet, runs=False)
    with (
        FileLock(profile.paths.runs / "r1" / ".lock"),
        pytest.raises(ConfigError, match=r"r1/\.lock: a process is at work there"),
    ):
        restore_backup(profile, tmp_path / "kept", quiet, replace=True)


def test_what_begins_during_a_restore_is_seen_and_no_up_can_begin(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_backup(profile, tmp_path / "kept", quiet)
    begun, swap = FileLock(profile.paths.runs / "r1" / ".lock"), restoring._make_staging

    def begin(path: Path, wanted: int) -> None:
        begun.acquire()
        with (
            pytest.raises(ConfigError, match="runs here already"),
            only_one(profile.paths.state, quiet),
        ):
            pass
        swap(path, wanted)

    monkeypatch.setattr(restoring, "_make_staging", begin)
    (profile.paths.state / "newer").touch()
    with pytest.raises(ConfigError, match=r"r1/\.lock: a process is at work there"):
        restore_backup(profile, tmp_path / "kept", quiet, replace=True)
    assert (profile.paths.state / "newer").exists()
    begun.release(force=True)


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_backup_touches_nothing(profile: Profile, tmp_path: Path, damage: str):
    make_backup(profile, tmp_path / "kept", quiet)
    wipe(profile)
    file = tmp_path / "kept" / "runs" / "r1" / "run.json"
    file.write_text("[]") if damage == "changed" else file.unlink()
    with pytest.raises(ArtifactError, match=rf"run\.json: (was|is) {damage}"):
        restore_backup(profile, tmp_path / "kept", quiet)
    assert not profile.paths.state.exists()


def test_it_comes_back_only_to_where_it_was(profile: Profile, profile_of: ProfileOf, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet)
    other = profile_of(paths={"runs": str(profile.paths.runs), "state": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=rf"restore with `--set paths\.state={profile.paths.state}`"):
        restore_backup(other, tmp_path / "kept", quiet)


def test_runs_below_the_state_folder_are_kept_once(profile_of: ProfileOf, tmp_path: Path):
    profile = profile_of(paths={"state": str(tmp_path / "site"), "runs": str(tmp_path / "site" / "runs")})
    (profile.paths.runs / "r1").mkdir(parents=True)
    for path in (profile.paths.state / "a", profile.paths.runs / "r1" / "b"):
        path.write_text(path.name)
    without = make_backup(profile, tmp_path / "without", quiet, runs=False)
    assert [entry.path for entry in without.entries] == ["state/a"]
    make_backup(profile, tmp_path / "kept", quiet)
    restore_backup(profile, tmp_path / "without", quiet, replace=True)
    assert (profile.paths.runs / "r1" / "b").exists()
    shutil.rmtree(profile.paths.state)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert (profile.paths.runs / "r1" / "b").read_text() == "b"


def test_a_backup_goes_neither_into_the_site_nor_over_something(profile: Profile, tmp_path: Path):
    with pytest.raises(ConfigError, match="which is to be kept in it"):
        make_backup(profile, profile.paths.state / "kept", quiet)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ConfigError, match="not empty; name a new folder"):
        make_backup(profile, tmp_path / "full", quiet)
    with pytest.raises(ConfigError, match=r"no backup: it has no backup\.json"):
        restore_backup(profile, tmp_path / "full", quiet)


def test_a_site_without_runs_is_kept_too(profile: Profile, tmp_path: Path):
    shutil.rmtree(profile.paths.runs)
    made = make_backup(profile, tmp_path / "kept", quiet)
    assert all(entry.path.startswith("state/") for entry in made.entries)
    shutil.rmtree(profile.paths.state)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert count(profile.paths.state / "ledger.db") == 1


def test_what_goes_while_it_is_looked_at_is_noted(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = shutil.copy2

    def gone(source: Path, target: Path) -> None:
        if source.name == "run.json":
            source.unlink()
        copy(source, target)

    monkeypatch.setattr(shutil, "copy2", gone)
    made = make_backup(profile, tmp_path / "kept", quiet)
    assert made.reasons["gone before it could be copied"] == 1
    assert "runs/r1/run.json" not in {entry.path for entry in made.entries}


def test_a_folder_of_such_a_name_is_not_touched_and_a_failure_leaves_nothing(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "kept.partial").mkdir()
    (tmp_path / "kept.partial" / "mine").touch()
    make_backup(profile, tmp_path / "kept", quiet)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ArtifactError):
        make_backup(profile, tmp_path / "again", quiet)
    assert (tmp_path / "kept.partial" / "mine").exists()
    assert [each.name for each in tmp_path.glob("*.partial")] == ["kept.partial"]


def test_of_two_backups_into_one_folder_the_quicker_stays(profile: Profile, tmp_path: Path):
    def other(_: str) -> None:
        if not (tmp_path / "kept").exists():
            (tmp_path / "kept").mkdir()
            (tmp_path / "kept" / "theirs").touch()

    with pytest.raises(ConfigError, match="not empty; name a new folder"):
        make_backup(profile, tmp_path / "kept", other)
    assert [each.name for each in (tmp_path / "kept").iterdir()] == ["theirs"]


def test_a_file_that_got_the_number_of_a_linked_one_is_copied(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    linked, stat = (profile.paths.runs / "r1" / "dataset" / "rows.jsonl").stat(), Path.stat

    def reused(path: Path, **options: bool) -> os.stat_result:
        status = stat(path, **options)
        if path.name != "run.json":
            return status
        return os.stat_result([status.st_mode, linked.st_ino, *status[2:10]], {"st_mtime_ns": status.st_mtime_ns})

    monkeypatch.setattr(Path, "stat", reused)
    made = make_backup(profile, tmp_path / "kept", quiet)
    monkeypatch.undo()
    assert {entry.path for entry in made.entries if entry.same_as} == {"runs/r1/dataset/rows.jsonl"}
    assert (tmp_path / "kept" / "runs" / "r1" / "run.json").read_text() == "{}"


def test_a_disk_that_is_too_small_is_told_before(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ArtifactError, match="has 0 B free, the backup takes"):
        make_backup(profile, tmp_path / "kept", quiet)
    assert not (tmp_path / "kept").exists()


def test_a_damaged_database_makes_no_backup(profile: Profile, tmp_path: Path):
    (profile.paths.state / "mlflow.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(ArtifactError, match=r"mlflow\.db: can't be copied as a database"):
        make_backup(profile, tmp_path / "kept", quiet)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    "path", ["../etc/passwd", "state/../../etc/passwd", "/etc/passwd", "state", "state//etc/passwd", "state/./a"]
)
def test_an_entry_leads_nowhere_else(path: str):
    with pytest.raises(ValueError, match="leads out of the backup"):
        Entry(path=path, kind="file")


@pytest.mark.parametrize("path", ["state/way", "state/way/out", "state/way/further/out"])
def test_nothing_is_written_through_a_link(profile: Profile, tmp_path: Path, path: str):
    make_backup(profile, tmp_path / "kept", quiet)
    file, outside = tmp_path / "kept" / BACKUP_FILE, tmp_path / "outside"
    outside.mkdir()
    told = json.loads(file.read_text())
    told["entries"] += [
        {"path": "state/way", "kind": "link", "target": str(outside)},
        {"path": path, "kind": "link", "target": "/"},
    ]
    file.write_text(json.dumps(told))
    with pytest.raises(ArtifactError, match=r"`entries`: .*(lies below a file or link|is in it twice)"):
        restore_backup(profile, tmp_path / "kept", quiet, replace=True)
    assert not list(outside.iterdir())


def test_a_newer_backup_is_refused(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet)
    file = tmp_path / "kept" / BACKUP_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 2}))
    with pytest.raises(ArtifactError, match="written by a newer Qinglan"):
        restore_backup(profile, tmp_path / "kept", quiet)
