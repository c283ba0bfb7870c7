"""Whether a lock is held, and what that means to those who ask."""

import errno
import fcntl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest
from filelock import FileLock

from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.ops.backup import restoring
from qinglan.ops.cleanup.folders import remove_logs
from qinglan.ops.prefect.server import LOCK_FILE, SERVER_FILE, announced_url
from qinglan.runs.locks import is_held
from qinglan.runs.run import is_running

ProfileOf = Callable[..., Profile]


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / ".lock"
    file.touch()
    return file


def test_a_lock_is_held_for_as_long_as_somebody_has_it(lock: Path):
    assert not is_held(lock) and not is_held(lock, shared=True)
    with FileLock(lock):
        assert is_held(lock) and is_held(lock, shared=True)
    with lock.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        assert is_held(lock, shared=True)
        assert not is_held(lock)  # somebody else who only checks
    missing = lock.parent / "missing" / ".lock"
    assert not is_held(missing) and not missing.parent.exists()


def test_a_run_whose_lock_is_another_users_to_write_counts_as_at_work(lock: Path, monkeypatch: pytest.MonkeyPatch):
    opened = Path.open

    def read_only(path: Path, mode: str = "r", **options: Any) -> IO[Any]:  # root may write to all of them
        if "+" in mode:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, **options)

    assert not is_running(lock.parent)
    monkeypatch.setattr(Path, "open", read_only)
    assert is_running(lock.parent)
    assert not is_held(lock)


def no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with another user's files; root may open all of them."""
    opened = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> IO[Any]:
        if "lock" in path.name or "log" in path.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network mounts."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("trouble", [no_permission, no_locks])
def test_what_cannot_be_tried_is_left_alone_by_all_who_ask(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[pytest.MonkeyPatch], None]
):
    profile = profile_of(retention={"log_days": 0})
    state, run = profile.paths.state, profile.paths.runs / "20260101-000000-0001"
    for folder in (state / "logs", run):
        folder.mkdir(parents=True)
    for file in (state / LOCK_FILE, state / "logs" / "worker.log", run / ".lock"):
        file.touch()
    (state / SERVER_FILE).write_text("http://127.0.0.1:4200/api")
    assert announced_url(state) is None
    assert not is_running(run)
    with monkeypatch.context() as patch:
        trouble(patch)
        assert announced_url(state) == "http://127.0.0.1:4200/api"
        assert is_running(run)
        assert not list(remove_logs(profile, datetime.now(UTC), dry_run=False))
        with pytest.raises(ConfigError, match="a process is running there"):
            restoring.require_no_process(profile.paths.runs)
    assert [each.name for each in remove_logs(profile, datetime.now(UTC), dry_run=False)] == ["worker.log"]
    restoring.require_no_process(profile.paths.runs)
