"""Free disk space: what must fit before something is written, and the error where the disk is full."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vanishing import vanish

from qinglan.config import Profile
from qinglan.errors import EngineError, LedgerError, StageError
from qinglan.runs.disk_space import explain_full_disk, nearest_folder, require_disk_space

ProfileOf = Callable[..., Profile]


@pytest.fixture
def require(profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """RL needs so many bytes in a folder; 1.5 MB are free, and 1 MB is to stay free."""
    profile = profile_of(retention={"min_free_mb": 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1_500_000, 1_500_000))
    return lambda needed_bytes, folder=tmp_path: require_disk_space("rl", profile, folder, needed_bytes)


def test_too_little_space_is_one_line_with_a_hint(require: Callable[..., None], tmp_path: Path):
    require(400_000)
    with pytest.raises(StageError) as caught:
        require(70_000_000_000)
    assert str(caught.value) == (
        f"rl: needs 70.0 GB and {tmp_path} has 1.5 MB free; free some space, such as by "
        "`qinglan clean-up --profile test`, and run again: it goes on from here"
    )


def test_checkpoints_that_go_while_they_are_counted_are_not_counted(
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


def test_what_an_earlier_attempt_wrote_on_another_disk_need_not_fit_again(require: Callable[..., None], tmp_path: Path):
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
        EngineError("ms-swift failed\nOSError: [Errno 28] No space left on device"),
    ],
)
def test_a_full_disk_is_one_line(profile_of: ProfileOf, error: Exception):
    with pytest.raises(StageError) as caught, explain_full_disk("distill", profile_of()):
        raise error
    first = str(caught.value).splitlines()[0]
    assert first.startswith("distill: the disk is full")
    assert "`qinglan clean-up --profile test`" in first


def test_other_errors_are_left_as_they_are(profile_of: ProfileOf):
    for error in (OSError(errno.EACCES, "Permission denied"), LedgerError("away"), ValueError("No space left on it")):
        with pytest.raises(type(error)) as caught, explain_full_disk("distill", profile_of()):
            raise error
        assert caught.value is error
