"""Qinglan's command in a process of its own, away from any Prefect that whoever runs the tests may use."""

import os
import subprocess
import sys
from pathlib import Path


def own_environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | more


def run_qinglan(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """To its end, in this working directory, whatever its status."""
    env = own_environment(PREFECT_HOME=str(folder / "prefect"), PYTHONPATH=str(Path(__file__).parents[2]))
    argv = [sys.executable, "-m", "qinglan.cli", *words]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
