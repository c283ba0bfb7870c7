"""What a site consists of: the command and the settings of each of its processes."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from qinglan.runs.launcher import QUIET_ENV, Command
from qinglan.runs.processes import HOST

WORK_POOL, TRAINER_POOL = "qinglan", "qinglan-trainer"
WORK_POOLS = (WORK_POOL, TRAINER_POOL)
"""What trains has a pool of its own, so that a night's refresh does not wait for a day's training."""
_AT_ONCE = {WORK_POOL: 4, TRAINER_POOL: 1}
"""Flows at the same time: one trains, as the device is shared; some of the others wait for a provider or a user."""

_PAGES = "pages"
_PREFECT = [sys.executable, "-m", "prefect"]

SERVER_TUNING = {
    # Prefect's own drops what comes while a reader is 10,000 events behind, and by default its recorder commits task
    # runs one by one, which is slower than a flow makes them.
    "PREFECT_SERVER_EVENTS_MESSAGING_BROKER": "qinglan.tasks.server_events",
    # Prefect's own waits a quarter of an hour for events that a server before this one handled.
    "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "qinglan.tasks.server_events",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "2",
    # On SQLite one writer waits for another: for as long as Prefect lets a statement wait there anyway.
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
}
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
    """Where this machine's servers listen and keep their state."""

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
        return self.tracking_uri if is_tracked_elsewhere(self.tracking_uri) else f"http://{HOST}:{self.mlflow_port}"

    def prefect_server(self) -> Command:
        argv = [sys.executable, "-m", "qinglan.tasks.prefect_server", HOST, str(self.prefect_port)]
        return Command(argv, self.prefect_env | _unless_set(SERVER_TUNING))

    def mlflow_server(self) -> Command | None:
        """MLflow's UI over the profile's database; None where a tracking server is already there."""
        if is_tracked_elsewhere(self.tracking_uri):
            return None
        artifacts = (self.state / "mlartifacts").resolve().as_uri()
        argv = [sys.executable, "-m", "mlflow", "server", f"--host={HOST}", f"--port={self.mlflow_port}", "--workers=1"]
        argv += [f"--backend-store-uri={self.tracking_uri}", f"--artifacts-destination={artifacts}"]
        # Without its job runner it starts in a third of the time.
        return Command(argv, QUIET_ENV | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})

    def worker(self, pool: str) -> Command:
        argv = [*_PREFECT, "worker", "start", f"--pool={pool}", "--type=process", "--install-policy=never"]
        argv += [f"--name={worker_name(pool)}", f"--limit={_AT_ONCE[pool]}"]
        return Command(argv, self.prefect_env | _unless_set(WORKER_TUNING))

    def prepare(self) -> None:
        """Make Prefect's folder, for this account alone, without its new pages, which report to Amplitude.

        A link that leads nowhere is in the place of their folder, so Prefect logs one line and leaves them out.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        if "PREFECT_HOME" not in os.environ:
            self._home.chmod(0o700)  # the database has what decrypts its Secret blocks
        pages = self._home / _PAGES
        pages.mkdir(exist_ok=True)
        with suppress(FileExistsError):
            (pages / "v2").symlink_to("not-served")

    @property
    def _home(self) -> Path:
        return Path(os.environ.get("PREFECT_HOME") or (self.state / "prefect").resolve())

    @property
    def prefect_env(self) -> dict[str, str]:
        """For the server and for everything that talks to it."""
        env = QUIET_ENV | {
            "PREFECT_HOME": str(self._home),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_UI_API_URL": "/api",  # also right behind a forwarded port
            "PREFECT_SERVER_UI_V2_ENABLED": "false",
            "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(self._home / _PAGES),  # see `prepare`
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        # Loopback is no border to the user's own browser: without these, requests of any page in it would be served.
        guards = {
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.prefect_url,  # who may read such a token
        }
        return env | _unless_set(guards)


def is_tracked_elsewhere(tracking_uri: str) -> bool:
    """Is there an MLflow server already?"""
    return tracking_uri.startswith(("http://", "https://"))


def worker_name(pool: str) -> str:
    """As Prefect's pages show it; also its log's name."""
    return f"{pool}-up"


def _unless_set(settings: dict[str, str]) -> dict[str, str]:
    """What the user has set in the environment wins."""
    return {name: os.environ.get(name, value) for name, value in settings.items()}
