"""The local site: its lock, the command of each of its processes, Prefect's server for one run."""

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

import psutil

from qinglan.config import withheld_secrets
from qinglan.errors import ConfigError
from qinglan.ops.prefect.server import LOCK_FILE, announced_url, find_server, prefect_home
from qinglan.runs.artifacts import written_whole
from qinglan.runs.launcher import QUIET_ENV, Command
from qinglan.runs.processes import HOST, POLL_S, Processes, Say, free_port, health_problem

WORK_POOLS = {"qinglan": 4, "qinglan-trainer": 1}
"""The number of flows that each pool runs at once.

What trains has a pool of its own, so that a night's refresh does not wait for a day's training, and
trains one at a time, as the device is shared; some of the others wait for a provider or a user.
"""
WORKERS = {f"{pool}-up": pool for pool in WORK_POOLS}
"""The pool of each worker, by the name that Prefect's pages and its log have."""
_ENDING_WITHIN_S = 60.0
"""Longer than the supervisors' grace."""

SERVER_TUNING = {
    # Prefect's own drops what comes while a reader is 10,000 events behind, and by default its
    # recorder commits task runs one by one, which is slower than a flow makes them.
    "PREFECT_SERVER_EVENTS_MESSAGING_BROKER": "qinglan.tasks.server_events",
    # Prefect's own waits a quarter of an hour for events that a server before this one handled.
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "qinglan.tasks.server_events",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "2",
    # On SQLite one writer waits for another: for as long as Prefect lets a statement wait there
    # anyway.
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
}
_NO_BLOCK_TYPES = {
    # A second of work for a form that nobody opens in one run. Without the second line no later
    # server would do it.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}
_DATABASE_ELSEWHERE = (
    "PREFECT_API_DATABASE_CONNECTION_URL",
    "PREFECT_SERVER_DATABASE_CONNECTION_URL",
)
"""Either of them names the server's database; Prefect knows both."""
WORKER_TUNING = {
    "PREFECT_WORKER_QUERY_SECONDS": "2",
    "PREFECT_WORKER_CANCELLATION_POLL_SECONDS": "15",
    # The most frequent that Prefect allows: so a lost run is noticed after minutes, not hours.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # 4 minutes in all: longer than a killed server takes to be back.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
}


@dataclass(frozen=True)
class Site:
    """The addresses and the state of this machine's servers."""

    state: Path
    tracking_uri: str
    prefect_port: int = 4200
    mlflow_port: int = 5000

    @property
    def prefect_url(self) -> str:
        return f"http://{HOST}:{self.prefect_port}"

    @property
    def api_url(self) -> str:
        return f"{self.prefect_url}/api"

    @property
    def mlflow_url(self) -> str:
        """MLflow's UI: our own server for a local database, else the tracking server itself."""
        return f"http://{HOST}:{self.mlflow_port}" if self.mlflow_server() else self.tracking_uri

    def prefect_server(self) -> Command:
        prefect = [sys.executable, "-m", "prefect"]
        argv = [*prefect, "server", "start", f"--host={HOST}", f"--port={self.prefect_port}"]
        env = withheld_secrets(None, "PREFECT_*") | self.prefect_env
        return Command(argv, env | _unless_set(SERVER_TUNING))

    def mlflow_server(self) -> Command | None:
        """MLflow's UI over the profile's database; None where it uses a tracking server."""
        if self.tracking_uri.startswith(("http://", "https://")):
            return None
        artifacts = (self.state / "mlartifacts").resolve().as_uri()
        mlflow = [sys.executable, "-m", "mlflow"]
        argv = [*mlflow, "server", f"--host={HOST}", f"--port={self.mlflow_port}", "--workers=1"]
        argv += [f"--backend-store-uri={self.tracking_uri}", f"--artifacts-destination={artifacts}"]
        env = withheld_secrets(None, "MLFLOW_*", "AWS_*") | QUIET_ENV
        # Without its job runner it starts in a third of the time.
        return Command(argv, env | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})

    def worker(self, name: str) -> Command:
        pool = WORKERS[name]
        prefect = [sys.executable, "-m", "prefect"]
        argv = [*prefect, "worker", "start", f"--pool={pool}", "--type=process"]
        argv += ["--install-policy=never", f"--name={name}", f"--limit={WORK_POOLS[pool]}"]
        return Command(argv, self.prefect_env | _unless_set(WORKER_TUNING))

    def prepare(self) -> None:
        """Make Prefect's folder, for this account alone, without its new pages."""
        (self._home / "pages").mkdir(parents=True, exist_ok=True)
        if prefect_home() is None:
            # The database has what decrypts its Secret blocks.
            self._home.chmod(0o700)
            if not any(name in os.environ for name in _DATABASE_ELSEWHERE):
                _begin_with_tables(self._home / "prefect.db", empty_database())
        # The new pages report to Amplitude. Where a link that leads nowhere is in the place of
        # their folder, Prefect logs one line and leaves them out.
        with suppress(FileExistsError):
            (self._home / "pages" / "v2").symlink_to("not-served")

    @property
    def _home(self) -> Path:
        return prefect_home() or (self.state / "prefect").resolve()

    @property
    def prefect_env(self) -> dict[str, str]:
        """The environment of the server and of everything that talks to it."""
        env = QUIET_ENV | {
            "PREFECT_HOME": str(self._home),
            "PREFECT_API_URL": self.api_url,
            # Right behind a forwarded port too.
            "PREFECT_SERVER_UI_API_URL": "/api",
            "PREFECT_SERVER_UI_V2_ENABLED": "false",
            # See `prepare`.
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(self._home / "pages"),
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        # Loopback is no border to the user's own browser: without these, requests of any page in it
        # would be served.
        guards = {
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            # Only these pages may read such a token.
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.prefect_url,
        }
        return env | _unless_set(guards)


def empty_database() -> Path:
    """A SQLite database with the tables of the installed Prefect, where `make setup` has made it.

    A new site begins with a copy: Prefect's migrations take 7 s to make the tables.
    """
    return Path(sys.prefix) / "share" / "qinglan" / f"prefect-{version('prefect')}.db"


def _begin_with_tables(database: Path, empty: Path) -> None:
    """Copy the empty database to where a new one is to be."""
    if empty.is_file() and not database.exists():
        with written_whole(database) as partial:
            shutil.copyfile(empty, partial)


def _unless_set(settings: dict[str, str]) -> dict[str, str]:
    """The settings, each as the user has set it in the environment, if so."""
    return {name: os.environ.get(name, value) for name, value in settings.items()}


@contextmanager
def only_one(state: Path, say: Say) -> Iterator[int]:
    """Hold the state folder's lock, and give its file descriptor.

    Every process of the site is to keep that open. So the lock is free when the last of them has
    ended, also after kill -9: until then they still have the ports. Raises `ConfigError` where
    another one runs here, or its processes don't end.
    """
    state.mkdir(parents=True, exist_ok=True)
    with (state / LOCK_FILE).open("a+", encoding="utf-8") as file:
        _lock(file, state, say)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _lock(file: IO[str], state: Path, say: Say) -> None:
    start_s = time.monotonic()
    is_wait_said = False
    while not _try_lock(file):
        waited_s = time.monotonic() - start_s
        # Somebody who checks the lock takes it for a moment as well.
        if waited_s > 2 * POLL_S:
            _require_ending(file, state, waited_s)
            if not is_wait_said:
                say("waiting for the processes of an earlier `qinglan up` to end")
                is_wait_said = True
        time.sleep(POLL_S)


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _require_ending(file: IO[str], state: Path, waited_s: float) -> None:
    """Raise `ConfigError` where whoever holds the lock still runs, or takes too long to end."""
    file.seek(0)
    holder = file.read().strip()
    if holder.isdigit() and psutil.pid_exists(int(holder)):
        url = announced_url(state) or "about to start"
        process = f"process {holder}, {url.removesuffix('/api')}"
        hint = "use that one, or give another paths.state"
        raise ConfigError(f"{state}: `qinglan up` runs here already ({process}); {hint}")
    if waited_s > _ENDING_WITHIN_S:
        problem = "processes of an earlier `qinglan up` have not ended"
        raise ConfigError(f"{state}: {problem}; look for `supervise.py`")


@contextmanager
def prefect_for(state: Path, say: Say) -> Iterator[Callable[[], None]]:
    """Point this process at a Prefect server, before Prefect is imported.

    The server is the user's own where one is configured, `qinglan up`'s where it runs, else one
    that lives as long as the run does. Gives a function that waits until the server answers: ours
    takes seconds to start, in which the caller can work.
    """
    os.environ.update(QUIET_ENV)
    server = find_server(state)
    if server and (not server.is_of_up or not health_problem(f"{server.api_url}/health")):
        if server.is_of_up:
            os.environ["PREFECT_API_URL"] = server.api_url
        yield lambda: None
        return
    # Prefect's own temporary server would survive a killed run.
    site = Site(state, "", prefect_port=free_port())
    site.prepare()
    with Processes(state.resolve() / "logs", lambda _: None) as processes:
        server_command = site.prefect_server()
        command = Command(server_command.argv, server_command.env | _NO_BLOCK_TYPES)
        processes.start(f"prefect_server_{site.prefect_port}", command)
        os.environ.update(site.prefect_env)

        def wait_until_ready() -> None:
            say("starting a Prefect server for this run")
            processes.wait_for("Prefect's server", f"{site.api_url}/health")

        yield wait_until_ready
