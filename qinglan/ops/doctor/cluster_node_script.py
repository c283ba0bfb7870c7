"""What a node of the cluster has of what a job needs. Its text is what the job runs: nodes may lack
Qinglan.

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


def describe_node(wanted: dict[str, Any], name: str) -> dict[str, Any]:
    """Write the token into each folder, under the node's name, and report what the node has."""
    failed = {}
    for folder in wanted["folders"]:
        try:
            (Path(folder) / name).write_text(wanted["token"], encoding="ascii")
        except OSError as error:
            failed[folder] = error.strerror or type(error).__name__
    try:
        found: str | None = version("qinglan")
    except PackageNotFoundError:
        found = None
    return {
        "name": name,
        "host": socket.gethostname(),
        "user": os.getuid(),
        "failed": failed,
        "has_python": shutil.which(wanted["python"]) is not None,
        "qinglan": found,
        "missing_packages": [
            each for each in wanted["packages"] if not any(distributions(name=each))
        ],
        "missing_env": [each for each in wanted["env"] if not os.environ.get(each, "").strip()],
    }


def describe_others(wanted: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """The same on every other node, as a task that asks for no resources; and how many did not
    answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False, logging_level="ERROR")
    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    task = ray.remote(num_cpus=0, max_retries=0)(describe_node)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(other, soft=False)).remote(
            wanted, f"node-{i}"
        )
        for i, other in enumerate(others)
    ]
    answered, silent = (
        ray.wait(asked, num_returns=len(asked), timeout=_OTHERS_WITHIN_S) if asked else ([], [])
    )
    return ray.get(answered), len(silent)


def main() -> None:
    wanted = json.loads(sys.argv[1])
    found, silent = [describe_node(wanted, "driver")], 0
    if wanted["nodes"] > 1 and "ray" not in found[0]["missing_packages"]:
        others, silent = describe_others(wanted)
        found += others
    print(MARK + json.dumps({"nodes": found, "silent": silent}), flush=True)  # noqa: T201 (to doctor)
    sys.exit(any(node["failed"] for node in found))


if __name__ == "__main__":
    main()
