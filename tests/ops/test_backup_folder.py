"""Backup and restore on plain files and SQLite databases."""

import errno
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.ops.backup import BACKUP_FILE, Backup, make_backup, restore_backup
from qinglan.ops.backup.records import BackupEntry
from qinglan.ops.up.lock import only_one

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
    assert sorted(each.name for each in state.iterdir()) == ["datasets", "ledger.db", "prefect", "up.lock"]


def test_a_checkpoint_comes_back_whole(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    rl = profile.paths.runs / "r1" / "rl" / "checkpoints"
    names = [f"global_step_10/{part}/huggingface/{file}" for part in ("actor", "critic") for file in _OF_A_MODEL]
    names += ["latest_checkpointed_iteration.txt", "global_step_10/data.pt", "global_step_10/actor/fsdp_config.json"]
    names += ["global_step_10/actor/model_world_size_1_rank_0.pt", "global_step_10/actor/lora_train_meta.json"]
    for name in names:
        (rl / name).parent.mkdir(parents=True, exist_ok=True)
        (rl / name).write_text(name)
    make_backup(profile, tmp_path / "kept", quiet)
    wipe(profile)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert {str(path.relative_to(rl)) for path in rl.rglob("*") if path.is_file()} == set(names)
    assert all((rl / name).read_text() == name for name in names)


_OF_A_MODEL = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("state/huggingface", "a cache of models from the hub"),
        ("state/cache", "a cache of models from the hub"),  # HF_HOME
        ("state/mlartifacts/huggingface", None),
        ("state/models/m/huggingface", None),
        ("runs/huggingface", None),
        ("state/datasets/t.q/.partial-ab", "unfinished"),
        ("state/models/m/.partial-2", "unfinished"),
        ("runs/r1/sft/.partial-ab", None),
        ("runs/.removing-r2", "being removed"),
        ("state/datasets/t.q/.removing-ab", "being removed"),
        ("runs/r1/sft/.removing-ab", None),
        ("runs/.restoring", "of an interrupted restore"),
        ("runs/r1/.restoring", None),
        ("state/.replaced-1", "put aside by a restore"),
        ("state/mlartifacts/.replaced-1", None),
    ],
)
def test_a_folder_is_left_out_by_its_place_and_not_by_its_name(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, reason: str | None
):
    monkeypatch.setenv("HF_HOME", str(profile.paths.state / "cache"))
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "file").touch()
    made = make_backup(profile, tmp_path / "kept", quiet)
    assert {each.path: each.reason for each in made.left_out}.get(folder) == reason
    assert (tmp_path / "kept" / folder / "file").exists() == (reason is None)


def test_a_file_is_left_out_only_for_what_it_is(profile: Profile, tmp_path: Path):
    contents = {"requirements.lock": "a==1", "notes": "n", "notes-journal": "n", "prefect_api_url": "u"}
    for name, content in contents.items():
        (profile.paths.runs / "r1" / name).write_text(content)
    (profile.paths.runs / "r1" / ".lock").touch()
    made = make_backup(profile, tmp_path / "kept", quiet)
    assert {f"runs/r1/{name}" for name in contents} <= {entry.path for entry in made.entries}
    assert {each.path: each.reason for each in made.left_out}["runs/r1/.lock"] == "a lock"


def test_folders_keep_who_may_enter_them_and_empty_ones_come_back(profile: Profile, tmp_path: Path):
    state = profile.paths.state
    modes = {state: 0o750, state / "serving" / "requests": 0o700, state / "empty": 0o2775, state / "sealed": 0o500}
    for folder in modes:
        folder.mkdir(parents=True, exist_ok=True)
    (state / "sealed" / "a").write_text("a")
    for folder, mode in modes.items():
        folder.chmod(mode)
    make_backup(profile, tmp_path / "kept", quiet)
    (state / "sealed").chmod(0o700)
    wipe(profile)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert {folder: folder.stat().st_mode & 0o7777 for folder in modes} == modes
    assert (state / "sealed" / "a").read_text() == "a"


def test_nobody_else_may_enter_before_all_is_in_place(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    profile.paths.state.chmod(0o755)
    make_backup(profile, tmp_path / "kept", quiet)
    wipe(profile)
    seen, copy = set[int](), shutil.copy2

    def look(source: Path, target: Path) -> None:
        copy(source, target)
        for root in (profile.paths.state, profile.paths.runs):
            seen.add(root.stat().st_mode & 0o777)
            seen.update(each.stat().st_mode & 0o777 for each in (root / ".restoring").rglob("*/"))

    monkeypatch.setattr(shutil, "copy2", look)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert seen == {0o700}
    assert profile.paths.state.stat().st_mode & 0o777 == 0o755


def test_a_restore_after_one_without_room_gives_the_roots_their_modes(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    profile.paths.runs.chmod(0o2775)
    make_backup(profile, tmp_path / "kept", quiet)
    wipe(profile)
    with monkeypatch.context() as full, pytest.raises(ArtifactError, match="free disk space first"):
        full.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
        restore_backup(profile, tmp_path / "kept", quiet)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert profile.paths.runs.stat().st_mode & 0o7777 == 0o2775


def test_a_root_that_is_there_stays_its_owners(profile: Profile, tmp_path: Path):
    profile.paths.state.chmod(0o755)
    make_backup(profile, tmp_path / "kept", quiet)
    wipe(profile)
    profile.paths.state.mkdir()
    profile.paths.state.chmod(0o710)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert profile.paths.state.stat().st_mode & 0o777 == 0o710


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


@pytest.mark.parametrize("uri", ["postgresql://u:p@s:3cret@host/db", "postgresql://u:pa@s3cret@host/db"])
def test_an_address_that_cannot_be_taken_apart_is_not_shown(profile: Profile, tmp_path: Path, uri: str):
    tracked = profile.model_copy(update={"tracking": profile.tracking.model_copy(update={"uri": uri})})
    made = make_backup(tracked, tmp_path / "kept", quiet)
    assert made.elsewhere == [
        "MLflow, at the address in tracking.uri: its database with `pg_dump -Fc`, and its artifact store"
    ]


@pytest.mark.parametrize(
    ("url", "is_up", "told"),
    [
        ("http://127.0.0.1:4200/api", True, None),
        ("http://localhost:4200/api", True, None),
        ("http://127.0.0.1:4200/api", False, "`pg_dump -Fc`, unless it is `qinglan up`'s own"),
        (
            "https://ann:s3cret@prefect.example/api",
            True,
            "https://prefect.example/api: its database with `pg_d",
        ),
    ],
)
def test_the_sites_own_server_is_not_somewhere_else(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, is_up: bool, told: str | None
):
    monkeypatch.setenv("PREFECT_API_URL", url)
    (profile.paths.state / "prefect" / "prefect.db").touch()
    with only_one(profile.paths.state, quiet) if is_up else nullcontext():
        made = make_backup(profile, tmp_path / "kept", quiet)
    assert [told in line for line in made.elsewhere] == [True] if told else made.elsewhere == []
    assert "s3cret" not in str(made.elsewhere)


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
        pytest.raises(ConfigError, match=r"r1/\.lock: a process is running there"),
    ):
        restore_backup(profile, tmp_path / "kept", quiet, replace=True)


def test_runs_at_work_are_looked_for_also_where_the_backup_has_none(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet, runs=False)
    with (
        FileLock(profile.paths.runs / "r1" / ".lock"),
        pytest.raises(ConfigError, match=r"r1/\.lock: a process is running there"),
    ):
        restore_backup(profile, tmp_path / "kept", quiet, replace=True)


def test_what_begins_during_a_restore_is_seen_and_no_up_can_begin(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_backup(profile, tmp_path / "kept", quiet)
    begun, copy = FileLock(profile.paths.runs / "r1" / ".lock"), shutil.copy2

    def begin(source: Path, target: Path) -> None:
        begun.acquire()
        with pytest.raises(ConfigError, match="runs here already"), only_one(profile.paths.state, quiet):
            pass
        copy(source, target)

    monkeypatch.setattr(shutil, "copy2", begin)
    (profile.paths.state / "newer").touch()
    with pytest.raises(ConfigError, match=r"r1/\.lock: a process is running there"):
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


def test_runs_deep_below_the_state_folder_come_back_beside_what_lies_on_the_way(profile_of: ProfileOf, tmp_path: Path):
    site = tmp_path / "site"
    profile = profile_of(paths={"state": str(site), "runs": str(site / "data" / "runs")})
    (profile.paths.runs / "r1").mkdir(parents=True)
    (site / "data" / "note").write_text("kept")
    make_backup(profile, tmp_path / "kept", quiet)
    with pytest.raises(ConfigError, match="is not empty"):
        restore_backup(profile, tmp_path / "kept", quiet)
    (site / "data" / "note").write_text("newer")
    restore_backup(profile, tmp_path / "kept", quiet, replace=True)
    assert (site / "data" / "note").read_text() == "kept"
    assert [path.read_text() for path in site.glob(".replaced-*/data/note")] == ["newer"]
    shutil.rmtree(site)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert (site / "data" / "note").read_text() == "kept"
    assert (profile.paths.runs / "r1").is_dir()


def test_a_backup_goes_neither_into_the_site_nor_over_something(profile: Profile, tmp_path: Path):
    for root in (profile.paths.state, profile.paths.runs):
        with pytest.raises(ConfigError, match="is itself to be kept; name a folder elsewhere"):
            make_backup(profile, root / "kept", quiet, runs=False)
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
    assert made.reasons["removed before it could be copied"] == 1
    assert "runs/r1/run.json" not in {entry.path for entry in made.entries}


def test_a_run_that_a_clean_up_takes_meanwhile_does_not_come_back_empty(profile: Profile, tmp_path: Path):
    doomed = profile.paths.runs / "r0"
    doomed.mkdir()
    (doomed / "run.json").touch()

    def take(_: str) -> None:
        doomed.rename(doomed.with_name(".removing-r0"))

    made = make_backup(profile, tmp_path / "kept", take)
    assert made.reasons["removed before it could be copied"] == 1
    wipe(profile)
    restore_backup(profile, tmp_path / "kept", quiet)
    assert sorted(each.name for each in profile.paths.runs.iterdir()) == ["latest", "r1"]


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


def test_a_disk_that_is_too_small_is_reported_first(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ArtifactError, match="has 0 B free, the backup takes"):
        make_backup(profile, tmp_path / "kept", quiet)
    assert not (tmp_path / "kept").exists()


def test_a_file_with_two_names_needs_room_once(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = profile.paths.runs / "r1" / "dataset" / "rows.jsonl"
    rows.chmod(0o644)
    rows.write_bytes(b"x" * 40_000_000)  # `datasets/v1` has it as well
    free_on(monkeypatch, {tmp_path: 100_000_000})
    said: list[str] = []
    make_backup(profile, tmp_path / "kept", said.append)
    assert "40.0 MB" in said[0]


@pytest.mark.parametrize(
    ("free", "linkable", "refusal"),
    [
        ({"state": 100, "runs": 180}, False, None),
        ({"state": 80, "runs": 180}, False, r"^\S+/state: has 80\.0 MB free, what the backup has of it takes 40\.0 MB"),
        ({"state": 100, "runs": 160}, False, r"^\S+/runs: has 160 MB free, what the backup has of it takes 120 MB"),
        ({"": 180}, True, None),
        ({"": 160}, True, r"^\S+/state and \S+/runs: has 160 MB free, what the backup has of it takes 120 MB"),
        ({"": 220}, False, None),
        ({"": 200}, False, r"^\S+/state and \S+/runs: has 200 MB free, what the backup has of it takes 160 MB"),
    ],
)
def test_each_disk_is_asked_for_what_comes_onto_it(
    profile: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: dict[str, int],
    linkable: bool,
    refusal: str | None,
):
    run = profile.paths.runs / "r1"
    (run / "model.bin").write_bytes(b"x" * 80_000_000)
    (run / "rows.bin").write_bytes(b"x" * 40_000_000)
    os.link(run / "rows.bin", profile.paths.state / "rows.bin")
    made = make_backup(profile, tmp_path / "kept", quiet)
    assert {entry.path for entry in made.entries if entry.same_as} >= {"runs/r1/rows.bin"}
    wipe(profile)
    free_on(monkeypatch, {tmp_path / name: mb * 10**6 for name, mb in free.items()})
    if not linkable:
        monkeypatch.setattr(os, "link", not_here)
    if refusal is None:
        restore_backup(profile, tmp_path / "kept", quiet)
        return
    with pytest.raises(ArtifactError, match=refusal):
        restore_backup(profile, tmp_path / "kept", quiet)
    assert not list(profile.paths.runs.iterdir())


def not_here(*_: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def free_on(monkeypatch: pytest.MonkeyPatch, disks: dict[Path, int]) -> None:
    """A file system of its own for each of these folders, with so many bytes free."""
    mounts, stat = sorted(disks, key=lambda mount: len(mount.parts)), Path.stat

    def mount_of(path: Path) -> Path | None:
        return next((mount for mount in mounts if path.is_relative_to(mount)), None)

    def status(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        device = mounts.index(mount) + 1 if (mount := mount_of(path)) else found.st_dev
        return os.stat_result([*found[:2], device, *found[3:10]], {"st_mtime_ns": found.st_mtime_ns})

    def usage(path: Path) -> Any:
        free = disks[mount] if (mount := mount_of(path)) else 10**12
        return shutil._ntuple_diskusage(10**12, 10**12 - free, free)

    monkeypatch.setattr(Path, "stat", status)
    monkeypatch.setattr(shutil, "disk_usage", usage)


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
        BackupEntry(path=path, kind="file")


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


def test_no_folder_is_below_a_link(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet)
    file = tmp_path / "kept" / BACKUP_FILE
    told = json.loads(file.read_text())
    told["folders"].append({"path": "runs/latest/sealed", "mode": 0})
    file.write_text(json.dumps(told))
    with pytest.raises(ArtifactError, match=r"`folders`: .*lies below a file or link"):
        restore_backup(profile, tmp_path / "kept", quiet, replace=True)


def test_a_backup_of_the_first_format_is_read(tmp_path: Path):
    shutil.copy(Path(__file__).parents[1] / "runs" / "golden" / "v1" / "site" / BACKUP_FILE, tmp_path)
    read = Backup.read(tmp_path)
    assert {entry.kind for entry in read.entries} == {"file", "database", "link"}
    assert {folder.path: folder.mode for folder in read.folders}["state/serving/requests"] == 0o700
    read.write(tmp_path)
    assert Backup.read(tmp_path) == read


def test_a_newer_backup_is_refused(profile: Profile, tmp_path: Path):
    make_backup(profile, tmp_path / "kept", quiet)
    file = tmp_path / "kept" / BACKUP_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 2}))
    with pytest.raises(ArtifactError, match="written by a newer Qinglan"):
        restore_backup(profile, tmp_path / "kept", quiet)
