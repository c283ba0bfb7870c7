"""Describes a node of the cluster to doctor. Its text is what the job runs: nodes may lack Qinglan.

    python -c TEXT '{"token": …, "folders": …, "python": …, "packages": …, "env": …, "nodes": 2}'

Prints one line for `cluster.py` and exits with 1 where a folder could not be written to.
"""

import json
import os
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

MARK = "qinglan-doctor "
_OTHERS_WITHIN_S = 12.0


def describe_node(request: dict[str, Any], name: str) -> dict[str, Any]:
    """Write the token into each folder, under the node's name, and report what the node has."""
    failed = {}
    for folder in request["folders"]:
        try:
            (Path(folder) / name).write_text(request["token"], encoding="ascii")
        except OSError as error:
            failed[folder] = error.strerror or type(error).__name__
    try:
        qinglan: str | None = version("qinglan")
    except PackageNotFoundError:
        qinglan = None
    return {
        "name": name,
        "host": socket.gethostname(),
        "user": os.getuid(),
        "failed": failed,
        "has_python": shutil.which(request["python"]) is not None,
        "qinglan": qinglan,
        "missing_packages": [
            package for package in request["packages"] if not _has_package(package)
        ],
        "missing_env": [variable for variable in request["env"] if not _has_variable(variable)],
    }


def describe_others(request: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Describe every other node, by a task that asks for no resources.

    Returns the descriptions, and how many nodes did not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False, logging_level="ERROR")
    here = ray.get_runtime_context().get_node_id()
    task = ray.remote(num_cpus=0, max_retries=0)(describe_node)
    answers: list[object] = []
    for node in ray.nodes():
        if not node["Alive"] or node["NodeID"] == here:
            continue
        # Strictly on this node: elsewhere it would describe another one.
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        name = f"node-{len(answers)}"
        answers.append(task.options(scheduling_strategy=there).remote(request, name))
    if not answers:
        return [], 0
    answered, silent = ray.wait(answers, num_returns=len(answers), timeout=_OTHERS_WITHIN_S)
    return ray.get(answered), len(silent)


def main() -> None:
    request = json.loads(sys.argv[1])
    nodes = [describe_node(request, "driver")]
    silent = 0
    if request["nodes"] > 1 and "ray" not in nodes[0]["missing_packages"]:
        other_nodes, silent = describe_others(request)
        nodes += other_nodes
    print(MARK + json.dumps({"nodes": nodes, "silent": silent}), flush=True)  # noqa: T201 (to doctor)
    sys.exit(any(node["failed"] for node in nodes))


def _has_package(name: str) -> bool:
    """Tell whether a distribution of this very name is installed."""
    return any(distributions(name=name))


def _has_variable(name: str) -> bool:
    return bool(os.environ.get(name, "").strip())


if __name__ == "__main__":
    main()
