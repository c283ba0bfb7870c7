"""File locks: on the refresh of a tenant, on a GPU, on the start of a Ray, on the removal of runs.

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

from qinglan.config import Profile, Trainer
from qinglan.errors import ConfigError, RunLockedError
from qinglan.text import duration

PROBED_FOR_S = 0.5
"""Longer than `is_held` keeps a lock: try for so long to take a lock before another process counts
as its holder."""
_RAY_STARTS_WITHIN_S = 60.0


def is_held(file: Path, *, shared: bool = False) -> bool:
    """Does a process hold this file's lock (`flock`, as `filelock` takes it too)?

    Nobody holds a file that does not exist. A lock that can't be tried counts as held, be it
    another user's file that may not be opened or a file system without locks: callers are about to
    remove or replace something, and then leave it alone. While the lock is tried, nobody else can
    take it.

    With `shared`, also those who share it hold it; a file that only another user may write then
    counts as held, too.
    """
    # An exclusive lock, which nobody else may share, needs a file that is open for writing.
    mode = "r+b" if shared else "rb"
    kind = fcntl.LOCK_EX if shared else fcntl.LOCK_SH
    try:
        with file.open(mode) as stream:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def require_no_process(*folders: Path, but: Path | None = None, pattern: str = "*.lock") -> None:
    """Raise `ConfigError` where a process holds a lock.

    A run's lock counts as well, as the run writes to the state folder.
    """
    for folder in folders:
        for lock in folder.rglob(pattern):
            if lock != but and is_held(lock):
                raise ConfigError(
                    f"{lock}: a process is running there; "
                    "stop `qinglan up`, `serve` and all runs first"
                )


@contextmanager
def removal_lock(runs: Path, *, exclusive: bool = False) -> Iterator[None]:
    """Keep clean-up from removing a run that another one reads without having named it.

    Clean-up takes the lock `exclusive`, who reads shares it.
    """
    # Sharing it takes no more than the right to read: several users may share the folder.
    mode = os.O_RDWR if exclusive else os.O_RDONLY
    lock = os.open(runs / ".removal.lock", os.O_CREAT | mode, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        # Closing the file releases the lock.
        os.close(lock)


@contextmanager
def refresh_lock(profile: Profile, flow_run_id: str = "") -> Iterator[None]:
    """Be the only refresh of this tenant and recipe in this folder of runs.

    Raises `RunLockedError` at once where there is another one. Where the orchestrator believed the
    flow run dead and started it again, the second process waits for the first.
    """
    what = f"{profile.tenant.file_name}.{profile.recipe_name}"
    folder = profile.paths.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f".refresh-{what}.lock"
    is_of_same_flow_run = flow_run_id != "" and _holder(file).endswith(flow_run_id)
    lock = _take(file, flow_run_id, blocking=is_of_same_flow_run)
    if lock is None:
        raise RunLockedError(
            f"a refresh of {what} is running already ({_holder(file)}), "
            "so this one has nothing to do"
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
    """Have the GPUs that the profile's trainer uses on this machine to itself; yields their names.

    Waits for their holder. A training on the CPU waits for nobody, and a Ray cluster allots its
    GPUs itself.

    Args:
        profile: its trainer says which GPUs are used.
        say: gets a line when the wait begins, and later now and then.
        check_every_s: pause between two tries.
        report_every_s: pause between two lines.
    """
    devices = _local_gpus(profile.trainer)
    with ExitStack() as locks:
        # The same order for all, so that no two processes wait for each other.
        for device in sorted(devices):
            locks.enter_context(_wait_for_gpu(device, say, check_every_s, report_every_s))
        yield devices


def _local_gpus(trainer: Trainer) -> list[str]:
    """The numbers of the GPUs of this machine that the trainer uses, as CUDA names them."""
    if trainer.device == "cpu" or trainer.ray_dashboard_url:
        return []
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [name.strip() for name in names if name.strip()]
    if not visible:
        visible = list(map(str, range(trainer.gpus_per_node)))
    return visible[: trainer.gpus_per_node]


def _wait_for_gpu(
    device: str, say: Callable[[str], object], check_every_s: float, report_every_s: float
) -> AcquireReturnProxy[FileLock]:
    file = _machine_folder() / f"gpu-{device}.lock"
    start_s = time.monotonic()
    report_at_s = start_s
    while True:
        lock = _take(file)
        if lock is not None:
            return lock
        now_s = time.monotonic()
        if now_s >= report_at_s:
            is_first_report = report_at_s == start_s
            waited = "" if is_first_report else f", for {duration(now_s - start_s)} so far"
            say(
                f"waiting for GPU {device} of this machine{waited}: "
                f"another run has it ({_holder(file)})"
            )
            report_at_s = now_s + report_every_s
        time.sleep(check_every_s)


def ray_start_lock() -> FileLock:
    """Have it while a Ray starts.

    Two that start on one machine at the same moment take each other's ports. `acquire` raises
    filelock's Timeout after a minute: a Ray that starts for so long hangs, and has taken its ports.
    """
    return FileLock(_machine_folder() / "ray-start.lock", timeout=_RAY_STARTS_WITHIN_S)


def _machine_folder() -> Path:
    """This user's folder for locks that hold for the whole machine."""
    folder = Path(tempfile.gettempdir()) / f"qinglan-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Anybody may make a folder of this name before us.
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
    if flow_run_id:
        holder += f", flow run {flow_run_id}"
    # The note only informs others; a full disk must not cost the lock.
    with suppress(OSError):
        file.with_suffix(".holder").write_text(holder, encoding="utf-8")
    return lock


def _holder(file: Path) -> str:
    """The note of a lock's holder."""
    holder = ""
    with suppress(OSError):
        holder = file.with_suffix(".holder").read_text(encoding="utf-8", errors="replace").strip()
    return holder or "it does not say who"
