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
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import qinglan
from qinglan.config import ENGINE_FLOWS, TRAINING_FLOWS, FlowName, Profile
from qinglan.errors import QinglanError
from qinglan.ledger import LEDGER_FILE
from qinglan.ops.checks import Check
from qinglan.ops.preflight.asked_services import asked_endpoints
from qinglan.runs.disk_space import nearest_folder
from qinglan.text import size, some
from qinglan.training.disk_space import ModelSize, needed_bytes

LOCK = Path(qinglan.__file__).parents[1] / "requirements.lock"
"""The versions that the tests ran with; an installed wheel has no such file."""
GB = 10**9
_HINT_ON_PACKAGES = "run `make setup`, or install Qinglan anew in this environment"
_LOW_FREE_BYTES = 2 * GB
"""Free space beyond what is needed, below which a note says so."""
_MIN_FREE_FILES = 10_000
_TEMPORARY_BYTES = 1 * GB
"""Space for temporary files, Ray's among them."""
_CPU_TRAINING_BYTES = 5 * GB
"""Memory of verl and Ray with the embedded model, measured: 5 to 6 GB."""
_FLOW_BYTES = 1 * GB
"""Memory of a flow that starts no engine here: Prefect, MLflow's client, its rows."""
_OWN_FILES = 256
"""Files that a flow has open beside its connections."""
_MANY_FILES = 65_536
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
"""Beginnings of the names of file systems that several machines may share."""
_CGROUP = Path("/sys/fs/cgroup")
_LOCKS = {"flock": fcntl.flock, "lockf": fcntl.lockf}
"""The locks that `filelock` takes, and SQLite's."""
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
"""Run as another process, tries to take what this one holds, and says what it was given."""


def installed(name: str) -> Version | None:
    """The version of a package in this environment."""
    try:
        return Version(version(name))
    except PackageNotFoundError:
        return None


def check_python() -> Check:
    required = metadata("qinglan")["Requires-Python"]
    running = platform.python_version()
    if SpecifierSet(required).contains(running, prereleases=True):
        return Check("python", running)
    problem = f"this is {running}, Qinglan needs {required}; make the environment with another"
    return Check("python", running, f"python: {problem}")


def check_packages(profile: Profile, flow: FlowName) -> Check:
    """Compare the packages here with what Qinglan needs, and with what it was tested with."""
    trainer = profile.trainer
    trains_here = not trainer.python and not trainer.ray_dashboard_url
    extra = "trainer" if flow in ENGINE_FLOWS and trains_here else ""
    requirements = _requirements(extra)
    tested_versions = _tested_versions()
    problems: list[str] = []
    deviations: list[str] = []
    for requirement in requirements:
        name = requirement.name
        here = installed(name)
        tested = tested_versions.get(canonicalize_name(name))
        if here is None:
            problems.append(f"{name} is missing")
        elif not requirement.specifier.contains(here, prereleases=True):
            problems.append(f"{name} is {here}, needed is {requirement.specifier}")
        elif tested and here.public != tested:
            deviations.append(f"{name} {here} (tested with {tested})")
    detail = f"qinglan {installed('qinglan')}, {len(requirements)} packages that it needs"
    if problems:
        return Check("packages", detail, f"packages: {some(problems)}; {_HINT_ON_PACKAGES}")
    if not tested_versions:
        reason = "tested versions are not known, as requirements.lock is only in a checkout"
        return Check("packages", f"{detail}; {reason}")
    note = None
    if deviations:
        note = f"{some(deviations)}; {_HINT_ON_PACKAGES} to have those of the lock"
    return Check("packages", detail, note=note)


def check_text() -> Check:
    """Tell whether Chinese can be printed and stand in a file's name."""
    encodings = {
        "output": getattr(sys.stdout, "encoding", None) or "utf-8",
        "file names": sys.getfilesystemencoding(),
    }
    narrow: list[str] = []
    for use, encoding in encodings.items():
        if codecs.lookup(encoding).name != "utf-8":
            narrow.append(f"{use} as {encoding}")
    if not narrow:
        return Check("text", "UTF-8")
    hint = "export LANG=C.UTF-8 PYTHONUTF8=1"
    return Check("text", "", f"text: {' and '.join(narrow)}, which has no Chinese; {hint}")


def check_folders(profile: Profile) -> Check:
    """Write a file into each folder that a run writes to."""
    folders = _folders(profile)
    problems: list[str] = []
    for key, folder in folders.items():
        place = nearest_folder(folder)
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"\0")
        except OSError as error:
            problems.append(f"{key}: {place} can't be written to: {error.strerror}")
    problem = None
    if problems:
        hint = "give this user write access, or name another folder"
        problem = f"{'; '.join(problems)}; {hint}"
    return Check("folders", ", ".join(map(str, folders.values())), problem)


def check_disk(profile: Profile, flow: FlowName) -> Check:
    """Compare the free space of each file system with what goes there."""
    required_by_key = _needed_disk_bytes(profile, flow)
    details: list[str] = []
    problems: list[str] = []
    warnings: list[str] = []
    for places in _places_by_file_system(profile):
        names = ", ".join(places)
        place = next(iter(places.values()))
        free = shutil.disk_usage(place).free
        required = max(required_by_key[key] for key in places)
        details.append(f"{names} {size(free)} free")
        if free < required:
            problems.append(f"{names} ({place}): {size(free)} free, needed are {size(required)}")
        elif free < required + _LOW_FREE_BYTES:
            warnings.append(
                f"{names} ({place}): only {size(free)} free, of which {size(required)} are needed"
            )
        files = os.statvfs(place)
        # Some file systems have no fixed number of files, and say 0.
        if files.f_files and files.f_favail < _MIN_FREE_FILES:
            problems.append(
                f"{names} ({place}): space for {files.f_favail} more files only (df -i)"
            )
    hint = (
        f"free disk space, such as by `qinglan clean-up --profile {profile.name}`, "
        "or name a larger disk"
    )
    problem = f"disk: {'; '.join(problems)}; {hint}" if problems else None
    note = f"{'; '.join(warnings)}; {hint}" if warnings else None
    return Check("disk", ", ".join(details), problem, note)


def check_memory(profile: Profile, flow: FlowName) -> Check:
    """Compare the memory of this machine or container with what the flow takes."""
    total, available = memory_bytes()
    detail = f"{size(available)} of {size(total)} available"
    required, activity = needed_memory_bytes(profile, flow)
    if required is None:
        reason = f"what {activity} takes is not known from its name, see docs/how-to/gpus.md"
        return Check("memory", f"{detail}; {reason}")
    if total < required:
        problem = (
            f"this machine or container has {size(total)}, and {activity} takes {size(required)}"
        )
        hint = "use a larger one, or train on a cluster (trainer.ray_dashboard_url)"
        return Check("memory", detail, f"memory: {problem}; {hint}")
    note = None
    if available < required:
        note = f"{activity} takes {size(required)}; end what else runs here first"
    return Check("memory", detail, note=note)


def memory_bytes() -> tuple[int, int]:
    """Total and available memory of this machine, or of the container where that has less."""
    machine = psutil.virtual_memory()
    total = int(machine.total)
    available = int(machine.available)
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        usage = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = (_CGROUP / "memory.stat").read_text(encoding="ascii")
        figures = dict(line.split() for line in statistics.splitlines())
    except (OSError, ValueError):
        # There is no cgroup of version 2, or it has no limit and says `max`.
        return total, available
    # The kernel gives up this cache for a process that needs memory.
    cache = int(figures.get("inactive_file", 0))
    return min(total, limit), max(0, min(available, limit - usage + cache))


def needed_memory_bytes(profile: Profile, flow: FlowName) -> tuple[int | None, str]:
    """Memory that is needed at least, and what needs it; None where the model's size is unknown."""
    trainer = profile.trainer
    model = profile.student.base_model
    is_on_cpu = trainer.device == "cpu"
    starts_engine_here = flow in ENGINE_FLOWS and not trainer.ray_dashboard_url
    only_generates_on_cpu = is_on_cpu and flow not in TRAINING_FLOWS
    if not starts_engine_here or only_generates_on_cpu:
        return _FLOW_BYTES, "a flow"
    if is_on_cpu:
        return _CPU_TRAINING_BYTES, "training on the CPU"
    weights = None
    # A folder's weights may be none that can be read.
    with suppress(ValueError):
        weights = ModelSize.of(model)
    if weights is None:
        return None, model
    copies = trainer.gpus_per_node // profile.rl.tensor_model_parallel_size
    # verl loads the policy whole once, in fp32; a sleeping vLLM keeps its weights in the host's
    # memory.
    return _FLOW_BYTES + max(4 * weights.parameters, copies * weights.bytes), f"training {model}"


def check_open_files(profile: Profile, flow: FlowName) -> Check:
    """Compare the limit of open files with the connections of a flow, which are files too."""
    chats = sum(endpoint.concurrency for endpoint in asked_endpoints(profile, flow).values())
    required = _OWN_FILES + 2 * (profile.rag.concurrency + chats)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Check("open files", "no limit")
    detail = f"{soft:,} at once"
    if soft >= required:
        return Check("open files", detail)
    problem = (
        f"{soft:,} may be open at once, and this profile's concurrency takes {required:,}; raise it"
    )
    if hard != resource.RLIM_INFINITY and hard < required:
        problem += f", and the hard limit of {hard:,} first"
    limit = max(required, _MANY_FILES)
    hint = f"ulimit -n {limit}, LimitNOFILE= in systemd, --ulimit nofile= in Docker"
    return Check("open files", detail, f"open files: {problem}: {hint}")


def check_locks(profile: Profile) -> Check:
    """Try whether locks under `paths.state` keep other processes out.

    On some network mounts they don't, or hang.
    """
    state = profile.paths.state
    place = nearest_folder(state)
    problem = _problem_of_locks(place)
    if problem:
        hint = (
            "put it on a local disk, or mount it with locks "
            "(NFS: `vers=4` or lockd, without `nolock`)"
        )
        return Check("file locks", str(state), f"paths.state: {problem}; {hint}")
    kind = _file_system_of(place)
    detail = f"{state} ({kind})" if kind else str(state)
    servers = {LEDGER_FILE: profile.ledger.url_env, "mlflow.db": profile.tracking.uri}
    files = " and ".join(name for name, server in servers.items() if not server)
    note = None
    if files and kind.startswith(_SHARED_KINDS):
        note = (
            f"{files} there must be used from one machine only; "
            "several need servers: ledger.url_env, tracking.uri"
        )
    return Check("file locks", detail, note=note)


def _requirements(extra: str) -> list[Requirement]:
    """Packages that Qinglan needs here, with those of an extra where one is named."""
    requirements: list[Requirement] = []
    for text in requires("qinglan") or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            requirements.append(requirement)
    return requirements


def _tested_versions() -> dict[str, str]:
    """Versions by package, as requirements.lock has them; empty without a checkout."""
    if not LOCK.is_file():
        return {}
    versions: dict[str, str] = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        name, separator, pinned = line.partition("==")
        if separator:
            # Behind the version stands a backslash, as the hashes follow on further lines.
            versions[canonicalize_name(name)] = pinned.split()[0]
    return versions


def _needed_disk_bytes(profile: Profile, flow: FlowName) -> dict[str, int]:
    """Space that is needed by the setting of a folder."""
    floor = profile.retention.min_free_mb * 10**6
    try:
        runs = needed_bytes(profile, flow)
    except (QinglanError, ValueError):
        # A model that can't be read is the problem of its own check.
        runs = floor
    return {"paths.runs": runs, "paths.state": floor, "TMPDIR": _TEMPORARY_BYTES}


def _places_by_file_system(profile: Profile) -> list[Mapping[str, Path]]:
    """The folders that exist, or will be made in, by their setting, for each file system."""
    file_systems: dict[int, dict[str, Path]] = defaultdict(dict)
    for key, folder in _folders(profile).items():
        place = nearest_folder(folder)
        file_systems[place.stat().st_dev][key] = place
    return list(file_systems.values())


def _problem_of_locks(place: Path) -> str | None:
    try:
        shared_locks = _locks_given_twice(place)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no file can be locked in {place}: {error}"
    if not shared_locks:
        return None
    return (
        f"in {place} two processes get the same lock ({', '.join(shared_locks)}), "
        "so two flows could write into one run"
    )


def _locks_given_twice(place: Path) -> list[str]:
    """Names of the locks that another process gets while this one holds them."""
    argv = [sys.executable, "-I", "-S", "-c", _TRY_LOCKS]
    with tempfile.TemporaryDirectory(dir=place, prefix=".doctor-") as folder, ExitStack() as files:
        for name, lock in _LOCKS.items():
            path = Path(folder) / name
            lock(files.enter_context(path.open("a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            argv += [name, str(path)]
        process = subprocess.run(argv, capture_output=True, text=True, timeout=5.0, check=True)
        return process.stdout.split()


def _file_system_of(place: Path) -> str:
    """The kind of file system that a folder is on, "" where no mount is known."""
    resolved = place.resolve()
    kind = ""
    longest = -1
    for mount in psutil.disk_partitions(all=True):
        # The innermost of nested mounts is the one that holds the folder.
        if resolved.is_relative_to(mount.mountpoint) and len(mount.mountpoint) > longest:
            kind = str(mount.fstype)
            longest = len(mount.mountpoint)
    return kind


def _folders(profile: Profile) -> dict[str, Path]:
    """Folders that a run writes to, by the setting or variable that names each."""
    return {
        "paths.runs": profile.paths.runs,
        "paths.state": profile.paths.state,
        "TMPDIR": Path(tempfile.gettempdir()),
    }
