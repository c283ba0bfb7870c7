"""Locks: held or not, and what follows; one refresh of a tenant, one training on a GPU."""

import errno
import fcntl
import logging
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import pytest
from another_process import another_process
from doubles import raising
from filelock import FileLock
from fixture_types import ProfileOf
from prefect.states import Completed

from qinglan.config import Profile
from qinglan.errors import ConfigError, RunLockedError
from qinglan.ops.cleanup.folders import remove_logs
from qinglan.ops.cleanup.records import CleanUp
from qinglan.ops.prefect.server import LOCK_FILE, SERVER_FILE, announced_url
from qinglan.runs.locks import device_lock, is_held, refresh_lock, require_no_process
from qinglan.runs.run import is_running
from qinglan.tasks.session import SKIPPED, skip_if_running, unless_skipped

CUDA = {"device": "cuda", "gpus_per_node": 2}


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_same_flow_run_started_twice_waits_for_itself(profile: Profile):
    order: list[str] = []

    def second() -> None:
        with refresh_lock(profile, "run-1"):
            order.append("second")

    with refresh_lock(profile, "run-1"):
        waiting = threading.Thread(target=second)
        waiting.start()
        with pytest.raises(RunLockedError, match="flow run run-1"):
            refresh_lock(profile, "run-2").__enter__()
        waiting.join(0.3)
        order.append("first")
    waiting.join(20)
    assert order == ["first", "second"]


def test_a_second_refresh_ends_at_once_and_says_who_is_at_work(profile: Profile):
    with another_process("refresh", profile) as (process, _):
        problem = rf"default\.query_rewrite is running already \(process {process.pid} since"
        with pytest.raises(RunLockedError, match=problem):
            refresh_lock(profile).__enter__()
        # By signal 9: nothing of it can tidy up.
        process.kill()
        process.wait()
        with refresh_lock(profile):
            pass


def test_refreshes_of_others_go_on_beside_it(profile_of: ProfileOf, tmp_path: Path):
    elsewhere = {"runs": str(tmp_path / "other"), "state": str(tmp_path / "state")}
    profiles = (
        profile_of(tenant={"id": "b"}),
        profile_of(recipe="medical"),
        profile_of(paths=elsewhere),
    )
    with refresh_lock(profile_of()):
        for profile in profiles:
            with refresh_lock(profile):
                pass


def test_a_training_waits_for_the_gpu_until_its_holder_is_killed(profile_of: ProfileOf):
    profile = profile_of(trainer=CUDA)
    lines: list[str] = []
    with another_process("device", profile) as (holder, _):

        def say(line: str) -> None:
            lines.append(line)
            if len(lines) == 2:
                holder.kill()

        with device_lock(profile, say, check_every_s=0.02, report_every_s=0.1):
            assert holder.wait() < 0
    assert lines[0].startswith("waiting for GPU 0 of this machine: another run has it (process ")
    assert "so far" in lines[1]


def test_other_gpus_are_free(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    on_one_gpu = profile_of(trainer=CUDA | {"gpus_per_node": 1})
    with ExitStack() as locks:
        for visible in ("3,1", "1,3", ""):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            locks.enter_context(device_lock(on_one_gpu, pytest.fail))
        locked = sorted(path.stem for path in tmp_path.glob("qinglan-*/*.lock"))
        assert locked == ["gpu-0", "gpu-1", "gpu-3"]


@pytest.mark.parametrize(
    "trainer", [{"device": "cpu"}, CUDA | {"ray_dashboard_url": "http://127.0.0.1:8265"}]
)
def test_neither_the_cpu_nor_a_cluster_is_waited_for(
    profile_of: ProfileOf, trainer: dict[str, object]
):
    profile = profile_of(trainer=trainer)
    with device_lock(profile, pytest.fail), device_lock(profile, pytest.fail):
        assert not list(Path(tempfile.gettempdir()).glob("qinglan-*"))


def test_a_folder_of_somebody_else_is_not_used(
    profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    temporary = Path(tempfile.gettempdir())
    another_user = 0 if temporary.stat().st_uid else 12345
    monkeypatch.setattr("os.getuid", lambda: another_user)
    (temporary / f"qinglan-{another_user}").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match="belongs to another user"):
        device_lock(profile_of(trainer=CUDA), print).__enter__()


def test_a_refresh_that_is_not_needed_is_skipped_and_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("qinglan.tasks.session.get_run_logger", lambda: logging.getLogger("flow"))

    def refresh(profile: str) -> Path:
        raise RunLockedError(f"{profile} is running")

    state = skip_if_running(refresh)("a")
    assert (state.name, state.type, state.message) == (SKIPPED, "COMPLETED", "a is running")
    assert skip_if_running(refresh).__name__ == "refresh"
    with pytest.raises(RunLockedError, match="a is running"):
        unless_skipped(state)
    assert unless_skipped(Completed(data=Path("report.json"))) == Path("report.json")


def test_a_lock_is_held_for_as_long_as_somebody_has_it(tmp_path: Path):
    lock = tmp_path / ".lock"
    lock.touch()
    assert not is_held(lock)
    assert not is_held(lock, shared=True)
    with FileLock(lock):
        assert is_held(lock)
        assert is_held(lock, shared=True)
    with lock.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        assert is_held(lock, shared=True)
        # The other one only checks, too.
        assert not is_held(lock)
    nowhere = lock.parent / "nowhere" / ".lock"
    assert not is_held(nowhere)
    assert not nowhere.parent.exists()


def no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to open them, as other users' files; root may open all of those."""
    real_open = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> IO[Any]:
        if "lock" in path.name or "log" in path.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to take them, as some network mounts do."""
    monkeypatch.setattr(fcntl, "flock", raising(OSError(errno.ENOLCK, "No locks available")))


@pytest.mark.parametrize("trouble", [no_permission, no_locks])
def test_what_cannot_be_tried_is_left_alone_by_all_who_ask(
    profile_of: ProfileOf,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[pytest.MonkeyPatch], None],
):
    profile = profile_of(retention={"log_days": 0})
    state = profile.paths.state
    run = profile.paths.runs / "20260101-000000-0001"
    for folder in (state / "logs", run):
        folder.mkdir(parents=True)
    for file in (state / LOCK_FILE, state / "logs" / "worker.log", run / ".lock"):
        file.touch()
    (state / SERVER_FILE).write_text("http://127.0.0.1:4200/api")
    assert announced_url(state) is None
    assert not is_running(run)
    clean = CleanUp(profile, dry_run=False, say=print, now=datetime.now(UTC))
    with monkeypatch.context() as patch:
        trouble(patch)
        assert announced_url(state) == "http://127.0.0.1:4200/api"
        assert is_running(run)
        remove_logs(clean)
        assert not clean.removed
        with pytest.raises(ConfigError, match="a process is running there"):
            require_no_process(profile.paths.runs)
    remove_logs(clean)
    assert [removed.name for removed in clean.removed] == ["worker.log"]
    require_no_process(profile.paths.runs)
