"""docker/trainer.in names what the parts of Qinglan import that run in the trainer's
environment."""

import ast
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from qinglan.runs.code_digest import imported_modules, module_path

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "swift": "ms-swift",
    "transfer_queue": "transferqueue",
    "hydra": "hydra-core",
    "zmq": "pyzmq",
}
"""Distributions of modules, where the name is another."""
WITH_ENGINES = {
    "verl": {"hydra-core", "numpy", "peft", "pyarrow"},
    "hydra-core": {"omegaconf"},
    "ms-swift": {"scipy"},
    "transferqueue": {"pyzmq"},
}
"""Distributions that come with one that is named or comes itself."""
ORCHESTRATOR = ROOT / "qinglan" / "evaluation"
"""Imported by functions of the gradings that only the orchestrator calls."""


def imported() -> set[str]:
    """Distributions that reward, recipes and engines import, also by way of the rest of the
    core."""
    # Recipes are loaded by name, without an import.
    to_read = [
        *(ROOT / "qinglan" / "training" / "engines").glob("*.py"),
        *(ROOT / "qinglan" / "recipes").glob("*.py"),
    ]
    own_files = set(to_read)
    outside = set()
    while to_read:
        for module in imported_modules(ast.parse(to_read.pop().read_bytes())):
            path = module_path(module) if module.startswith("qinglan.") else None
            if path and ORCHESTRATOR in path.parents:
                continue
            package = module.split(".")[0]
            if path and path not in own_files:
                own_files.add(path)
                to_read.append(path)
            elif package not in {"qinglan", *sys.stdlib_module_names}:
                outside.add(package)
    return {DISTRIBUTIONS.get(package, package) for package in outside}


def requirements(environment: str = "trainer") -> dict[str, str]:
    """Distributions, with versions, that the image or the environment with vLLM on the CPU is asked
    to have."""
    text = (ROOT / "docker" / f"{environment}.in").read_text(encoding="utf-8")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {re.split(r"[\[=>]", line)[0]: line for line in lines if line}


def locked(file: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([^#\s]\S*)==(\S+)", (ROOT / file).read_text(encoding="utf-8")))


def test_every_import_is_installed_or_comes_with_an_engine() -> None:
    installed = set(requirements())
    assert {"verl", "ms-swift", "openai"} <= installed
    missing_names = imported() - installed - set.union(*WITH_ENGINES.values())
    assert missing_names - {"safetensors", "huggingface_hub"} == set(), "transformers brings both"
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    for carrier, brought in WITH_ENGINES.items():
        required = importlib.metadata.requires(carrier) or []
        names = {re.split(r"[!<>=;\[ (]", line)[0].lower() for line in required}
        assert brought <= names, carrier


@pytest.mark.parametrize("environment", ["trainer", "trainer-cpu"])
def test_a_lock_has_what_is_asked_for_at_the_versions_of_our_own_environment(
    environment: str,
) -> None:
    ours = locked("requirements.lock")
    there = locked(f"docker/{environment}.lock")
    for name in ("ms-swift", "ray", "transferqueue", "tensordict", "mlflow", "verl"):
        assert there[name] == ours[name], name
    for name, requirement in requirements(environment).items():
        assert there[name] in Requirement(requirement).specifier, requirement
    assert "prefect" not in there
    assert [version for version in there.values() if "+cpu" in version] == []
    cuda = {"torch", "nvidia-cublas", "nvidia-nccl-cu13"}
    assert cuda & there.keys() == (cuda if environment == "trainer" else set())
    assert {"openai", "jmespath", "psycopg"} <= requirements(environment).keys()
