"""Backup and restore on plain files and SQLite databases."""

import errno
import json
import os
import shutil
import sqlite3
import threading
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import FileLock
from fixture_types import ProfileOf

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.ops.backup import BACKUP_FILE, Backup
from qinglan.ops.backup.making import make_backup
from qinglan.ops.backup.restoring import restore_backup
from qinglan.ops.up.site import only_one


def count(database: Path) -> int:
    with closing(sqlite3.connect(database)) as db:
        rows: int = db.execute("SELECT count(*) FROM t").fetchone()[0]
        return rows


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def profile(profile_of: ProfileOf) -> Profile:
    """The profile of a site with state and a run.

    It has a database whose rows are in its log only, a linked file, and a pointer to the newest
    run.
    """
    profile = profile_of()
    state = profile.paths.state
    run = profile.paths.runs / "r1"
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
    (profile.paths.runs / "latest").symlink_to("r1")
    return profile


def wipe(profile: Profile) -> None:
    shutil.rmtree(profile.paths.state)
    shutil.rmtree(profile.paths.runs)


def test_what_was_lost_comes_back_with_who_may_enter_it(profile: Profile, kept: Path):
    state = profile.paths.state
    runs = profile.paths.runs
    modes = {
        state: 0o750,
        state / "serving" / "requests": 0o700,
        state / "empty": 0o2775,
        state / "sealed": 0o500,
    }
    for folder in modes:
        folder.mkdir(parents=True, exist_ok=True)
    (state / "sealed" / "a").write_text("a")
    for folder, mode in modes.items():
        folder.chmod(mode)
    make_backup(profile, kept, print)
    (state / "sealed").chmod(0o700)
    wipe(profile)
    restore_backup(profile, kept, print)
    assert {folder: folder.stat().st_mode & 0o7777 for folder in modes} == modes
    assert (state / "sealed" / "a").read_text() == "a"
    assert count(state / "ledger.db") == 1
    assert (runs / "latest" / "run.json").read_text() == "{}"
    rows = state / "datasets" / "v1" / "rows.jsonl"
    assert rows.samefile(runs / "r1" / "dataset" / "rows.jsonl")
    assert rows.stat().st_mode & 0o777 == 0o444
    other_names = {path.name for path in state.iterdir()} - {path.name for path in modes}
    assert other_names == {"backups.txt", "datasets", "ledger.db", "prefect", "serving", "up.lock"}
    assert (state / "backups.txt").read_text() == f"{kept}\n"


def test_what_is_left_out_is_noted_with_the_reason(
    profile: Profile, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HOME", str(profile.paths.state / "cache"))
    left_out = {
        "state/huggingface": "a cache of models from the hub",
        "state/cache": "a cache of models from the hub",
        "state/datasets/t.q/.partial-ab": "unfinished",
        "runs/.removing-r2": "being removed",
        "runs/.restoring": "of an interrupted restore",
        "state/.replaced-1": "put aside by a restore",
    }
    copied = [
        "runs/r1/rl/huggingface",
        "runs/r1/sft/.partial-ab",
        "runs/r1/.restoring",
        "state/models/.replaced-1",
    ]
    for folder in (*left_out, *copied):
        (kept.parent / folder).mkdir(parents=True)
        (kept.parent / folder / "file").touch()
    for name in ("requirements.lock", "notes", "notes-journal", "prefect_api_url"):
        (profile.paths.runs / "r1" / name).write_text("kept")
    (profile.paths.runs / "r1" / ".lock").touch()
    backup = make_backup(profile, kept, print)
    folders = (*left_out, *copied)
    assert [folder for folder in folders if (kept / folder / "file").exists()] == copied
    assert {path.path: path.reason for path in backup.left_out} == left_out | {
        "runs/r1/.lock": "a lock",
        "runs/r1/dataset/more.jsonl.partial": "unfinished",
        "state/prefect/profiles.toml": "Prefect's settings may hold keys",
        "state/prefect_api_url": "names a server while it runs",
        "state/up.lock": "a lock",
    }
    assert Backup.read(kept) == backup


def test_nobody_else_may_enter_before_all_is_in_place(
    profile: Profile, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    state = profile.paths.state
    runs = profile.paths.runs
    state.chmod(0o755)
    runs.chmod(0o2775)
    make_backup(profile, kept, print)
    wipe(profile)
    state.mkdir()
    # A root that is there stays its owner's.
    state.chmod(0o710)
    with monkeypatch.context() as full, pytest.raises(ArtifactError, match="free disk space first"):
        free_on(full, {kept.parent: 0})
        restore_backup(profile, kept, print)
    copy = shutil.copy2
    modes_meanwhile = set[int]()

    def copy_and_look(source: Path, target: Path) -> None:
        copy(source, target)
        for root in (state, runs):
            for folder in (root / ".restoring").rglob("*/"):
                modes_meanwhile.add(folder.stat().st_mode & 0o777)

    monkeypatch.setattr(shutil, "copy2", copy_and_look)
    restore_backup(profile, kept, print)
    assert modes_meanwhile == {0o700}
    assert state.stat().st_mode & 0o7777 == 0o710
    assert runs.stat().st_mode & 0o7777 == 0o2775


@pytest.mark.usefixtures("profile")
def test_no_key_and_no_password_is_in_it(
    profile_of: ProfileOf, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("A_LEDGER", "postgresql://me:s3cret@db.internal/qinglan?sslpassword=s3cret")
    log = {"request_log": {"folder": "requests", "consent": "all"}}
    databases = {
        "tracking": {"uri": "postgresql://me@db.internal/mlflow"},
        "ledger": {"url_env": "A_LEDGER"},
    }
    backup = make_backup(profile_of(serve=log, **databases), kept, print, runs=False)
    assert [store.partition(",")[0] for store in backup.elsewhere] == [
        "the ledger",
        "the request log",
        "MLflow",
    ]
    content = b"".join(path.read_bytes() for path in kept.rglob("*") if path.is_file())
    assert b"s3cret" not in content
    assert b"pnu_secret" not in content
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("url", "is_up", "said"),
    [
        ("http://127.0.0.1:4200/api", True, None),
        ("http://127.0.0.1:4200/api", False, "`pg_dump -Fc`, unless it is `qinglan up`'s own"),
        (
            "https://ann:s3cret@prefect.example/api",
            True,
            "https://prefect.example/api: its database with `pg_d",
        ),
    ],
)
def test_the_sites_own_server_is_not_somewhere_else(
    profile: Profile,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    is_up: bool,
    said: str | None,
):
    monkeypatch.setenv("PREFECT_API_URL", url)
    (profile.paths.state / "prefect" / "prefect.db").touch()
    with only_one(profile.paths.state, print) if is_up else nullcontext():
        elsewhere = make_backup(profile, kept, print).elsewhere
    if said:
        (line,) = elsewhere
        assert said in line
    else:
        assert elsewhere == []
    assert "s3cret" not in str(elsewhere)


def test_a_database_is_copied_as_of_one_moment_while_it_is_written(profile: Profile, kept: Path):
    database = profile.paths.state / "ledger.db"
    is_over = threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(database, isolation_level=None, timeout=60)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            while not is_over.is_set():
                db.execute("BEGIN IMMEDIATE")
                db.execute("INSERT INTO t VALUES (1)")
                db.execute("INSERT INTO t VALUES (2)")
                db.execute("COMMIT")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while count(database) < 50:
            pass
        backup = make_backup(profile, kept, print)
    finally:
        is_over.set()
        writer.join()
    copied = count(kept / "state" / "ledger.db")
    assert copied >= 50
    assert copied % 2 == 1, "one from before, and pairs"
    # The ledger knows every answer that the files hold.
    assert backup.entries[-1].path == "state/ledger.db"


def test_it_comes_back_only_to_where_it_was_and_overwrites_no_site(
    profile: Profile, kept: Path, tmp_path: Path
):
    make_backup(profile, kept, print)
    other_paths = profile.paths.model_copy(update={"state": tmp_path / "other"})
    profile_elsewhere = profile.model_copy(update={"paths": other_paths})
    hint = rf"restore with `--set paths\.state={profile.paths.state}`"
    with pytest.raises(ConfigError, match=hint):
        restore_backup(profile_elsewhere, kept, print)
    (profile.paths.state / "newer").write_text("newer")
    with pytest.raises(ConfigError, match="is not empty; --replace puts aside"):
        restore_backup(profile, kept, print)
    said: list[str] = []
    restore_backup(profile, kept, said.append, replace=True)
    assert not (profile.paths.state / "newer").exists()
    assert [path.read_text() for path in profile.paths.state.glob(".replaced-*/newer")] == ["newer"]
    assert "delete it when you don't need it" in said[-1]
    again = make_backup(profile, tmp_path / "again", print)
    assert [path.reason for path in again.left_out].count("put aside by a restore") == 2


@pytest.mark.parametrize("runs", [True, False])
def test_a_restore_is_refused_while_a_run_is_running(profile: Profile, kept: Path, runs: bool):
    make_backup(profile, kept, print, runs=runs)
    running = FileLock(profile.paths.runs / "r1" / ".lock")
    with running, pytest.raises(ConfigError, match=r"r1/\.lock: a process is running there"):
        restore_backup(profile, kept, print, replace=True)


def test_what_begins_during_a_restore_is_seen(
    profile: Profile, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    make_backup(profile, kept, print)
    copy = shutil.copy2
    run_lock = FileLock(profile.paths.runs / "r1" / ".lock")

    def begin(source: Path, target: Path) -> None:
        if not run_lock.is_locked:
            run_lock.acquire()
            with (
                pytest.raises(ConfigError, match="runs here already"),
                only_one(profile.paths.state, print),
            ):
                pass
        copy(source, target)

    monkeypatch.setattr(shutil, "copy2", begin)
    (profile.paths.state / "newer").touch()
    with pytest.raises(ConfigError, match=r"r1/\.lock: a process is running there"):
        restore_backup(profile, kept, print, replace=True)
    assert (profile.paths.state / "newer").exists()
    run_lock.release()


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_damaged_backup_touches_nothing(profile: Profile, kept: Path, damage: str):
    make_backup(profile, kept, print)
    wipe(profile)
    file = kept / "runs" / "r1" / "run.json"
    file.write_text("[]") if damage == "changed" else file.unlink()
    with pytest.raises(ArtifactError, match=rf"run\.json: (was|is) {damage}"):
        restore_backup(profile, kept, print)
    assert not profile.paths.state.exists()


def test_runs_below_the_state_folder_come_back_beside_what_lies_on_the_way(
    profile_of: ProfileOf, tmp_path: Path
):
    site = tmp_path / "site"
    with_runs = tmp_path / "with"
    without_runs = tmp_path / "without"
    profile = profile_of(paths={"state": str(site), "runs": str(site / "data" / "runs")})
    note = site / "data" / "note"
    row = profile.paths.runs / "r1" / "row"
    row.parent.mkdir(parents=True)
    note.write_text("kept")
    row.write_text("kept")
    entries = make_backup(profile, without_runs, print, runs=False).entries
    assert [entry.path for entry in entries] == ["state/backups.txt", "state/data/note"]
    assert len(make_backup(profile, with_runs, print).entries) == 3, "with the list of backups"
    with pytest.raises(ConfigError, match="is not empty"):
        restore_backup(profile, with_runs, print)
    note.write_text("newer")
    row.write_text("newer")
    restore_backup(profile, without_runs, print, replace=True)
    assert (note.read_text(), row.read_text()) == ("kept", "newer")
    assert [path.read_text() for path in site.glob(".replaced-*/data/note")] == ["newer"]
    shutil.rmtree(site)
    restore_backup(profile, with_runs, print)
    assert (note.read_text(), row.read_text()) == ("kept", "kept")


def test_a_backup_goes_neither_into_the_site_nor_over_something(
    profile: Profile, kept: Path, tmp_path: Path
):
    for root in (profile.paths.state, profile.paths.runs):
        with pytest.raises(ConfigError, match="is itself to be kept; name a folder elsewhere"):
            make_backup(profile, root / "kept", print, runs=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ConfigError, match="not empty; name a new folder"):
        make_backup(profile, tmp_path / "full", print)
    with pytest.raises(ConfigError, match=r"no backup: it has no backup\.json"):
        restore_backup(profile, tmp_path / "full", print)

    def other(_: str) -> None:
        kept.mkdir()
        (kept / "theirs").touch()

    with pytest.raises(ConfigError, match="not empty; name a new folder"):
        make_backup(profile, kept, other)
    names = [path.name for path in kept.iterdir()]
    assert names == ["theirs"], "of two at once the quicker one stays"


def test_a_run_that_a_clean_up_takes_meanwhile_does_not_come_back_empty(
    profile: Profile, kept: Path
):
    doomed = profile.paths.runs / "r0"
    doomed.mkdir()
    (doomed / "run.json").touch()
    backup = make_backup(profile, kept, lambda _: doomed.rename(doomed.with_name(".removing-r0")))
    reasons = [path.reason for path in backup.left_out]
    assert reasons.count("removed before it could be copied") == 1
    wipe(profile)
    restore_backup(profile, kept, print)
    assert sorted(path.name for path in profile.paths.runs.iterdir()) == ["latest", "r1"]


def test_a_full_disk_or_damaged_database_makes_no_backup(
    profile: Profile, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        monkeypatch.context() as full,
        pytest.raises(ArtifactError, match="has 0 B free, the backup takes"),
    ):
        free_on(full, {kept.parent: 0})
        make_backup(profile, kept, print)
    (profile.paths.state / "mlflow.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(ArtifactError, match=r"mlflow\.db: can't be copied as a database"):
        make_backup(profile, kept, print)
    assert not list(kept.parent.glob("kept*"))


# Of a file with 8 MB and one with 4 MB and two names, on file systems with these MB free; 50 MB are
# to be left.
@pytest.mark.parametrize(
    ("free", "linkable", "refusal"),
    [
        ({"state": 60, "runs": 70}, False, None),
        (
            {"state": 50, "runs": 70},
            False,
            r"^\S+/state: has 50\.0 MB free, what the backup has of it takes 4\.0 MB",
        ),
        ({"": 65}, True, None),
        (
            {"": 65},
            False,
            r"^\S+/state and \S+/runs: has 65\.0 MB free, what the backup has of it takes 16\.0 MB",
        ),
    ],
)
def test_each_disk_is_asked_for_what_comes_onto_it(
    profile: Profile,
    kept: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: dict[str, int],
    linkable: bool,
    refusal: str | None,
):
    run = profile.paths.runs / "r1"
    said = list[str]()
    (run / "model.bin").write_bytes(b"x" * 8_000_000)
    (run / "rows.bin").write_bytes(b"x" * 4_000_000)
    os.link(run / "rows.bin", profile.paths.state / "rows.bin")
    backup = make_backup(profile, kept, said.append)
    assert "12.0 MB" in said[0]
    assert {entry.path for entry in backup.entries if entry.same_as} >= {"runs/r1/rows.bin"}
    wipe(profile)
    free_on(monkeypatch, {kept.parent / name: mb * 10**6 for name, mb in free.items()})
    if not linkable:
        monkeypatch.setattr(
            os, "link", Mock(side_effect=OSError(errno.EXDEV, "Invalid cross-device link"))
        )
    with pytest.raises(ArtifactError, match=refusal) if refusal else nullcontext():
        restore_backup(profile, kept, print)
    assert bool(list(profile.paths.runs.iterdir())) == (refusal is None)


def free_on(monkeypatch: pytest.MonkeyPatch, disks: dict[Path, int]) -> None:
    """A file system of its own for each of these folders, with so many bytes free."""
    mounts = sorted(disks, key=lambda mount: len(mount.parts))
    real_stat = Path.stat

    def mount_of(path: Path) -> Path | None:
        return next((mount for mount in mounts if path.is_relative_to(mount)), None)

    def status(path: Path, **options: bool) -> os.stat_result:
        real = real_stat(path, **options)
        mount = mount_of(path)
        device = mounts.index(mount) + 1 if mount else real.st_dev
        return os.stat_result([*real[:2], device, *real[3:10]], {"st_mtime_ns": real.st_mtime_ns})

    def usage(path: Path) -> Any:
        mount = mount_of(path)
        return SimpleNamespace(free=disks[mount] if mount else 10**12)

    monkeypatch.setattr(Path, "stat", status)
    monkeypatch.setattr(shutil, "disk_usage", usage)


def link(path: str) -> dict[str, Any]:
    return {"path": path, "kind": "link", "target": "/"}


@pytest.mark.parametrize(
    ("key", "added", "refusal"),
    [
        ("entries", [link("../etc/passwd")], "leads out of the backup"),
        ("entries", [link("/etc/passwd")], "leads out of the backup"),
        ("entries", [link("state")], "leads out of the backup"),
        ("entries", [link("state/way"), link("state/way")], "is in it twice"),
        ("entries", [link("state/way"), link("state/way/out")], "lies below a file or link"),
        ("folders", [{"path": "runs/latest", "mode": 0}], "is in it twice"),
        ("folders", [{"path": "runs/latest/sealed", "mode": 0}], "lies below a file or link"),
    ],
)
def test_nothing_goes_elsewhere(
    profile: Profile, kept: Path, key: str, added: list[dict[str, Any]], refusal: str
):
    make_backup(profile, kept, print)
    record = json.loads((kept / BACKUP_FILE).read_text())
    (kept / BACKUP_FILE).write_text(json.dumps(record | {key: record[key] + added}))
    with pytest.raises(ArtifactError, match=rf"`{key}.*`: .*{refusal}"):
        restore_backup(profile, kept, print, replace=True)
