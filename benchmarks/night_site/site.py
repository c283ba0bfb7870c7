"""A site in a folder of its own: profile, growing workbook, `qinglan up` and its Prefect API."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import openpyxl
import psutil
import yaml

from qinglan.config.data import Columns
from qinglan.config.site import Embedded
from qinglan.ops.prefect.api import RetryingClient
from qinglan.runs.launcher import tail
from qinglan.runs.processes import free_port
from qinglan.simulators.domains import write_workbook
from qinglan.simulators.domains.query_rewrite import write_sample

PROFILE = "night"
WEBHOOK_ENV = "QINGLAN_NIGHT_WEBHOOK"
ROOT = Path(__file__).resolve().parents[2]
UNFINISHED = ("SCHEDULED", "PENDING", "RUNNING", "CANCELLING", "PAUSED")
FIRST_ROWS = 60
ROWS_PER_NIGHT = 8
_UP_WITHIN_S = 180.0
_SCHEDULED_AHEAD = 40
"""Flow runs that the schedule makes beforehand: one for each night, as the clock is moved from one
to the next."""
_DEPLOYED = ("refresh", "train", "clean-up")

Json = dict[str, Any]


class Site:
    """One folder with everything in it."""

    def __init__(self, folder: Path, services_url: str, questions: Path) -> None:
        self.folder = folder
        self.services_url = services_url
        self.runs = folder / "runs"
        self.state = folder / "state"
        self.prefect_port = free_port()
        self.mlflow_port = free_port()
        self.api = RetryingClient(
            base_url=f"http://127.0.0.1:{self.prefect_port}/api", trust_env=False, timeout=60
        )
        sheet = openpyxl.load_workbook(questions, read_only=True).active
        self._lines = sheet.iter_rows(values_only=True)
        header = [str(cell) for cell in next(self._lines)]
        # Without the sample's splits: the site splits by itself.
        self._columns = [place for place, title in enumerate(header) if title != Columns().split]
        self._header = [header[place] for place in self._columns]
        self._rows: list[list[str]] = []
        self.up: psutil.Popen | None = None
        self.starts = 0

    def prepare(self, settings: Json) -> None:
        """Write profile and deployments as a team would, the nightly schedule switched on."""
        profile = self.folder / "configs" / f"{PROFILE}.yaml"
        profile.parent.mkdir(parents=True)
        profile.write_text(yaml.safe_dump(settings, allow_unicode=True))
        text = (ROOT / "qinglan" / "deployments" / "prefect.yaml").read_text(encoding="utf-8")
        declared = yaml.safe_load(text)
        deployments = [entry for entry in declared["deployments"] if entry["name"] in _DEPLOYED]
        for deployment in deployments:
            # Not in place: deployments may share their parameters by a YAML anchor.
            deployment["parameters"] = {**deployment["parameters"], "profile": PROFILE}
            for schedule in deployment.get("schedules", []):
                schedule["active"] = True
        prefect_file = self.folder / "deployments" / "prefect.yaml"
        prefect_file.parent.mkdir()
        content = {
            "name": "night",
            "prefect-version": declared["prefect-version"],
            "deployments": deployments,
        }
        prefect_file.write_text(yaml.safe_dump(content, allow_unicode=True))

    @property
    def rows(self) -> int:
        """Rows in the workbook tonight."""
        return len(self._rows)

    def grow(self) -> None:
        """Write the questions that came in during the day into the workbook."""
        new_rows = ROWS_PER_NIGHT if self._rows else FIRST_ROWS
        for _ in range(new_rows):
            line = next(self._lines)
            self._rows.append([str(line[place] or "") for place in self._columns])
        write_workbook(self.folder / "questions.xlsx", "questions", self._header, self._rows)

    # `qinglan up`

    def start(self) -> None:
        """Bring the site up and wait until it says so."""
        self.starts += 1
        log = self.folder.parent / f"up-{self.starts}.log"
        argv = [sys.executable, "-m", "qinglan.cli", "up", f"--profile={PROFILE}"]
        argv += [f"--prefect-port={self.prefect_port}", f"--mlflow-port={self.mlflow_port}"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        env |= {
            WEBHOOK_ENV: f"{self.services_url}/webhook",
            "PREFECT_HOME": str(self.state / "prefect"),
            "PREFECT_SERVER_SERVICES_SCHEDULER_MIN_RUNS": str(_SCHEDULED_AHEAD),
        }
        with log.open("wb") as output:
            up = psutil.Popen(
                argv, cwd=self.folder, env=env, stdout=output, stderr=subprocess.STDOUT
            )
        self.up = up
        until(
            lambda: b"Ctrl-C stops" in log.read_bytes() or up.poll() is not None,
            _UP_WITHIN_S,
            "qinglan up",
        )
        if up.poll() is not None:
            raise SystemExit(f"qinglan up ended with {up.returncode}:\n{tail(log)}")

    def kill(self) -> None:
        """Kill -9 `qinglan up`, as a power cut does."""
        assert self.up is not None
        self.up.kill()
        self.up.wait()
        until(lambda: not self.family(), 60, "the end of what `qinglan up` had started")

    def stop(self) -> None:
        """Press Ctrl-C in the terminal of `qinglan up`."""
        assert self.up is not None
        self.up.send_signal(signal.SIGINT)
        self.up.wait(120)

    def family(self) -> list[psutil.Process]:
        """Every process of this machine that works in the site's folder or was started for it."""
        return processes_of(self.folder)

    def matching(self, *words: str) -> list[psutil.Process]:
        """Processes of the site whose command line has all these words."""
        matches = []
        for process in self.family():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    matches.append(process)
        return matches

    # Prefect

    def deployment(self, name: str) -> Json:
        """A deployment, in the server's words."""
        return self.get(f"deployments/name/{name}/{name}")

    def fire_by_schedule(self, name: str, *, made_before_s: float = 0.0) -> None:
        """Move the clock to the next time of the schedule.

        The flow run that Prefect made for that time starts now.

        Args:
            made_before_s: that run's least age. Prefect keeps the events of a run from automations
                for a quarter of an hour if it began within five minutes of being scheduled, which a
                nightly schedule's never does.
        """
        deployment = self.deployment(name)["id"]
        query = {
            "flow_runs": {
                "deployment_id": {"any_": [deployment]},
                "state": {"type": {"any_": ["SCHEDULED"]}},
            },
        }
        until(lambda: bool(self.post("flow_runs/filter", query)), 90, f"a scheduled run of {name}")
        # The oldest: where clean-up has removed a run, the schedule makes another for that time.
        run = min(self.post("flow_runs/filter", query), key=lambda run: run["state"]["timestamp"])
        age = datetime.now(UTC) - datetime.fromisoformat(run["state"]["timestamp"])
        # See `made_before_s`: a run that is too young would not wake the automations.
        time.sleep(max(0.0, made_before_s - age.total_seconds()))
        now = {
            "type": "SCHEDULED",
            "state_details": {"scheduled_time": datetime.now(UTC).isoformat()},
        }
        self.post(f"flow_runs/{run['id']}/set_state", {"state": now, "force": True})

    def runs_of(self, name: str, since: datetime) -> list[Json]:
        """A deployment's flow runs that began since then, the first one first."""
        query = {
            "flow_runs": {
                "start_time": {"after_": since.isoformat()},
                "deployment_id": {"any_": [self.deployment(name)["id"]]},
            },
            "sort": "START_TIME_ASC",
        }
        # The filter takes the expected start for the start of runs that have not begun.
        return [run for run in self.post("flow_runs/filter", query) if run["start_time"]]

    def unfinished(self) -> list[Json]:
        """Flow runs that should be over: not those that wait for a later night."""
        query = {"flow_runs": {"state": {"type": {"any_": [*UNFINISHED]}}}}
        runs: list[Json] = self.post("flow_runs/filter", query)
        now = datetime.now(UTC)

        def is_for_later(run: Json) -> bool:
            if run["state"]["type"] != "SCHEDULED":
                return False
            return datetime.fromisoformat(run["next_scheduled_start_time"]) > now

        return [run for run in runs if not is_for_later(run)]

    def get(self, path: str) -> Any:
        """The API's answer."""
        return self.ask("GET", path)

    def post(self, path: str, body: Json) -> Any:
        """The API's answer to a query."""
        return self.ask("POST", path, body)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The API's answer; asked again while the server is away or its database is busy."""
        problem = ""
        for _ in range(60):
            try:
                response = self.api.request(method, path, json=body)
                if response.status_code < 500:
                    return response.raise_for_status().json() if response.content else None
                problem = f"{response.status_code} {response.text[:200]}"
            except httpx2.TransportError as error:
                problem = repr(error)
            time.sleep(1)
        raise SystemExit(f"Prefect's server does not answer {path}: {problem}")

    # What is outside

    def switch(self, **state: Any) -> None:
        """Change how the services behave."""
        httpx2.post(f"{self.services_url}/switch", json=state, trust_env=False).raise_for_status()

    def books(self) -> Json:
        """The counts and messages that the services wrote down."""
        response = httpx2.get(f"{self.services_url}/books", trust_env=False)
        books: Json = response.raise_for_status().json()
        return books

    def disk_mb(self) -> float:
        """Size of everything that the site keeps."""
        total_bytes = 0
        for path in self.folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                total_bytes += _size(path)
        return total_bytes / 1e6


def processes_of(folder: Path) -> list[psutil.Process]:
    """Every other process of this machine that works in the folder or was started for it."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = [process.cwd(), *process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(str(folder) in word for word in words):
                processes.append(process)
    return processes


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        # The file was removed meanwhile.
        return 0


def until(is_over: Callable[[], bool], within_s: float, event: str) -> float:
    """Wait for an event; the seconds it took.

    Raises:
        TimeoutError: it takes longer.
    """
    start = time.monotonic()
    while not is_over():
        if time.monotonic() - start > within_s:
            raise TimeoutError(f"{event} did not come within {within_s:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - start


def questions_and_documents(folder: Path, nights: int) -> tuple[Path, Path]:
    """The sample's workbook, large enough for so many nights, and its knowledge base."""
    rows = FIRST_ROWS + ROWS_PER_NIGHT * nights
    sample = write_sample(
        folder, Embedded(sample_train_rows=rows, sample_dev_rows=20, sample_test_rows=40)
    )
    assert sample.knowledge_base is not None
    return sample.workbook, sample.knowledge_base


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """A disk of its own for the site, where this user may mount one; else the folder as it is.

    Yields whether it is a disk.
    """
    folder.mkdir(parents=True)
    is_mounted = os.getuid() == 0 and _mount(folder, megabytes)
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


def _mount(folder: Path, megabytes: int) -> bool:
    argv = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0
