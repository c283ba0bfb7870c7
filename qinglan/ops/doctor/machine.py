"""This machine: Python and packages, folders, disk space, memory, locks, limits."""

import codecs
import fcntl
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import qinglan
from qinglan.config import FlowName, Profile
from qinglan.errors import QinglanError
from qinglan.ops.checks import Check
from qinglan.ops.preflight.asked_services import ENGINE_FLOWS, TRAINING_FLOWS, asked_endpoints
from qinglan.runs.disk_space import nearest_folder
from qinglan.text import size, some
from qinglan.training.disk_space import ModelSize, needed_bytes

LOCK = Path(qinglan.__file__).parents[1] / "requirements.lock"
"""The versions that the tests ran with; an installed wheel has no such file."""
_HINT = "run `make setup`, or install Qinglan anew in this environment"
GB = 10**9
_LOW_FREE_BYTES = 2 * GB  # so little beside what is needed is worth a word
_MIN_FREE_FILES = 10_000
_CPU_TRAINING_BYTES = 5 * GB  # verl and Ray with the embedded model, measured: 5 to 6 GB
_FLOW_BYTES = 1 * GB  # a flow that starts no engine here: Prefect, MLflow's client, its rows
_OWN_FILES, _MANY_FILES = 256, 65_536
_SHARED_KINDS = (
    "nfs",
    "cifs",
    "smb",
    "fuse.sshfs",
    "lustre",
    "beegfs",
    "gpfs",
    "ceph",
    "gluster",
    "9p",
)
_CGROUP = Path("/sys/fs/cgroup")
_LOCKS = {"flock": fcntl.flock, "lockf": fcntl.lockf}  # filelock's, and SQLite's
# Another process tries to take what this one holds, and says what it was given.
_TRY_LOCKS = """
import fcntl, sys
for name, path in zip(sys.argv[1::2], sys.argv[2::2]):
    with open(path, "a") as file:
        try:
            getattr(fcntl, name)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        print(name)
"""


def installed(name: str) -> Version | None:
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


def check_python() -> Check:
    wanted, found = metadata("qinglan")["Requires-Python"], platform.python_version()
    if SpecifierSet(wanted).contains(found, prereleases=True):
        return Check("python", found)
    return Check(
        "python",
        found,
        f"python: this is {found}, Qinglan needs {wanted}; make the environment with another",
    )


def check_packages(profile: Profile, flow: FlowName) -> Check:
    """What Qinglan needs here, with what it was tested with beside it."""
    trainer = profile.trainer
    extra = (
        "trainer"
        if flow in ENGINE_FLOWS and not (trainer.python or trainer.ray_dashboard_url)
        else ""
    )
    known = [Requirement(text) for text in requires("qinglan") or ()]
    needed = [
        each for each in known if each.marker is None or each.marker.evaluate({"extra": extra})
    ]
    locked = LOCK.read_text(encoding="utf-8").splitlines() if LOCK.is_file() else ()
    pins = (line.partition("==") for line in locked if "==" in line)
    tested = {canonicalize_name(name): pinned.split()[0] for name, _, pinned in pins}
    detail, wrong, others = (
        f"qinglan {installed('qinglan')}, {len(needed)} packages that it needs",
        [],
        [],
    )
    for each in needed:
        found, pinned = installed(each.name), tested.get(canonicalize_name(each.name))
        if found is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(found, prereleases=True):
            wrong.append(f"{each.name} is {found}, needed is {each.specifier}")
        elif pinned and found.public != pinned:
            others.append(f"{each.name} {found} (tested with {pinned})")
    if wrong:
        return Check("packages", detail, f"packages: {some(wrong)}; {_HINT}")
    if not tested:
        return Check(
            "packages",
            f"{detail}; tested versions are not known, as requirements.lock is only in a checkout",
        )
    return Check(
        "packages",
        detail,
        note=f"{some(others)}; {_HINT} to have those of the lock" if others else None,
    )


def check_text() -> Check:
    """Can Chinese be printed, and stand in a file's name?"""
    used = {
        "output": getattr(sys.stdout, "encoding", None) or "utf-8",
        "file names": sys.getfilesystemencoding(),
    }
    if wrong := [
        f"{what} as {how}" for what, how in used.items() if codecs.lookup(how).name != "utf-8"
    ]:
        return Check(
            "text",
            "",
            f"text: {' and '.join(wrong)}, which has no Chinese; export LANG=C.UTF-8 PYTHONUTF8=1",
        )
    return Check("text", "UTF-8")


def check_folders(profile: Profile) -> Check:
    folders, wrong = _folders(profile), []
    for key, folder in folders.items():
        place = nearest_folder(folder)
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"\0")
        except OSError as error:
            wrong.append(f"{key}: {place} can't be written to: {error.strerror}")
    hint = "give this user write access, or name another folder"
    return Check(
        "folders",
        ", ".join(map(str, folders.values())),
        f"{'; '.join(wrong)}; {hint}" if wrong else None,
    )


def check_disk(profile: Profile, flow: FlowName) -> Check:
    floor = profile.retention.min_free_mb * 10**6
    try:
        runs = needed_bytes(profile, flow)
    except (QinglanError, ValueError):  # a model that can't be read: its own check says so
        runs = floor
    needed = {
        "paths.runs": runs,
        "paths.state": floor,
        "TMPDIR": 1 * GB,
    }  # for temporary files: Ray's among them
    detail, full, low = [], [], []
    file_systems: dict[int, dict[str, Path]] = defaultdict(dict)
    for key, place in ((key, nearest_folder(folder)) for key, folder in _folders(profile).items()):
        file_systems[place.stat().st_dev][key] = place
    for places in file_systems.values():
        names, place = ", ".join(places), next(iter(places.values()))
        free, files, wanted = (
            shutil.disk_usage(place).free,
            os.statvfs(place),
            max(needed[key] for key in places),
        )
        detail.append(f"{names} {size(free)} free")
        if free < wanted:
            full.append(f"{names} ({place}): {size(free)} free, needed are {size(wanted)}")
        elif free < wanted + _LOW_FREE_BYTES:
            low.append(
                f"{names} ({place}): only {size(free)} free, of which {size(wanted)} are needed"
            )
        if files.f_files and files.f_favail < _MIN_FREE_FILES:
            full.append(f"{names} ({place}): space for {files.f_favail} more files only (df -i)")
    hint = f"free disk space, such as by `qinglan clean-up --profile {profile.name}`, or name a larger disk"
    problem = f"disk: {'; '.join(full)}; {hint}" if full else None
    return Check("disk", ", ".join(detail), problem, f"{'; '.join(low)}; {hint}" if low else None)


def check_memory(profile: Profile, flow: FlowName) -> Check:
    total, available = memory_bytes()
    detail = f"{size(available)} of {size(total)} available"
    needed, what = needed_memory_bytes(profile, flow)
    if needed is None:
        return Check(
            "memory",
            f"{detail}; what {what} takes is not known from its name, see docs/how-to/gpus.md",
        )
    if total < needed:
        wrong = (
            f"memory: this machine or container has {size(total)}, and {what} takes {size(needed)}"
        )
        hint = "use a larger one, or train on a cluster (trainer.ray_dashboard_url)"
        return Check("memory", detail, f"{wrong}; {hint}")
    note = (
        f"{what} takes {size(needed)}; end what else runs here first"
        if available < needed
        else None
    )
    return Check("memory", detail, note=note)


def memory_bytes() -> tuple[int, int]:
    """Of this machine, or of the container where that has less: all, and what is available."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        kept = dict(
            line.split()
            for line in (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        )
    except (OSError, ValueError):  # no cgroup of version 2, or `max`
        return total, available
    cache = int(kept.get("inactive_file", 0))
    return min(total, limit), max(0, min(available, limit - used + cache))


def needed_memory_bytes(profile: Profile, flow: FlowName) -> tuple[int | None, str]:
    """At least, and for what; None where the model's size is not known."""
    trainer, model = profile.trainer, profile.student.base_model
    on_cpu = trainer.device == "cpu"
    if (
        flow not in ENGINE_FLOWS
        or trainer.ray_dashboard_url
        or (on_cpu and flow not in TRAINING_FLOWS)
    ):
        return _FLOW_BYTES, "a flow"
    if on_cpu:
        return _CPU_TRAINING_BYTES, "training on the CPU"
    weights = None
    with suppress(ValueError):
        weights = ModelSize.of(model)
    if weights is None:
        return None, model
    copies = trainer.gpus_per_node // profile.rl.tensor_model_parallel_size
    # verl loads the policy whole once, in fp32; a sleeping vLLM keeps its weights in the host's
    # memory.
    return _FLOW_BYTES + max(4 * weights.parameters, copies * weights.bytes), f"training {model}"


def check_open_files(profile: Profile, flow: FlowName) -> Check:
    """Connections are files too."""
    chats = sum(endpoint.concurrency for endpoint in asked_endpoints(profile, flow).values())
    needed = _OWN_FILES + 2 * (profile.rag.concurrency + chats)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Check(
            "open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at once"
        )
    first = (
        ""
        if hard == resource.RLIM_INFINITY or hard >= needed
        else f", and the hard limit of {hard:,} first"
    )
    wrong = (
        f"open files: {soft:,} may be open at once, and this profile's concurrency takes {needed:,}"
    )
    hint = (
        f"ulimit -n {max(needed, _MANY_FILES)}, LimitNOFILE= in systemd, --ulimit nofile= in Docker"
    )
    return Check("open files", f"{soft:,} at once", f"{wrong}; raise it{first}: {hint}")


def check_locks(profile: Profile) -> Check:
    """Do locks under `paths.state` keep other processes out? On some network mounts they don't, or
    hang."""
    state, wrong = profile.paths.state, ""
    place = nearest_folder(state)
    try:
        if given := _locks_given_twice(place):
            named = ", ".join(given)
            wrong = f"in {place} two processes get the same lock ({named}), so two flows could write into one run"
    except (OSError, subprocess.SubprocessError) as error:
        wrong = f"no file can be locked in {place}: {error}"
    if wrong:
        hint = "put it on a local disk, or mount it with locks (NFS: `vers=4` or lockd, without `nolock`)"
        return Check("file locks", str(state), f"paths.state: {wrong}; {hint}")
    mounts = [
        each
        for each in psutil.disk_partitions(all=True)
        if place.resolve().is_relative_to(each.mountpoint)
    ]
    kind = str(max(mounts, key=lambda each: len(each.mountpoint)).fstype) if mounts else ""
    servers = {"ledger.db": profile.ledger.url_env, "mlflow.db": profile.tracking.uri}
    files = " and ".join(name for name, server in servers.items() if not server)
    note = f"{files} there must be used from one machine only; several need servers: ledger.url_env, tracking.uri"
    is_shared = bool(files) and kind.startswith(_SHARED_KINDS)
    return Check(
        "file locks", f"{state} ({kind})" if kind else str(state), note=note if is_shared else None
    )


def _locks_given_twice(place: Path) -> list[str]:
    argv = [sys.executable, "-I", "-S", "-c", _TRY_LOCKS]
    with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as folder, ExitStack() as held:
        for name, lock in _LOCKS.items():
            path = Path(folder) / name
            lock(held.enter_context(path.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            argv += [name, str(path)]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=5.0, check=True
        ).stdout.split()


def _folders(profile: Profile) -> dict[str, Path]:
    return {
        "paths.runs": profile.paths.runs,
        "paths.state": profile.paths.state,
        "TMPDIR": Path(tempfile.gettempdir()),
    }
