"""`qinglan up`: Prefect's server, MLflow's, the deployments and a worker on this machine, until Ctrl-C.

Every process runs under `engines/supervise.py`, so that it ends with this one, kill -9 included. Prefect and MLflow
are started and asked over HTTP, never imported. All listen on loopback only, and none sends telemetry.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from qinglan.config import Profile
from qinglan.engines.command import QUIET_ENV, Command
from qinglan.engines.launcher import SUPERVISOR, launch, tail
from qinglan.errors import ConfigError, EngineError

HOST = "127.0.0.1"
WORK_POOL = "qinglan"
SERVER_FILE = "prefect_api_url"
"""Under the state directory while the server runs."""
DEPLOYMENTS = Path("deployments") / "prefect.yaml"
READY_WITHIN_S = 300.0
_POLL_S = 0.5
_SAY_EVERY_S = 15.0

Say = Callable[[str], object]


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
    with _stop_signals(), suppress(KeyboardInterrupt), ExitStack() as stack, _Processes(logs, say) as processes:
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
    site = Site(state, "", prefect_port=_free_port())
    Path(site.prefect_env["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    with _Processes(state.resolve() / "logs", lambda _: None) as processes:
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


@dataclass
class _Processes:
    """What runs in the background. The worker ends first, while there is a server to tell."""

    logs: Path
    say: Say
    _running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __enter__(self) -> "_Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._running:
            return
        self.say("\nstopping, up to 20 s")
        for names in (["worker"], list(self._running)):
            ending = [process for name, process in self._running.items() if name in names]
            for process in ending:
                assert process.stdin is not None
                process.stdin.close()
            for process in ending:
                process.wait()

    def start(self, name: str, command: Command) -> None:
        """Start a supervised process with a log of its own; an earlier log is replaced."""
        with (self.logs / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *command.argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                start_new_session=True,
            )
        self._running[name] = process

    def wait_for(self, what: str, url: str) -> None:
        """Wait until `url` answers 200.

        Raises:
            EngineError: a process ended, or it took too long.
        """
        start = said = time.monotonic()
        while not answers(url):
            self.check()
            now = time.monotonic()
            if now - start > READY_WITHIN_S:
                raise EngineError(f"{what} did not answer at {url} within {READY_WITHIN_S:.0f} s; logs: {self.logs}")
            if now - said > _SAY_EVERY_S:
                said = now
                self.say(f"{what}: waiting for {url}, {now - start:.0f} s")
            time.sleep(_POLL_S)
        self.say(f"{what}: ready")

    def watch(self) -> None:
        """Return never; raise when a process has ended."""
        while True:
            self.check()
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Are all still running?

        Raises:
            EngineError: one is not.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                log = self.logs / f"{name}.log"
                raise EngineError(f"{name} ended with status {process.returncode}; full log: {log}\n{tail(log)}")


def _find_deployments() -> Path:
    for folder in (Path.cwd(), Path(__file__).parent.parent):
        if (candidate := folder / DEPLOYMENTS).is_file():
            return candidate
    raise ConfigError(f"{DEPLOYMENTS}: no such file; run `qinglan up` in Qinglan's folder")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _require_free(port: int, option: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"{HOST}:{port}: {error.strerror}; is `qinglan up` running already? Else give another {option}"
            ) from error


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, and Ctrl-C also where a shell had it ignored for a background job."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


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


def answers(url: str) -> bool:
    """Does this address answer 200?"""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
