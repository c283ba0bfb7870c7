"""What the Dockerfiles install, installed; what compose.yaml starts, started. Only the last test
uses containers.

The steps of a Dockerfile run as they stand there, in a folder that holds what it copies, with /opt
and /srv elsewhere, and with uv in place of pip, which takes minutes more for the same files. Only
the trainer's engines, some gigabytes of CUDA libraries, are looked up and not installed.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from postgres import postgres_server
from waiting import wait_until

from qinglan.runs.processes import HOST, free_port

pytestmark = [pytest.mark.slow, pytest.mark.extended]
ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
STEP_S = 600
"""For an install step; then `timeout` ends it, uv included, with status 124."""
# The packages that the reward and the engines' scripts are imported with; the lock has their
# versions.
IMPORTED_WITH = """
aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl idna openai httpx2
httpcore2 h11 anyio sniffio certifi truststore distro jiter tqdm typing-extensions pydantic
pydantic-core pyyaml filelock annotated-types typing-inspection sqlalchemy greenlet psycopg
psycopg-binary psutil jieba numpy pyarrow setuptools jmespath
"""


def steps(image: str) -> list[str]:
    """The RUN instructions that install Python packages."""
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).replace(
        "${LOCK}", f"docker/{image}.lock"
    )
    runs = re.findall(r"^RUN (?:--mount=\S+ +)*(.+)", text, flags=re.MULTILINE)
    return [run for run in runs if "pip install" in run]


def build(image: str, folder: Path, change: Callable[[str], str] = str) -> Path:
    """Run the install steps of an image below `folder`; its environment.

    Args:
        change: of each step, before it runs.
    """
    context, environment = folder / "build", folder / image
    context.mkdir(parents=True)
    for name in ("docker", "qinglan"):
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    # The interpreter that the tests have is the image's version.
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    for step in steps(image):
        here = step.replace(
            f"/opt/{image}/bin/pip install", f"uv pip install --quiet --python {environment}"
        )
        argv = [
            "timeout",
            str(STEP_S),
            "sh",
            "-e",
            "-c",
            change(here.replace(f"/opt/{image}", str(environment))),
        ]
        done = subprocess.run(argv, cwd=context, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.returncode}: {step}\n{done.stdout}\n{done.stderr}"
    return environment


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("orchestrator", tmp_path_factory.mktemp("orchestrator"))


def test_the_orchestrators_commands_start(orchestrator: Path, tmp_path: Path) -> None:
    def said(*argv: str) -> str:
        env = {"PATH": f"{orchestrator}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(
            argv, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=600
        )
        return done.stdout

    assert "doctor" in said("qinglan", "--help")
    assert "3.8.8" in said("prefect", "--version")
    assert "3.17.2" in said("mlflow", "--version")
    assert "torch" not in said("pip", "list")


def test_the_trainers_lock_can_be_had_and_its_parts_of_qinglan_import(tmp_path: Path) -> None:
    pins = _pins("docker/trainer.lock")
    few_pins = {
        pin: lines for pin, lines in pins.items() if pin.split("==")[0] in IMPORTED_WITH.split()
    }
    assert len(few_pins) == len(IMPORTED_WITH.split())
    small, unseen = tmp_path / "small.lock", tmp_path / "unseen.txt"
    small.write_text("".join(few_pins.values()), encoding="utf-8")
    # `make setup` has just installed the others.
    unseen.write_text(
        "\n".join(pin for pin in pins if pin not in _pins("requirements.lock")), encoding="utf-8"
    )

    def change(step: str) -> str:
        few = step.replace("docker/trainer.lock", str(small))
        if few == step:
            return step
        # Without hashes, for which uv would fetch the wheels.
        look = (
            step.split("&&")[-1]
            .replace("docker/trainer.lock", str(unseen))
            .replace("--require-hashes", "--dry-run")
        )
        return f"{few} && {look}"

    build("trainer", tmp_path, change)


def _pins(lock: str) -> dict[str, str]:
    """Each pin, with its lines in the lock: the hashes are among them."""
    entries = re.findall(r"(?m)^[^#\s].*\n(?: .*\n)*", (ROOT / lock).read_text(encoding="utf-8"))
    return {entry.split()[0]: entry for entry in entries}


class Services:
    """Starts services of compose.yaml as they stand there, on free ports of loopback."""

    def __init__(self, folder: Path, environment: Path, ports: dict[str, int]) -> None:
        self.folder, self.environment, self.ports = folder, environment, ports
        self.stack = ExitStack()

    def argv(self, name: str) -> list[str]:
        words = [self._here(str(word)) for word in COMPOSE["services"][name]["command"]]
        words = [re.sub(r"^--port=\d+$", f"--port={self.ports.get(name)}", word) for word in words]
        entrypoint = ROOT / "docker" / "entrypoint.sh"
        return [
            "sh",
            str(entrypoint),
            *(word.replace("--host=0.0.0.0", f"--host={HOST}") for word in words),
        ]

    def variables(self, name: str) -> dict[str, str]:
        service, mounted = COMPOSE["services"][name], self.folder / "run" / name
        mounted.mkdir(parents=True, exist_ok=True)
        for secret in service.get("secrets", []):
            file = COMPOSE["secrets"][secret["source"]]["file"]
            text = (self.folder / file).read_text(encoding="utf-8")
            (mounted / secret["target"]).write_text(self._here(text), encoding="utf-8")
        given = {
            key: self._here(str(value))
            for key, value in service["environment"].items()
            if "$" not in str(value)
        }
        given |= {key: HOST for key in given if key.endswith("_HOST")}
        if "PREFECT_SERVER_DATABASE_PORT" in given:
            given["PREFECT_SERVER_DATABASE_PORT"] = str(self.ports["postgres"])
        return {
            "PATH": f"{self.environment}/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "QINGLAN_SECRETS": str(mounted),
            "QINGLAN_KEYS": str(self.folder / "keys"),
            **given,
        }

    def start(self, name: str, leave_out: str = "^$", **more: str) -> None:
        """A service that goes on."""
        variables = {
            key: v for key, v in self.variables(name).items() if not re.search(leave_out, key)
        } | more
        for secret in (self.folder / "run" / name).iterdir():
            if re.search(leave_out, secret.name):
                secret.unlink()
        self.spawn(name, self.argv(name), variables)

    def spawn(self, name: str, argv: list[str], variables: dict[str, str]) -> None:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(argv, cwd=self.folder, env=variables, stdout=log, stderr=log)
        self.stack.callback(_end, process)

    def run(self, name: str) -> str:
        """A service that ends."""
        argv, env = self.argv(name), self.variables(name)
        done = subprocess.run(
            argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_for(self, name: str) -> None:
        url = re.sub(
            r":\d+/", f":{self.ports[name]}/", COMPOSE["services"][name]["healthcheck"]["test"][-1]
        )
        argv, log = (
            [sys.executable, str(ROOT / "docker" / "healthy.py"), url],
            self.folder / f"{name}.log",
        )
        is_healthy = partial(subprocess.run, argv, capture_output=True)
        wait_until(name, lambda: is_healthy().returncode == 0, explain=log.read_text)

    def _here(self, text: str) -> str:
        for host, port in self.ports.items():
            text = re.sub(rf"(?<=[@/]){host}:\d+", f"{HOST}:{port}", text)
        return text


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def lay_out(environment: Path, site: Path) -> None:
    """/srv/qinglan as image and mounts make it, and the shipped profiles where the image has
    them."""
    text = (ROOT / "docker" / "orchestrator.Dockerfile").read_text(encoding="utf-8")
    for name, place in re.findall(r"^COPY (configs|deployments) (\S+)$", text, flags=re.MULTILINE):
        target = Path(
            place.replace("/opt/orchestrator", str(environment))
        )  # a relative one is below the site
        shutil.copytree(ROOT / name, site / target, dirs_exist_ok=True)
    (site / "configs").mkdir()
    profile = (
        (ROOT / "docker" / "team.example.yaml")
        .read_text(encoding="utf-8")
        .replace("/srv/qinglan", str(site))
    )
    mine = profile.replace("extends: fivedoctors", "extends: mine")
    assert mine != profile
    (site / "configs" / "team.yaml").write_text(mine, encoding="utf-8")
    (site / "configs" / "mine.yaml").write_text(
        "extends: fivedoctors\ndata: {limit: 400}\n", encoding="utf-8"
    )


@pytest.fixture
def services(orchestrator: Path, tmp_path: Path) -> Iterator[Services]:
    subprocess.run(
        ["sh", str(ROOT / "docker" / "make-secrets.sh")],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    lay_out(orchestrator, tmp_path)
    with postgres_server() as server:
        env = {
            "PATH": f"{server.binaries}:/usr/bin:/bin",
            "PGHOST": server.folder,
            "PGPORT": str(server.port),
        }
        env |= {"POSTGRES_USER": "qinglan", "QINGLAN_SECRETS": str(tmp_path / "secrets")}
        subprocess.run(["sh", str(ROOT / "docker" / "postgres-init.sh")], env=env, check=True)
        ports = {name: free_port() for name in ("prefect", "mlflow", "worker", "valkey", "s3")}
        ports["postgres"] = server.port
        started = Services(tmp_path, orchestrator, ports)
        with started.stack:
            yield started


def get(port: int, path: str, host: str) -> int:
    address = f"http://{HOST}:{port}{path}"
    return httpx2.get(address, headers={"Host": host}, trust_env=False, timeout=120).status_code


def test_the_services_of_compose_come_up_and_find_each_other(services: Services) -> None:
    ports = services.ports
    if broker := shutil.which("valkey-server") or shutil.which("redis-server"):
        config = services.folder / "secrets" / "valkey.conf"
        services.spawn(
            "valkey", [broker, str(config), "--port", str(ports["valkey"])], dict(os.environ)
        )
        services.start("prefect", PREFECT_REDIS_MESSAGING_PORT=str(ports["valkey"]))
    else:  # its settings need one
        services.start("prefect", "MESSAGING|ORDERING|LEASE_STORAGE|DOCKET")
    _serve_s3(services)
    services.run("bucket")
    services.run("bucket")  # it is there
    assert (services.folder / "s3" / "mlflow").is_dir()
    allowed: str = COMPOSE["services"]["mlflow"]["environment"]["MLFLOW_SERVER_ALLOWED_HOSTS"]
    default = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", allowed)
    services.start("mlflow", MLFLOW_SERVER_ALLOWED_HOSTS=default)
    services.wait_for("prefect")
    assert get(ports["prefect"], "/api/flows/count", "localhost") in (401, 405), (
        "the server wants its password"
    )
    services.run("deploy")
    services.run("deploy")  # again after every start
    assert _profiles_of_the_form(services) >= {"team", "mine", "fivedoctors", "embedded"}
    services.start("worker", PREFECT_WORKER_WEBSERVER_PORT=str(ports["worker"]))
    services.wait_for("worker")
    assert {pool["name"] for pool in _listed(services, "work_pools")} >= {
        "qinglan",
        "qinglan-trainer",
    }
    wait_until(
        "a worker", lambda: _online_pools(services), explain=lambda: _listed(services, "work_pools")
    )
    assert _online_pools(services) == {"qinglan"}
    services.wait_for("mlflow")
    assert (
        get(ports["mlflow"], "/api/2.0/mlflow/experiments/get?experiment_id=0", "mlflow:5000")
        == 200
    )
    assert (
        get(ports["mlflow"], "/api/2.0/mlflow/experiments/get?experiment_id=0", "evil.example")
        == 403
    )


def _serve_s3(services: Services) -> None:
    """Something that speaks S3, with the keys that compose has."""
    keys = ",".join(
        (services.folder / "secrets" / f"s3_{name}").read_text()
        for name in ("access_key", "secret_key")
    )
    (services.folder / "s3").mkdir()
    rclone, address = (
        Path(sys.executable).with_name("rclone"),
        f"--addr={HOST}:{services.ports['s3']}",
    )
    argv = [str(rclone), "serve", "s3", str(services.folder / "s3"), "--config=", address]
    services.spawn("s3", argv, os.environ | {"RCLONE_AUTH_KEY": f'"{keys}"'})
    read = (services.folder / "s3.log").read_text
    wait_until("the S3 server", lambda: "Starting" in read(), explain=read)


def _listed(services: Services, kind: str) -> list[dict[str, Any]]:
    """Everything of a kind that Prefect's server has."""
    user, password = (services.folder / "secrets" / "prefect_auth").read_text().split(":")
    url = f"http://{HOST}:{services.ports['prefect']}/api/{kind}/filter"
    answer = httpx2.post(url, json={}, auth=(user, password), trust_env=False, timeout=120)
    listed: list[dict[str, Any]] = answer.raise_for_status().json()
    return listed


def _profiles_of_the_form(services: Services) -> set[str]:
    refresh = next(each for each in _listed(services, "deployments") if each["name"] == "refresh")
    profile = refresh["parameter_openapi_schema"]["properties"]["profile"]
    return {name for choice in profile["anyOf"] for name in choice.get("enum", [])}


def _online_pools(services: Services) -> set[str]:
    return {pool["name"] for pool in _listed(services, "work_pools") if pool["status"] == "READY"}
