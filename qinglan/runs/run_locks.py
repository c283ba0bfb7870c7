"""Who may work on what can't be shared: a tenant's refresh, and this machine's GPUs.

By file locks, because a process that is killed loses them, and because they also hold for runs that are started in a
terminal beside Prefect's worker. A concurrency limit of Prefect's knows neither: it counts a killed run for as long as
the server believes it to be at work, and it ends a run of many hours whose lease a restarted server has forgotten.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from qinglan.config import Profile, Trainer
from qinglan.errors import ConfigError, RunLockedError
from qinglan.text import duration

LOOK_EVERY_S, SAY_EVERY_S = 2.0, 600.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def refresh_lock(profile: Profile, flow_run_id: str = "") -> Iterator[None]:
    """Be the one refresh of this tenant and recipe in this folder of runs.

    Args:
        flow_run_id: the orchestrator's id of who asks. Where the orchestrator believed it dead and started it again,
            the second waits for the first.

    Raises:
        RunLockedError: another one is at work; at once, as what this one would do is being done.
    """
    what = f"{profile.tenant.file_name}.{profile.recipe_name}"
    folder = profile.paths.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / f".refresh-{what}.lock"
    with ExitStack() as stack:
        is_mine = flow_run_id and _holder(lock).endswith(flow_run_id)
        if not _take(lock, stack, flow_run_id, blocking=bool(is_mine)):
            raise RunLockedError(
                f"a refresh of {what} is at work already ({_holder(lock)}), so this one has nothing to do"
            )
        yield


@contextmanager
def device_lock(
    profile: Profile,
    say: Callable[[str], object],
    *,
    environ: Mapping[str, str] = os.environ,
    look_every_s: float = LOOK_EVERY_S,
    say_every_s: float = SAY_EVERY_S,
) -> Iterator[None]:
    """Have the GPUs that the profile's trainer uses on this machine for oneself, after waiting for whoever has them.

    A training on the CPU waits for nobody, and a Ray cluster hands out its GPUs itself.

    Raises:
        ConfigError: the folder of the locks belongs to somebody else.
    """
    with ExitStack() as stack:
        for device in _devices(profile.trainer, environ):
            lock = _device_folder() / f"gpu-{device}.lock"
            start = said_at = time.monotonic()
            is_waiting = False
            while not _take(lock, stack):
                now = time.monotonic()
                if not is_waiting or now - said_at >= say_every_s:
                    waited = f", for {duration(now - start)} so far" if is_waiting else ""
                    say(f"waiting for GPU {device} of this machine{waited}: another run has it ({_holder(lock)})")
                    is_waiting, said_at = True, now
                time.sleep(look_every_s)
        yield


def _devices(trainer: Trainer, environ: Mapping[str, str]) -> list[str]:
    """In an order that is the same for all, so that no two wait for each other."""
    if trainer.device == "cpu" or trainer.ray_dashboard_url:
        return []
    visible = [name.strip() for name in environ.get(_VISIBLE, "").split(",") if name.strip()]
    return sorted((visible or [str(number) for number in range(trainer.gpus_per_node)])[: trainer.gpus_per_node])


def _device_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"qinglan-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise ConfigError(f"{folder}: belongs to another user; remove it, or set TMPDIR to a folder of your own")
    return folder


def _take(lock: Path, stack: ExitStack, flow_run_id: str = "", *, blocking: bool = False) -> bool:
    try:
        stack.enter_context(FileLock(lock).acquire(blocking=blocking))
    except Timeout:
        return False
    who = f"process {os.getpid()} since {datetime.now(UTC).isoformat(timespec='seconds')}"
    with suppress(OSError):  # it only tells the others; a full disk must not take the turn away
        _note(lock).write_text(f"{who}, flow run {flow_run_id}" if flow_run_id else who, encoding="utf-8")
    return True


def _holder(lock: Path) -> str:
    with suppress(OSError):
        return _note(lock).read_text(encoding="utf-8", errors="replace").strip() or "it does not say who"
    return "it does not say who"


def _note(lock: Path) -> Path:
    return lock.with_suffix(".holder")
