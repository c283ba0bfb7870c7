"""Checks of what only the cluster's nodes know: their mount, interpreter, packages and keys.

A small job writes a token into folders that are made here below `paths.runs` and `paths.state`;
what it found comes back through its log on that mount or, where there is none, through the end of
its log of a failed job in Ray.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from qinglan.config import Profile
from qinglan.errors import ConfigError, EngineError
from qinglan.ops.checks import Check
from qinglan.ops.doctor import cluster_node_script
from qinglan.ops.doctor.machine import installed
from qinglan.ops.preflight.trainer import trainer_packages
from qinglan.recipes.grading_services import grading_services
from qinglan.runs.launcher import Command
from qinglan.training.engines.ray_jobs import Job, RayJobs
from qinglan.training.engines.swift import engine_python

JOB_WITHIN_S = 18.0
_LOG_WITHIN_S = 3.0
_SEEN_WITHIN_S = 3.0
_LOOK_EVERY_S = 0.25
_LOG = "doctor.log"
_MAX_MESSAGE_CHARS = 300


class _Node(BaseModel):
    """A node as `cluster_node_script` describes it."""

    name: str
    host: str
    user: int
    failed: dict[str, str]
    """Reasons by folder that the node could not write to."""
    has_python: bool
    qinglan: str | None
    missing_packages: list[str]
    missing_env: list[str]


class _Report(BaseModel):
    nodes: list[_Node]
    silent: int
    """Number of nodes that did not answer in time."""


def keys_of_nodes(profile: Profile) -> list[str]:
    """Variables that a job reads on its node: rewards are scored there."""
    variables = {profile.ledger.url_env}
    services = grading_services(profile)
    if profile.judge.local:
        # Samples are judged by the site's own model, which needs no key.
        services.pop("judge", None)
    for service in services.values():
        if not service.is_embedded:
            variables.add(service.api_key_env)
    return sorted(filter(None, variables))


def check_cluster(profile: Profile) -> list[Check]:
    """Run a job on the cluster that looks around there; one result for the mount, one for the
    nodes."""
    paths = profile.paths
    where = f"{paths.runs} and {paths.state}, from the nodes"
    # A dashboard that hangs is found out before there are folders that it could leave behind.
    try:
        with RayJobs(profile.trainer) as jobs:
            jobs.ray_version()
    except (EngineError, ConfigError):
        # It gives no answer, or a token is refused or missing.
        return [Check("mount", where, note="not known: Ray can't be asked, see `ray`")]
    token = secrets.token_hex(8)
    name = f".doctor-{token}"
    folders = {
        "paths.runs": paths.runs.resolve() / name,
        "paths.state": paths.state.resolve() / name,
    }
    try:
        problem = _make_folders(folders)
        if problem:
            return [Check("mount", where, problem)]
        return _ask_nodes(profile, token, folders, where)
    except EngineError as error:
        return [Check("mount", where, str(error))]
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def _make_folders(folders: Mapping[str, Path]) -> str | None:
    """Make folders that the nodes' user, which may be another one, can write to."""
    for key, folder in folders.items():
        try:
            folder.mkdir(parents=True)
            folder.chmod(0o777)
        except OSError as error:
            problem = f"{key}: this machine can't write to {folder.parent}: {error.strerror}"
            return f"{problem}; give this user write access, or name another folder"
    return None


def _ask_nodes(
    profile: Profile, token: str, folders: Mapping[str, Path], where: str
) -> list[Check]:
    directory = folders["paths.runs"]
    python = engine_python(profile)
    script = Path(cluster_node_script.__file__).read_text(encoding="utf-8")
    with RayJobs(profile.trainer) as jobs:
        request = {
            "token": token,
            "folders": [str(folder) for folder in folders.values()],
            "python": python,
            "packages": trainer_packages(profile),
            "env": keys_of_nodes(profile),
            "nodes": len(jobs.gpus_of_nodes() or ()),
        }
        command = Command([python, "-c", script, json.dumps(request)])
        job = _run(jobs, f"qinglan-doctor-{token}", command, directory)
    if job.is_active:
        return [_check_of_stuck_job(job, where)]
    report = _report(job, directory / _LOG)
    if report is None:
        return [Check("mount", where, _why_no_report(profile, job))]
    return [_check_of_mount(report, token, folders, where), _check_of_nodes(profile, report)]


def _run(jobs: RayJobs, submission_id: str, command: Command, directory: Path) -> Job:
    """The job at its end, or as it was when the time was up: then it is stopped."""
    deadline = time.monotonic() + JOB_WITHIN_S
    jobs.submit(submission_id, command, directory, directory / _LOG)
    for _ in _looks(deadline):
        job = jobs.find(submission_id)
        if job is None:
            raise EngineError(
                f"Ray {jobs.url}: lost the job {submission_id}; was the head started anew just now?"
            )
        if not job.is_active:
            return job
    with suppress(EngineError):
        jobs.stop(submission_id)
    assert job
    return job


def _looks(deadline: float) -> Iterator[None]:
    """One look at least, further ones at intervals until the deadline."""
    yield
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        yield


def _check_of_stuck_job(job: Job, where: str) -> Check:
    stuck = "still waits" if job.status == "PENDING" else "still runs"
    text = f"the job {stuck} after {JOB_WITHIN_S:.0f} s; see it in the dashboard"
    if job.status == "PENDING":
        # A busy cluster is no fault.
        return Check("mount", where, note=f"not known: {text}")
    return Check("mount", where, f"mount: {text}; does a mount or Ray itself hang there?")


def _report(job: Job, log_file: Path) -> _Report | None:
    """The report from the log on the mount, else from what Ray says of a failed job."""
    # The writer of the log may end it a little later than the job.
    wait_s = _LOG_WITHIN_S if log_file.exists() else 0.0
    for _ in _looks(time.monotonic() + wait_s):
        text = ""
        if log_file.exists():
            text = log_file.read_text(encoding="utf-8", errors="replace")
        lines = [*(job.message or "").splitlines(), *text.splitlines()]
        for line in reversed(lines):
            if not line.startswith(cluster_node_script.MARK):
                continue
            # A line may be cut off as yet.
            with suppress(ValidationError):
                return _Report.model_validate_json(line.removeprefix(cluster_node_script.MARK))
    return None


def _why_no_report(profile: Profile, job: Job) -> str:
    message = job.message or ""
    if "is not on this node" in message:
        runs = profile.paths.runs.resolve()
        problem = (
            f"this machine writes to {runs}, and the cluster's node does not see it; "
            "mount the same file system there at the same path"
        )
        return f"paths.runs: {problem}"
    # The shell says so in its own words; the log with them may come too late for its exit code.
    signs = ("exit code 127", "not found", "No such file")
    if any(sign in message for sign in signs):
        return (
            f"trainer.python: the cluster's node has no {engine_python(profile)}; "
            "name the interpreter of the nodes' environment"
        )
    lines = message.strip().splitlines() or [f"it ended as {job.status}"]
    return (
        f"mount: the job failed on the cluster: {lines[-1][:_MAX_MESSAGE_CHARS]}; "
        f"see the job {job.submission_id} in the dashboard"
    )


def _check_of_mount(report: _Report, token: str, folders: Mapping[str, Path], where: str) -> Check:
    """Compare what the nodes wrote with what this machine sees."""
    keys = {str(folder): key for key, folder in folders.items()}
    problems: list[str] = []
    for node in report.nodes:
        for path, reason in node.failed.items():
            key = keys.get(path, path)
            problems.append(
                f"{key}: node {node.host} (user {node.user}) can't write there: {reason}"
            )
        for key, folder in folders.items():
            is_written = str(folder) not in node.failed
            if is_written and not _is_seen(folder / node.name, token):
                problems.append(
                    f"{key}: node {node.host} wrote a file that this machine does not see"
                )
    if problems:
        hint = "mount one file system here and there, writable for both users"
        return Check("mount", where, f"{'; '.join(problems)}; {hint}")
    hosts = ", ".join(node.host for node in report.nodes)
    roots = " and ".join(str(folder.parent) for folder in folders.values())
    detail = f"{roots}: written on {hosts}, read here"
    note = f"{report.silent} more did not answer in time" if report.silent else None
    return Check("mount", detail, note=note)


def _is_seen(file: Path, token: str) -> bool:
    """Tell whether the file that a node wrote arrives here; a mount may take a moment."""
    for _ in _looks(time.monotonic() + _SEEN_WITHIN_S):
        with suppress(OSError):
            if file.read_text(encoding="ascii") == token:
                return True
    return False


def _check_of_nodes(profile: Profile, report: _Report) -> Check:
    """Compare the nodes' environments with what a job needs."""
    version_here = str(installed("qinglan"))
    python = engine_python(profile)
    problems: list[str] = []
    for node in report.nodes:
        if not node.has_python:
            problems.append(
                f"trainer.python: node {node.host} has no {python}; "
                "install the environment there too"
            )
        if node.missing_packages:
            packages = ", ".join(node.missing_packages)
            problems.append(f"node {node.host} lacks {packages}; see docker/trainer.Dockerfile")
        if node.qinglan != version_here:
            version_there = f"qinglan {node.qinglan}" if node.qinglan else "no qinglan"
            problems.append(
                f"node {node.host} has {version_there}, here is {version_here}; "
                "install the same there"
            )
        if node.missing_env:
            variables = ", ".join(node.missing_env)
            problems.append(
                f"node {node.host} lacks {variables}; export them there before `ray start`"
            )
    hosts = ", ".join(node.host for node in report.nodes)
    detail = f"{hosts}: qinglan {report.nodes[0].qinglan}, keys set"
    return Check("nodes", detail, "; ".join(problems) or None)
