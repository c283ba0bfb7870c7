"""What the Dockerfiles install, installed; and compose.yaml tried in containers, where there are any.

The steps of a Dockerfile run as they stand there, in a folder that holds what it copies, with /opt and /srv elsewhere,
and with uv in place of pip, which takes minutes more for the same files.
Only the trainer's engines, some gigabytes of CUDA libraries, are looked up and not installed.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.extended]
ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
STEP_S = 600
"""For an install step; then `timeout` ends it, uv included, with status 124."""
# The packages that the reward and the engines' scripts are imported with; the lock has their versions.
IMPORTED_WITH = """
aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl idna openai httpx2 httpcore2
h11 anyio sniffio certifi truststore distro jiter tqdm typing-extensions pydantic pydantic-core pyyaml filelock
annotated-types typing-inspection sqlalchemy greenlet psycopg psycopg-binary psutil jieba numpy pyarrow setuptools
jmespath
"""


def steps(image: str) -> list[str]:
    """The RUN instructions that install Python packages."""
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).replace("${LOCK}", f"docker/{image}.lock")
    runs = re.findall(r"^RUN (?:--mount=\S+ +)*(.+)", text, flags=re.MULTILINE)
    return [run for run in runs if "pip install" in run]


def build(image: str, folder: Path, change: Callable[[str], str] = str) -> Path:
    """Run the install steps of an image below `folder`; its environment.

    Args:
        change: of each step, before it runs.
    """
    context, environment = folder / "build", folder / image
    context.mkdir(parents=True)
    for name in ("docker", "qinglan", "flows", "tasks"):
        # Links stay links, as COPY leaves them.
        shutil.copytree(ROOT / name, context / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context)
    # The interpreter that the tests have is the image's version.
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    for step in steps(image):
        here = step.replace(f"/opt/{image}/bin/pip install", f"uv pip install --quiet --python {environment}")
        done = subprocess.run(
            ["timeout", str(STEP_S), "sh", "-e", "-c", change(here.replace(f"/opt/{image}", str(environment)))],
            cwd=context,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{done.returncode}: {step}\n{done.stdout}\n{done.stderr}"
    return environment


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("orchestrator", tmp_path_factory.mktemp("orchestrator"))


def test_the_orchestrators_commands_start(orchestrator: Path, tmp_path: Path) -> None:
    def said(*argv: str) -> str:
        env = {"PATH": f"{orchestrator}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(argv, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=600)
        return done.stdout

    assert "doctor" in said("qinglan", "--help")
    assert "3.8.8" in said("prefect", "--version") and "3.17.2" in said("mlflow", "--version")
    assert "torch" not in said("pip", "list")


def test_the_trainers_lock_can_be_had_and_its_parts_of_qinglan_import(tmp_path: Path) -> None:
    pins = _pins("docker/trainer.lock")
    few_pins = {pin: lines for pin, lines in pins.items() if pin.split("==")[0] in IMPORTED_WITH.split()}
    assert len(few_pins) == len(IMPORTED_WITH.split())
    small, unseen = tmp_path / "small.lock", tmp_path / "unseen.txt"
    small.write_text("".join(few_pins.values()), encoding="utf-8")
    # `make setup` has just installed the others.
    unseen.write_text("\n".join(pin for pin in pins if pin not in _pins("requirements.lock")), encoding="utf-8")

    def change(step: str) -> str:
        few = step.replace("docker/trainer.lock", str(small))
        if few == step:
            return step
        # Without hashes, for which uv would fetch the wheels.
        look = step.split("&&")[-1].replace("docker/trainer.lock", str(unseen)).replace("--require-hashes", "--dry-run")
        return f"{few} && {look}"

    build("trainer", tmp_path, change)


def _pins(lock: str) -> dict[str, str]:
    """Each pin, with its lines in the lock: the hashes are among them."""
    entries = re.findall(r"(?m)^[^#\s].*\n(?: .*\n)*", (ROOT / lock).read_text(encoding="utf-8"))
    return {entry.split()[0]: entry for entry in entries}


def test_a_site_in_containers_trains_is_restarted_and_comes_back_from_its_backup() -> None:
    for words in (["docker", "info"], ["docker", "compose", "version"]):
        if not shutil.which("docker") or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("Docker's engine with Compose 2 does not run here: docker/try.sh --install brings it")
    done = subprocess.run(["sh", ROOT / "docker" / "try.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
