"""`qinglan up`: Prefect's server, MLflow's, the deployments and a worker on this machine, until Ctrl-C.

Every process runs under `engines/supervise.py`, so that it ends with this one, kill -9 included. Prefect and MLflow
are started and asked over HTTP, never imported. All listen on loopback only, and none sends telemetry.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from qinglan.config import Profile
from qinglan.engines.command import QUIET_ENV, Command
from qinglan.engines.launcher import launch
from qinglan.engines.processes import HOST, Processes, Say, answers, free_port, require_free, stop_signals
from qinglan.errors import ConfigError

WORK_POOL = "qinglan"
SERVER_FILE = "prefect_api_url"
"""Under the state directory while the server runs."""
DEPLOYMENTS = Path("deployments") / "prefect.yaml"


@dataclass(frozen=True)
class Site:
    """Where this machine's servers listen and keep their state."""

    state: Path
    tracking_uri: str
    prefect_port: int = 4200
    mlflow_port: int = 5000

    @property
    def prefect_url(self) -> str:
        """Prefect's UI; its API is under `/api`."""
        return f"http://{HOST}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        """MLflow's UI: our own server for a local database, else the tracking server itself."""
        return self.tracking_uri if self._is_tracked_elsewhere else f"http://{HOST}:{self.mlflow_port}"

    @property
    def _is_tracked_elsewhere(self) -> bool:
        return self.tracking_uri.startswith(("http://", "https://"))

    def prefect_server(self) -> Command:
        """Prefect's API, scheduler and UI."""
        return Command(
            [*_PREFECT, "server", "start", f"--host={HOST}", f"--port={self.prefect_port}"], self.prefect_env
        )

    def mlflow_server(self) -> Command | None:
        """MLflow's UI over the profile's database; None where a tracking server is already there."""
        if self._is_tracked_elsewhere:
            return None
        artifacts = (self.state / "mlartifacts").resolve().as_uri()
        argv = [sys.executable, "-m", "mlflow", "server", f"--host={HOST}", f"--port={self.mlflow_port}", "--workers=1"]
        argv += [f"--backend-store-uri={self.tracking_uri}", f"--artifacts-destination={artifacts}"]
        # Without its job runner it starts in a third of the time.
        return Command(argv, QUIET_ENV | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})

    def worker(self) -> Command:
        """Runs what the UI and the schedules ask for, one flow at a time: the device is shared."""
        argv = [*_PREFECT, "worker", "start", f"--pool={WORK_POOL}", "--type=process", "--install-policy=never"]
        return Command(
            [*argv, "--name=qinglan-up", "--limit=1"], self.prefect_env | {"PREFECT_WORKER_QUERY_SECONDS": "2"}
        )

    def deploy(self, prefect_file: Path) -> Command:
        """Register every deployment, or bring it up to date."""
        return Command(
            [*_PREFECT, "--no-prompt", "deploy", "--all", f"--prefect-file={prefect_file}"], self.prefect_env
        )

    @property
    def prefect_env(self) -> dict[str, str]:
        """For the server and for everything that talks to it."""
        home = os.environ.get("PREFECT_HOME") or str((self.state / "prefect").resolve())
        return QUIET_ENV | {
            "PREFECT_HOME": home,
            "PREFECT_API_URL": f"{self.prefect_url}/api",
            "PREFECT_SERVER_UI_API_URL": "/api",  # also right behind a forwarded port
            "PREFECT_SERVER_UI_V2_ENABLED": "false",  # Prefect's new UI reports to Amplitude from the browser
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }


_PREFECT = [sys.executable, "-m", "prefect"]


def serve_site(profile: Profile, say: Say, *, prefect_port: int = 4200, mlflow_port: int = 5000) -> None:
    """Start everything, say where, and keep it running until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: a port is taken, or there is no deployments/prefect.yaml.
        EngineError: one of the processes ended by itself; with the end of its log.
    """
    site = Site(profile.paths.state, profile.tracking_uri, prefect_port, mlflow_port)
    prefect_file, logs = _find_deployments(), profile.paths.state.resolve() / "logs"
    if os.environ.get("PREFECT_API_URL", f"{site.prefect_url}/api") != f"{site.prefect_url}/api":
        raise ConfigError(
            f"PREFECT_API_URL is {os.environ['PREFECT_API_URL']}, so this site has a Prefect server already; "
            f"deploy there with `prefect deploy --prefect-file {DEPLOYMENTS} --all`, or unset it"
        )
    mlflow = site.mlflow_server()
    _require_free(site.prefect_port, "--prefect-port")
    if mlflow:
        _require_free(site.mlflow_port, "--mlflow-port")
    with stop_signals(), suppress(KeyboardInterrupt), ExitStack() as stack, _processes(logs, say) as processes:
        processes.start("prefect_server", site.prefect_server())
        if mlflow:
            processes.start("mlflow_server", mlflow)
        processes.wait_for("Prefect's server", f"{site.prefect_url}/api/health")
        stack.enter_context(_announced(profile.paths.state / SERVER_FILE, f"{site.prefect_url}/api"))
        with httpx.Client(base_url=f"{site.prefect_url}/api", trust_env=False, timeout=60) as api:
            if interrupted := crash_interrupted(api):
                say(f"interrupted flow runs, now marked as crashed: {interrupted}; retry them to continue")
        processes.start("worker", site.worker())
        processes.wait_for("work pool", f"{site.prefect_url}/api/work_pools/{WORK_POOL}")
        launch(site.deploy(prefect_file), name="prefect deploy", log=logs / "deploy.log")
        say(f"deployed {prefect_file}")
        if mlflow:
            processes.wait_for("MLflow's server", f"{site.mlflow_url}/health")
        say(f"\nPrefect  {site.prefect_url}\nMLflow   {site.mlflow_url}\nLogs     {logs}\n\nCtrl-C stops all of it.")
        processes.watch()


@contextmanager
def prefect_for(state: Path, say: Say) -> Iterator[None]:
    """Point this process at a Prefect server, before Prefect is imported.

    The user's own where one is configured, `qinglan up`'s where it runs, else one that lives as long as the run does.
    Prefect's own temporary server would survive a killed run.
    """
    os.environ.update(QUIET_ENV)
    if "PREFECT_API_URL" in os.environ or "PREFECT_PROFILE" in os.environ:
        yield
        return
    announced = state / SERVER_FILE
    if announced.exists() and answers(f"{announced.read_text(encoding='utf-8')}/health"):
        os.environ |= {"PREFECT_API_URL": announced.read_text(encoding="utf-8")}
        yield
        return
    site = Site(state, "", prefect_port=free_port())
    Path(site.prefect_env["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    with _processes(state.resolve() / "logs", lambda _: None) as processes:
        say("starting a Prefect server for this run")
        processes.start(f"prefect_server_{site.prefect_port}", site.prefect_server())
        processes.wait_for("Prefect's server", f"{site.prefect_url}/api/health")
        os.environ.update(site.prefect_env)
        yield


@contextmanager
def _announced(file: Path, api_url: str) -> Iterator[None]:
    """Tells `qinglan run` on this site where the server is, for as long as it is there."""
    file.write_text(api_url, encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _processes(logs: Path, say: Say) -> Processes:
    """The worker ends first, while there is a server to tell."""
    return Processes(logs, say, end_first=("worker",))


def _require_free(port: int, option: str) -> None:
    require_free(HOST, port, f"is `qinglan up` running already? Else give another {option}")


def _find_deployments() -> Path:
    for folder in (Path.cwd(), Path(__file__).parent.parent):
        if (candidate := folder / DEPLOYMENTS).is_file():
            return candidate
    raise ConfigError(f"{DEPLOYMENTS}: no such file; run `qinglan up` in Qinglan's folder")


def crash_interrupted(api: httpx.Client) -> int:
    """Mark what an earlier worker left behind at work as crashed: nobody works on it, but the server can't know.

    Call it before this site's worker starts. The number of flow runs.
    """
    unfinished = {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
    query = {"flow_runs": unfinished, "work_pools": {"name": {"any_": [WORK_POOL]}}}
    runs = api.post("flow_runs/filter", json=query).raise_for_status().json()
    state = {"type": "CRASHED", "message": "`qinglan up` ended while this was at work; retry it to continue"}
    for run in runs:
        api.post(f"flow_runs/{run['id']}/set_state", json={"state": state, "force": True}).raise_for_status()
    return len(runs)
