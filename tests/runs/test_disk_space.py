"""Free disk space: what must fit before something is written, and the error where the disk is full.

A full disk stops a run with one line, also while the teacher is being asked, and it goes on once
there is space.
"""

import errno
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import asking_worker
import pytest
import yaml
from counting_teacher import CountingTeacher
from fixture_types import ProfileOf, Serve
from qinglan_process import run_qinglan
from vanishing import vanish

from qinglan.config import load_profile
from qinglan.errors import EngineError, LedgerError, StageError
from qinglan.runs.disk_space import explain_full_disk, nearest_folder, require_disk_space
from qinglan.runs.run import runs_of

DISK_MB = 64
FULL_AFTER = 120
"""Answers of the teacher before the disk is full."""


@pytest.fixture
def require(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """RL needs so many bytes in a folder; 1.5 MB are free, and 1 MB is to stay free."""
    profile = profile_of(retention={"min_free_mb": 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_500_000))

    def require_for_rl(needed_bytes: int, folder: Path = tmp_path) -> None:
        require_disk_space("rl", profile, folder, needed_bytes)

    return require_for_rl


def test_checkpoints_that_vanish(
    require: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
        (tmp_path / f"global_step_{step}" / "actor" / "shard.pt").write_bytes(b"x" * 3_000_000)
    (tmp_path / "metrics.jsonl.partial").touch()
    actor = tmp_path / "global_step_1" / "actor"
    vanish(monkeypatch, actor / "shard.pt", tmp_path / "metrics.jsonl.partial", actor)
    require(3_400_000)
    with pytest.raises(StageError, match="needs 2"):
        require(4_000_000)


def test_what_an_earlier_attempt_wrote_on_another_disk_need_not_fit_again(
    require: Callable[..., None], tmp_path: Path
):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "checkpoint").write_bytes(b"x" * 3_000_000)
    (tmp_path / "rl").symlink_to("large")
    require(3_400_000, tmp_path / "rl")
    with pytest.raises(StageError, match="needs 2"):
        require(4_000_000, tmp_path / "rl")


def test_free_space_is_that_of_the_folder_to_be_made(tmp_path: Path):
    assert nearest_folder(tmp_path / "not" / "yet") == tmp_path
    assert nearest_folder(Path("not/yet")) == Path.cwd()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/runs/x"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        LedgerError("ledger sqlite:///l.db: database or disk is full"),
        LedgerError("ledger sqlite:///l.db: disk I/O error"),
        StageError(
            "Prefect's server does not answer: Server error '500 Internal Server Error' for url …"
        ),
        EngineError("ms-swift failed", "OSError: [Errno 28] No space left on device"),
        EngineError("verl ended with status 1: what its log ends with was not written any m"),
    ],
)
def test_a_full_disk_is_one_line(
    profile_of: ProfileOf, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StageError) as caught, explain_full_disk("distill", profile_of()):
        raise error
    first = str(caught.value).splitlines()[0]
    assert first.startswith("distill: the disk is full")
    assert "`qinglan clean-up --profile test`" in first


def test_other_errors_are_left_as_they_are(profile_of: ProfileOf):
    for error in (
        OSError(errno.EACCES, "Permission denied"),
        LedgerError("l.db: disk I/O error"),
        EngineError("verl ended with status 1"),
        ValueError("No space left on it"),
    ):
        with pytest.raises(type(error)) as caught, explain_full_disk("distill", profile_of()):
            raise error
        assert caught.value is error


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path) -> None:
    with suppress(OSError), ballast.open("wb", buffering=0) as stream:
        for block in (1 << 20, 1 << 12, 1 << 8, 1):
            with suppress(OSError):
                while stream.write(b"x" * block) == block:
                    pass


@pytest.mark.slow
@pytest.mark.extended
def test_after_a_full_disk_a_refresh_pays_once(disk: Path, tmp_path: Path, serve: Serve):
    ballast = disk / "ballast"
    teacher = CountingTeacher(lambda answered: answered == FULL_AFTER and fill(ballast))
    path = tmp_path / "small.yaml"
    settings = {
        "extends": "embedded",
        "name": "small",
        "teacher": {"base_url": serve(teacher).url, "concurrency": 8},
        "embedded": {"sample_train_rows": 300, "sample_dev_rows": 30, "sample_test_rows": 30},
        "paths": {"runs": str(disk / "runs"), "state": str(disk / "state")},
        "retention": {"min_free_mb": 1},
        "distill": {"max_failed_share": 1.0},
        "validation": {"max_failed_share": 1.0},
        "select": {"min_top1_score": 0.0, "not_worse_than_original": False},
    }
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    profile = load_profile(str(path))

    stopped = run_qinglan(tmp_path, "run", "refresh", "--profile", str(path))
    assert stopped.returncode == 2, stopped.stdout + stopped.stderr
    last_line = stopped.stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: distill: the disk is full; free some space")
    assert "Traceback" not in stopped.stderr + stopped.stdout
    (run,) = runs_of(profile.paths.runs, "small")
    assert not (run / "distill" / "manifest.json").exists()
    assert not (run / "distill" / "rows.jsonl").exists()

    # Nothing was freed.
    again = run_qinglan(tmp_path, "run", "refresh", "--profile", str(path))
    assert again.returncode == 2
    assert "disk is full" in again.stderr or " free; free some space" in again.stderr
    assert "Traceback" not in again.stderr + again.stdout

    ballast.unlink()
    last = run_qinglan(tmp_path, "run", "refresh", "--profile", str(path))
    assert last.returncode == 0, last.stdout + last.stderr
    assert [folder.name for folder in runs_of(profile.paths.runs, "small")] == [run.name]
    assert asking_worker.paid(profile, run.name) == teacher.answered.total()
    assert teacher.answered.total() == len(teacher.answered), "no question was asked twice"
