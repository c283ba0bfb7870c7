"""What only the cluster's nodes know: is the mount theirs too, with interpreter, packages, version
and keys?

A small job writes a token into folders that are made here below `paths.runs` and `paths.state`;
what it found comes back through its log on that mount or, where there is none, through the end of
its log of a failed job in Ray.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from qinglan.config import EMBEDDED, Profile
from qinglan.errors import ConfigError, EngineError
from qinglan.ops.checks import Check
from qinglan.ops.doctor import cluster_node_script
from qinglan.ops.doctor.machine import installed
from qinglan.ops.preflight.trainer import trainer_packages
from qinglan.recipes import get_recipe
from qinglan.runs.launcher import Command
from qinglan.training.engines.ray_jobs import Job, RayJobs
from qinglan.training.engines.swift import engine_python

JOB_WITHIN_S = 18.0
_LOG_WITHIN_S = 3.0
_SEEN_WITHIN_S = 3.0
_LOG = "doctor.log"


class _Node(BaseModel):
    name: str
    host: str
    user: int
    failed: dict[str, str]
    has_python: bool
    qinglan: str | None
    missing_packages: list[str]
    missing_env: list[str]


class _Report(BaseModel):
    nodes: list[_Node]
    silent: int


def keys_of_nodes(profile: Profile) -> list[str]:
    """Variables that a job reads on its node: rewards are scored there."""
    graders = get_recipe(profile.recipe).grader.services
    named = [profile.ledger.url_env]
    if "rag" in graders and profile.rag.url != EMBEDDED:
        named.append(profile.rag.api_key_env)
    if "judge" in graders and not profile.judge.local and profile.judge.base_url != EMBEDDED:
        named.append(profile.judge.api_key_env)
    return sorted({name for name in named if name})


def check_cluster(profile: Profile) -> list[Check]:
    token = secrets.token_hex(8)
    paths, name = profile.paths, f".doctor-{token}"
    folders = {
        "paths.runs": paths.runs.resolve() / name,
        "paths.state": paths.state.resolve() / name,
    }
    where = f"{paths.runs} and {paths.state}, from the nodes"
    try:  # one that hangs must not leave our folders behind
        with RayJobs(profile.trainer) as jobs:
            jobs.ray_version()
    except (EngineError, ConfigError):  # no answer, or a token that is refused or missing
        return [Check("mount", where, note="not known: Ray can't be asked, see `ray`")]
    try:
        for key, folder in folders.items():
            try:
                folder.mkdir(parents=True)
                folder.chmod(0o777)
            except OSError as error:
                wrong = f"{key}: this machine can't write to {folder.parent}: {error.strerror}"
                return [
                    Check(
                        "mount",
                        where,
                        f"{wrong}; give this user write access, or name another folder",
                    )
                ]
        return _ask_nodes(profile, token, folders, where)
    except EngineError as error:
        return [Check("mount", where, str(error))]
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def _ask_nodes(profile: Profile, token: str, folders: dict[str, Path], where: str) -> list[Check]:
    directory, python = folders["paths.runs"], engine_python(profile)
    with RayJobs(profile.trainer) as jobs:
        wanted = {
            "token": token,
            "folders": [str(folder) for folder in folders.values()],
            "python": python,
            "packages": trainer_packages(profile),
            "env": keys_of_nodes(profile),
            "nodes": len(jobs.gpus_of_nodes() or ()),
        }
        script = Path(cluster_node_script.__file__).read_text(encoding="utf-8")
        job = _run(
            jobs,
            f"qinglan-doctor-{token}",
            Command([python, "-c", script, json.dumps(wanted)]),
            directory,
        )
    if job.is_active:
        stuck = "still waits" if job.status == "PENDING" else "still runs"
        text = f"the job {stuck} after {JOB_WITHIN_S:.0f} s; see it in the dashboard"
        if job.status == "PENDING":  # a busy cluster is no fault
            return [Check("mount", where, note=f"not known: {text}")]
        return [Check("mount", where, f"mount: {text}; does a mount or Ray itself hang there?")]
    if (report := _report(job, directory / _LOG)) is None:
        return [Check("mount", where, _why_no_report(profile, job))]
    return [_mount(report, token, folders, where), _nodes(profile, report)]


def _run(jobs: RayJobs, submission_id: str, command: Command, directory: Path) -> Job:
    """The job at its end, or as it was when the time was up: then it is stopped."""
    deadline = time.monotonic() + JOB_WITHIN_S
    jobs.submit(submission_id, command, directory, directory / _LOG)
    for _ in _looks(deadline):
        if (job := jobs.find(submission_id)) is None:
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
    """One at least, the others at intervals until the deadline."""
    yield
    while time.monotonic() < deadline:
        time.sleep(0.25)
        yield


def _report(job: Job, log_file: Path) -> _Report | None:
    """From the log on the mount, which its writer may end a little later; else from what Ray
    says."""
    for _ in _looks(time.monotonic() + (_LOG_WITHIN_S if log_file.exists() else 0.0)):
        text = log_file.read_text(encoding="utf-8", errors="replace") if log_file.exists() else ""
        for line in reversed([*(job.message or "").splitlines(), *text.splitlines()]):
            if line.startswith(cluster_node_script.MARK):
                with suppress(ValidationError):
                    return _Report.model_validate_json(line.removeprefix(cluster_node_script.MARK))
    return None


def _why_no_report(profile: Profile, job: Job) -> str:
    message, python = job.message or "", engine_python(profile)
    if "is not on this node" in message:
        runs, hint = (
            profile.paths.runs.resolve(),
            "mount the same file system there at the same path",
        )
        return f"paths.runs: this machine writes to {runs}, and the cluster's node does not see it; {hint}"
    if any(
        sign in message for sign in ("exit code 127", "not found", "No such file")
    ):  # the log may come too late
        return f"trainer.python: the cluster's node has no {python}; name the interpreter of the nodes' environment"
    last = (message.strip().splitlines() or [f"it ended as {job.status}"])[-1]
    return f"mount: the job failed on the cluster: {last[:300]}; see the job {job.submission_id} in the dashboard"


def _mount(report: _Report, token: str, folders: dict[str, Path], where: str) -> Check:
    keys = {str(folder): key for key, folder in folders.items()}
    wrong = []
    for each in report.nodes:
        for path, reason in each.failed.items():
            wrong.append(
                f"{keys.get(path, path)}: node {each.host} (user {each.user}) can't write there: {reason}"
            )
        for key, folder in folders.items():
            if str(folder) not in each.failed and not _is_seen(folder / each.name, token):
                wrong.append(f"{key}: node {each.host} wrote a file that this machine does not see")
    if wrong:
        hint = "mount one file system here and there, writable for both users"
        return Check("mount", where, f"{'; '.join(wrong)}; {hint}")
    hosts = ", ".join(each.host for each in report.nodes)
    detail = f"{' and '.join(str(folder.parent) for folder in folders.values())}: written on {hosts}, read here"
    return Check(
        "mount",
        detail,
        note=f"{report.silent} more did not answer in time" if report.silent else None,
    )


def _is_seen(file: Path, token: str) -> bool:
    """A mount may take a moment."""
    for _ in _looks(time.monotonic() + _SEEN_WITHIN_S):
        with suppress(OSError):
            if file.read_text(encoding="ascii") == token:
                return True
    return False


def _nodes(profile: Profile, report: _Report) -> Check:
    ours, python, wrong = str(installed("qinglan")), engine_python(profile), []
    for each in report.nodes:
        if not each.has_python:
            wrong.append(
                f"trainer.python: node {each.host} has no {python}; install the environment there too"
            )
        if each.missing_packages:
            wrong.append(
                f"node {each.host} lacks {', '.join(each.missing_packages)}; see docker/trainer.Dockerfile"
            )
        if each.qinglan != ours:
            has = f"has qinglan {each.qinglan}" if each.qinglan else "has no qinglan"
            wrong.append(f"node {each.host} {has}, here is {ours}; install the same there")
        if each.missing_env:
            wrong.append(
                f"node {each.host} lacks {', '.join(each.missing_env)}; export them there before `ray start`"
            )
    detail = f"{', '.join(each.host for each in report.nodes)}: qinglan {report.nodes[0].qinglan}, keys set"
    return Check("nodes", detail, "; ".join(wrong) or None)
