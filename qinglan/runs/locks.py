"""File locks: one refresh of a tenant, one training on a GPU, one Ray that starts, and no removal
of runs being read.

They are file locks because a process that is killed loses them, and because they also hold for runs
that are started in a terminal beside Prefect's worker. A concurrency limit of Prefect's does
neither: it counts a killed run for as long as the server believes it to be running, and it ends a
run of many hours whose lease a restarted server has forgotten.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from qinglan.config import Profile
from qinglan.errors import ConfigError, RunLockedError
from qinglan.text import duration

PROBED_FOR_S = 0.5
"""Longer than `is_held` keeps a lock: try for so long to take a lock before another process counts
as its holder."""


def is_held(file: Path, *, shared: bool = False) -> bool:
    """Does a process hold this file's lock (`flock`, as `filelock` takes it too)?

    Nobody holds a file that does not exist. A lock that can't be tried counts as held, be it
    another user's file that may not be opened or a file system without locks: callers are about to
    remove or replace something, and then leave it alone. While the lock is tried, nobody else can
    take it.

    With `shared`, also those who share it hold it; a file that only another user may write then
    counts as held, too.
    """
    try:
        with file.open("r+b" if shared else "rb") as stream:
            fcntl.flock(stream, (fcntl.LOCK_EX if shared else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def require_no_process(*folders: Path, but: Path | None = None, pattern: str = "*.lock") -> None:
    """Raise `ConfigError` where a process holds a lock; one of a run too, as it writes to the state
    folder."""
    for lock in (lock for folder in folders for lock in folder.rglob(pattern)):
        if lock != but and is_held(lock):
            raise ConfigError(
                f"{lock}: a process is running there; stop `qinglan up`, `serve` and all runs first"
            )


@contextmanager
def removal_lock(runs: Path, *, exclusive: bool = False) -> Iterator[None]:
    """Keep clean-up, which takes it `exclusive`, from removing a run that another one reads without
    having named it."""
    # Sharing it takes no more than the right to read: several users may share the folder.
    lock = os.open(
        runs / ".removal.lock", os.O_CREAT | (os.O_RDWR if exclusive else os.O_RDONLY), 0o666
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)  # which releases it


@contextmanager
def refresh_lock(profile: Profile, flow_run_id: str = "") -> Iterator[None]:
    """Be the only refresh of this tenant and recipe in this folder of runs; else raise
    `RunLockedError` at once.

    Where the orchestrator believed the flow run dead and started it again, the second process waits
    for the first.
    """
    what = f"{profile.tenant.file_name}.{profile.recipe_name}"
    folder = profile.paths.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".refresh-{what}.lock"
    is_mine = bool(flow_run_id) and _holder(file).endswith(flow_run_id)
    if (lock := _take(file, flow_run_id, blocking=is_mine)) is None:
        raise RunLockedError(
            f"a refresh of {what} is running already ({_holder(file)}), so this one has nothing to do"
        )
    with lock:
        yield


@contextmanager
def device_lock(
    profile: Profile,
    say: Callable[[str], object],
    *,
    check_every_s: float = 2.0,
    report_every_s: float = 600.0,
) -> Iterator[list[str]]:
    """Have the GPUs that the profile's trainer uses on this machine to itself, after waiting for
    their holder; these.

    A training on the CPU waits for nobody, and a Ray cluster allots its GPUs itself.
    """
    trainer, devices = profile.trainer, list[str]()
    if trainer.device != "cpu" and not trainer.ray_dashboard_url:
        visible = [
            name.strip()
            for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if name.strip()
        ]
        devices = (visible or [str(number) for number in range(trainer.gpus_per_node)])[
            : trainer.gpus_per_node
        ]
    with ExitStack() as locks:
        for device in sorted(
            devices
        ):  # the same order for all, so that no two processes wait for each other
            file = _machine_folder() / f"gpu-{device}.lock"
            start = report_at = time.monotonic()
            while (lock := _take(file)) is None:
                if (now := time.monotonic()) >= report_at:
                    waited = f", for {duration(now - start)} so far" if report_at > start else ""
                    say(
                        f"waiting for GPU {device} of this machine{waited}: another run has it ({_holder(file)})"
                    )
                    report_at = now + report_every_s
                time.sleep(check_every_s)
            locks.enter_context(lock)
        yield devices


def ray_start_lock() -> FileLock:
    """Have it while a Ray starts: two that start on one machine at the same moment take each
    other's ports.

    `acquire` raises filelock's Timeout after a minute: a Ray that starts for so long hangs, and has
    taken its ports.
    """
    return FileLock(_machine_folder() / "ray-start.lock", timeout=60.0)


def _machine_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"qinglan-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise ConfigError(
            f"{folder}: belongs to another user; remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def _take(
    file: Path, flow_run_id: str = "", *, blocking: bool = False
) -> AcquireReturnProxy[FileLock] | None:
    """The lock, taken, with a note of its holder beside it; None where another process holds it."""
    try:
        lock = FileLock(file).acquire(blocking=blocking)
    except Timeout:
        return None
    holder = f"process {os.getpid()} since {datetime.now(UTC).isoformat(timespec='seconds')}"
    holder += f", flow run {flow_run_id}" if flow_run_id else ""
    with suppress(OSError):  # the note only informs others; a full disk must not cost the lock
        file.with_suffix(".holder").write_text(holder, encoding="utf-8")
    return lock


def _holder(file: Path) -> str:
    said = ""
    with suppress(OSError):
        said = file.with_suffix(".holder").read_text(encoding="utf-8", errors="replace").strip()
    return said or "it does not say who"
