"""Training processes as jobs of a Ray cluster, by the Jobs REST API of its dashboard. Ray itself is
not imported here.

A job belongs to the cluster: it goes on after the flow that submitted it has died, and the next
flow finds it by its id, which is made of run, stage, engine and attempt. The job writes its output
into the stage's log file itself: the API returns the whole log at each request, which after days is
a lot.
"""

import logging
import re
import shlex
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from pydantic import AliasPath, BaseModel, Field, TypeAdapter, ValidationError

from qinglan.config import Profile, Trainer, require_secret, uses_proxy
from qinglan.errors import EngineError, QinglanError
from qinglan.runs.artifacts import write_json
from qinglan.runs.back_off import BackOff
from qinglan.runs.launcher import (
    QUIET_ENV,
    READABLE_ENV,
    AttemptFailedError,
    Command,
    LineTail,
    size_of,
    tail,
)
from qinglan.runs.run import runs_by
from qinglan.text import slug
from qinglan.training.engines.verl import RAY_SECRETS

POLL_S = 1.0
_BACK_OFF = BackOff(POLL_S, 30.0)
STOP_WITHIN_S = 30.0
FORWARD_EVERY_S = 5.0
FORWARD_LINES = 6
FORWARD_CHARS = 300
"""Longer lines, such as verl's metrics, stay in the log file alone."""
ENDED_FILE = "ray_jobs.json"
"""File in the stage's directory with the last job whose success was handled, by engine."""

_TIMEOUT_S = 15.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The engine takes the place of both shells, so that killing it, or them, kills it. An empty
# CUDA_VISIBLE_DEVICES would break Ray's logical GPU.
_ENTRY = (
    'cd "$1" || { '
    'echo "$1 is not on this node: paths.runs must be on a mount that all nodes have" >&2; '
    "exit 72; }; "
    '[ -n "$CUDA_VISIBLE_DEVICES" ] || unset CUDA_VISIBLE_DEVICES; '
    'exec > >(tee -a "$2") 2>&1; shift 2; exec "$@"'
)

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class Job(BaseModel, frozen=True):
    """A job as the API describes it."""

    submission_id: str | None = None
    """None for a driver that was not submitted as a job."""
    status: str
    message: str | None = None
    start_time: int | None = None
    """Milliseconds since the epoch, as in `end_time`."""
    end_time: int | None = None

    @property
    def is_active(self) -> bool:
        return self.status in ("PENDING", "RUNNING")


class _Version(BaseModel):
    ray_version: str


class _RayNode(BaseModel):
    state: str
    resources_total: dict[str, Any]


class _RayNodes(BaseModel):
    nodes: list[_RayNode] = Field(validation_alias=AliasPath("data", "result", "result"))


class UnreachableError(EngineError):
    """The dashboard did not answer, or asks to try again later."""


class RayJobs(AbstractContextManager["RayJobs"]):
    """The Jobs API of one cluster, without retries: `UnreachableError` where the dashboard gives no
    usable answer."""

    def __init__(self, trainer: Trainer) -> None:
        assert trainer.ray_dashboard_url is not None
        self.url = trainer.ray_dashboard_url.rstrip("/")
        headers = {}
        if trainer.ray_token_env:
            token = require_secret(trainer.ray_token_env, "trainer.ray_dashboard_url")
            headers["authorization"] = f"Bearer {token}"
        self._http = httpx2.Client(
            timeout=_TIMEOUT_S, headers=headers, trust_env=uses_proxy(self.url)
        )

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def submit(self, submission_id: str, command: Command, directory: Path, log_file: Path) -> None:
        """Queue a job; after an `UnreachableError` submit it again. A job of that id that exists
        counts as this one."""
        script = ["bash", "-c", _ENTRY, "qinglan", str(directory), str(log_file), *command.argv]
        # Ray's own process for a job gets the job's environment too, and needs the node's secrets.
        # A command for an engine without Ray has empty ones.
        own_env = {name: value for name, value in command.env.items() if name not in RAY_SECRETS}
        body: dict[str, Any] = {
            "entrypoint": f"exec {shlex.join(script)}",
            "submission_id": submission_id,
            "runtime_env": {"env_vars": QUIET_ENV | READABLE_ENV | own_env},
        }
        if command.gpus:
            body["entrypoint_num_gpus"] = command.gpus
        response = self._send("POST", "/api/jobs/", body)
        if response.status_code == 200 or self.find(submission_id):
            return
        if "try again later" in response.text:
            raise UnreachableError(f"Ray {self.url}: {_last_line(response.text)}")
        raise EngineError(
            f"Ray {self.url} refuses job {submission_id}: {_last_line(response.text)}"
        )

    def find(self, submission_id: str) -> Job | None:
        """The job of that id; None where the cluster knows none."""
        response = self._send("GET", f"/api/jobs/{submission_id}")
        return None if _is_unknown(response) else self._read(response, Job)

    def all(self) -> list[Job]:
        """The cluster's jobs, without drivers that were not submitted as jobs."""
        jobs = self._read(self._send("GET", "/api/jobs/"), list[Job])
        return [job for job in jobs if job.submission_id]

    def stop(self, submission_id: str) -> None:
        """Ask for a job's end, which then takes some seconds."""
        response = self._send("POST", f"/api/jobs/{submission_id}/stop")
        if not _is_unknown(response):
            self._read(response, dict[str, Any])

    def ray_version(self) -> str:
        return self._read(self._send("GET", "/api/version"), _Version).ray_version

    def gpus_of_nodes(self) -> list[int] | None:
        """GPUs of each node that is alive; None where the dashboard doesn't say."""
        try:
            nodes = self._read(self._send("GET", "/api/v0/nodes"), _RayNodes).nodes
        except UnreachableError:
            return None
        return [int(node.resources_total.get("GPU", 0)) for node in nodes if node.state == "ALIVE"]

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx2.Response:
        try:
            return self._http.request(method, self.url + path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            problem = str(error) or type(error).__name__
            raise UnreachableError(f"Ray {self.url}: {problem}") from error

    def _read(self, response: httpx2.Response, kind: type[Answer]) -> Answer:
        if response.status_code in (401, 403):
            raise EngineError(
                f"Ray {self.url}: HTTP {response.status_code}; "
                "set trainer.ray_token_env to its token"
            )
        if response.status_code != 200:
            raise UnreachableError(
                f"Ray {self.url}: HTTP {response.status_code}: {_last_line(response.text)}"
            )
        try:
            return TypeAdapter(kind).validate_json(response.content)
        except ValidationError as error:
            raise UnreachableError(
                f"Ray {self.url}: that is no answer of a Ray dashboard"
            ) from error


class JobSeries:
    """One engine of one stage on a cluster: its attempts are jobs `PREFIX-1`, `PREFIX-2` and so on.

    A job is stopped only on purpose: by an error that `on_poll` raised, by Ctrl-C, or because the
    flow run was cancelled.
    """

    def __init__(
        self,
        jobs: RayJobs,
        *,
        run_id: str,
        stage: str,
        engine: str,
        key: str,
        directory: Path,
        retry_s: float,
        say: Callable[..., None],
    ) -> None:
        self._jobs = jobs
        self._directory = directory.resolve()
        self._retry_s = retry_s
        self._say = say
        self._engine = slug(engine)
        self._any_key = f"{run_prefix(run_id)}{slug(stage)}-{self._engine}-"
        self._prefix = f"{self._any_key}{key[:8]}-"

    def run(
        self,
        command: Callable[[], Command],
        *,
        name: str,
        log_file: Path,
        on_poll: Callable[[], None] | None,
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Follow the job that is running or ended while no flow followed it; else submit the next
        one and follow it.

        Raises:
            AttemptFailedError: it failed, with its message and the end of its log.
            EngineError: it was stopped by hand, or the dashboard did not answer for too long.
            QinglanError: whatever `on_poll` raised, after the job's end.
        """
        number, is_followed = self._choose_attempt()
        submission_id = f"{self._prefix}{number}"
        log_start = 0 if is_followed else size_of(log_file)
        forward = LogForwarder(log_file, partial(self._say, to_server=False))
        start_s = time.monotonic()
        try:
            if is_followed:
                self._say(
                    f"following Ray job {submission_id}, "
                    "which an earlier attempt of this flow submitted"
                )
            else:
                self._submit(submission_id, command, log_file)
            job = self._follow(submission_id, on_poll, forward)
        except BaseException as error:
            # A bug, or Prefect or MLflow being away, must not cost days of training. Prefect's
            # signal is no Exception either, and comes to cancel, or only because the worker is shut
            # down.
            is_by_hand = isinstance(error, KeyboardInterrupt)
            if is_by_hand or (not isinstance(error, Exception) and is_cancelled()):
                self._stop(submission_id)
            raise
        if job is None:
            raise AttemptFailedError(
                f"{name}: Ray no longer knows job {submission_id}; "
                f"was the head node started anew? full log: {log_file}",
                time.monotonic() - start_s,
            )
        self._handle_end(job, submission_id, name, log_file, log_start)

    def _choose_attempt(self) -> tuple[int, bool]:
        """Number of the job to follow to its end, and whether that job exists already."""
        number_of = re.compile(re.escape(self._prefix) + r"(\d+)")
        newest_number = 0
        newest_job: Job | None = None
        for job in self._retry(self._jobs.all):
            match = number_of.fullmatch(job.submission_id or "")
            if match and int(match[1]) > newest_number:
                newest_number = int(match[1])
                newest_job = job
        handled = _read_ended(self._directory).get(self._engine, "").removeprefix(self._prefix)
        if newest_job is not None:
            was_handled = handled == str(newest_number)
            is_unhandled_success = newest_job.status == "SUCCEEDED" and not was_handled
            if newest_job.is_active or is_unhandled_success:
                return newest_number, True
        # A cluster that lost its memory would number the attempts from 1 again.
        handled_number = int(handled) if handled.isdigit() else 0
        return max(newest_number, handled_number) + 1, False

    def _submit(self, submission_id: str, command: Callable[[], Command], log_file: Path) -> None:
        for job in self._retry(self._jobs.all):
            job_id = job.submission_id or ""
            has_other_key = job_id.startswith(self._any_key) and not job_id.startswith(self._prefix)
            if job.is_active and has_other_key:
                # It would write into the same files.
                self._say(
                    f"stopping Ray job {job_id}: the stage's inputs or Qinglan's code changed since"
                )
                self._stop(job_id, wait=True)
        # Called once: a retried request must not write the command's files anew.
        new_command = command()
        path = log_file.resolve()
        self._retry(lambda: self._jobs.submit(submission_id, new_command, self._directory, path))
        self._say(f"submitted Ray job {submission_id} to {self._jobs.url}")

    def _follow(
        self, submission_id: str, on_poll: Callable[[], None] | None, forward: "LogForwarder"
    ) -> Job | None:
        """The job at its end; None where the cluster forgot it."""
        outage = Outage(self._retry_s)
        job: Job | None = Job(status="PENDING")
        while True:
            if time.monotonic() >= outage.next_try_at:
                try:
                    job = self._jobs.find(submission_id)
                    outage = Outage(self._retry_s)
                except UnreachableError as error:
                    outage.add(
                        error, f"Ray job {submission_id} goes on by itself; run again to follow it"
                    )
            is_over = job is None or not job.is_active
            is_pending = job is not None and job.status == "PENDING"
            forward()
            # While a job waits for resources nothing can stall.
            if on_poll and not is_pending:
                try:
                    on_poll()
                except QinglanError:
                    if not is_over:
                        self._stop(submission_id, wait=True)
                    raise
            if is_over:
                return job
            time.sleep(POLL_S)

    def _stop(self, submission_id: str, *, wait: bool = False) -> None:
        deadline = time.monotonic() + STOP_WITHIN_S
        is_asked = False
        while time.monotonic() < deadline:
            try:
                if not is_asked:
                    self._jobs.stop(submission_id)
                    is_asked = True
                    self._say(f"stopping Ray job {submission_id}")
                job = self._jobs.find(submission_id) if wait else None
                if job is None or not job.is_active:
                    return
            except UnreachableError as error:
                log.warning("%s", error)
            time.sleep(POLL_S)
        self._say(
            f"Ray job {submission_id} did not stop within {STOP_WITHIN_S:.0f} s; see `ray job stop`"
        )

    def _handle_end(
        self, job: Job, submission_id: str, name: str, log_file: Path, log_start: int
    ) -> None:
        if job.status == "SUCCEEDED":
            ended = _read_ended(self._directory) | {self._engine: submission_id}
            write_json(self._directory / ENDED_FILE, ended)
            return
        if job.status == "STOPPED":
            raise EngineError(
                f"{name}: Ray job {submission_id} was stopped by hand; run again to go on"
            )
        reason, _, rest = (job.message or "it says no reason").partition(", last available logs")
        last_lines = tail(log_file, start=log_start) if log_file.exists() else ""
        if not last_lines:
            # A job that never came to write its log has lines that Ray kept, after a heading.
            last_lines = "\n".join(f"    {line}" for line in rest.splitlines()[1:])
        seconds = ((job.end_time or 0) - (job.start_time or 0)) / 1000
        message = (
            f"{name} failed as Ray job {submission_id}: {reason.strip()}; full log: {log_file}"
        )
        raise AttemptFailedError(message, seconds, last_lines)

    def _retry(self, request: Callable[[], Answer]) -> Answer:
        outage = Outage(self._retry_s)
        while True:
            try:
                return request()
            except UnreachableError as error:
                outage.add(error, "is the address right, is the cluster up?")
                time.sleep(max(0.0, outage.next_try_at - time.monotonic()))


class Outage:
    """The time since a dashboard last answered: when to try again, and when to give up."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s = time.monotonic()
        self._failures = 0
        self.next_try_at = 0.0

    def add(self, error: UnreachableError, hint: str) -> None:
        """Count a failed request and set the time of the next one; at the limit, raise
        EngineError."""
        now = time.monotonic()
        if not self._failures:
            self._since_s = now
            log.warning("%s; asking again for up to %.0f s", error, self._limit_s)
        if now - self._since_s >= self._limit_s:
            raise EngineError(f"{error}; no answer for {self._limit_s:.0f} s: {hint}") from error
        self._failures += 1
        self.next_try_at = now + _BACK_OFF.pause_s(self._failures)


class LogForwarder:
    """Repeats the last few lines of what a job writes in the terminal."""

    def __init__(self, log_file: Path, say: Callable[[str], None]) -> None:
        self._lines = LineTail(log_file, from_end=True)
        self._say = say
        self._last_at_s = time.monotonic()

    def __call__(self) -> None:
        if time.monotonic() - self._last_at_s < FORWARD_EVERY_S:
            return
        self._last_at_s = time.monotonic()
        short_lines = []
        for line in self._lines.new():
            text = _ESCAPES.sub("", line.decode(errors="replace"))
            # A progress bar writes its line again and again: its last state.
            text = text.rpartition("\r")[2].strip()
            if text and len(text) <= FORWARD_CHARS:
                short_lines.append(text)
        if short_lines:
            self._say("\n".join(short_lines[-FORWARD_LINES:]))


def run_prefix(run_id: str) -> str:
    """Beginning of the ids of a run's jobs."""
    return f"qinglan-{slug(run_id)}-"


def stop_all(trainer: Trainer, run_id: str) -> list[str]:
    """Stop every active job of a run and return their ids; none where no cluster is used."""
    if trainer.ray_dashboard_url is None:
        return []
    prefix = run_prefix(run_id)
    stopped_ids = []
    with RayJobs(trainer) as jobs:
        for job in jobs.all():
            submission_id = job.submission_id or ""
            if job.is_active and submission_id.startswith(prefix):
                jobs.stop(submission_id)
                stopped_ids.append(submission_id)
    return stopped_ids


def stop_jobs_of(profile: Profile, flow_run_id: str, say: Callable[[str], object]) -> bool:
    """Stop the jobs of the runs that one of the orchestrator's flow runs worked on; was there such
    a run?"""
    runs = runs_by(profile.paths.runs, flow_run_id)
    for run in runs:
        for job in stop_all(run.profile.trainer, run.id):
            say(f"stopped Ray job {job}")
    return bool(runs)


def _read_ended(directory: Path) -> dict[str, str]:
    try:
        return TypeAdapter(dict[str, str]).validate_json((directory / ENDED_FILE).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


def _is_unknown(response: httpx2.Response) -> bool:
    return response.status_code == 404 and "does not exist" in response.text


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no text"])[-1][:300]
