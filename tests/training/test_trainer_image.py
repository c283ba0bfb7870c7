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
}
DISTRIBUTIONS |= {"zmq": "pyzmq"}
"""Of modules, where the name is another."""
WITH_ENGINES = {
    "verl": {"hydra-core", "numpy", "peft", "pyarrow"},
    "hydra-core": {"omegaconf"},
    "ms-swift": {"scipy"},
}
WITH_ENGINES |= {"transferqueue": {"pyzmq"}}
"""What comes with a distribution that is named or comes itself."""
ORCHESTRATOR = ROOT / "qinglan" / "evaluation"
"""Imported by functions of the gradings that only the orchestrator calls."""


def imported() -> set[str]:
    """Distributions that reward, recipes and engines import, also by way of the rest of the
    core."""
    folders = ("training/engines", "recipes")  # recipes are loaded by name, without an import
    todo = [path for folder in folders for path in (ROOT / "qinglan" / folder).glob("*.py")]
    seen, outside = set(todo), set()
    while todo:
        for module in imported_modules(ast.parse(todo.pop().read_bytes())):
            path = module_path(module) if module.startswith("qinglan.") else None
            if path and ORCHESTRATOR in path.parents:
                continue
            if path and path not in seen:
                seen.add(path)
                todo.append(path)
            elif module.split(".")[0] not in {"qinglan", *sys.stdlib_module_names}:
                outside.add(module.split(".")[0])
    return {DISTRIBUTIONS.get(module, module) for module in outside}


def requirements(environment: str = "trainer") -> dict[str, str]:
    """What the image, or the environment with vLLM on the CPU, is asked to have: names with
    versions."""
    needed = (ROOT / "docker" / f"{environment}.in").read_text(encoding="utf-8")
    lines = (line.split("#")[0].strip() for line in needed.splitlines())
    return {re.split(r"[\[=>]", line)[0]: line for line in lines if line}


def locked(file: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([^#\s]\S*)==(\S+)", (ROOT / file).read_text(encoding="utf-8")))


def test_every_import_is_installed_or_comes_with_an_engine() -> None:
    named = set(requirements())
    assert {"verl", "ms-swift", "openai"} <= named
    missing = imported() - named - set.union(*WITH_ENGINES.values())
    assert missing - {"safetensors", "huggingface_hub"} == set(), "transformers brings both"
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    for carrier, brought in WITH_ENGINES.items():
        needed = importlib.metadata.requires(carrier) or []
        assert brought <= {re.split(r"[!<>=;\[ (]", each)[0].lower() for each in needed}, carrier


@pytest.mark.parametrize("environment", ["trainer", "trainer-cpu"])
def test_a_lock_has_what_is_asked_for_at_the_versions_of_our_own_environment(
    environment: str,
) -> None:
    ours, there = locked("requirements.lock"), locked(f"docker/{environment}.lock")
    for name in ("ms-swift", "ray", "transferqueue", "tensordict", "mlflow", "verl"):
        assert there[name] == ours[name], name
    for name, requirement in requirements(environment).items():
        assert there[name] in Requirement(requirement).specifier, requirement
    assert "prefect" not in there and not any("+cpu" in version for version in there.values())
    cuda = {"torch", "nvidia-cublas", "nvidia-nccl-cu13"}
    assert cuda & there.keys() == (cuda if environment == "trainer" else set())
    assert {"openai", "jmespath", "psycopg"} <= requirements(environment).keys()
