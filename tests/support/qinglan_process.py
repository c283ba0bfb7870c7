"""Qinglan's command in a process of its own, away from any Prefect that the tests' user has."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
from waiting import wait_until


def own_environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return env | more


def run_qinglan(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end in this working directory, whatever its status."""
    env = own_environment(
        PREFECT_HOME=str(folder / "prefect"), PYTHONPATH=str(Path(__file__).parents[2])
    )
    argv = [sys.executable, "-m", "qinglan.cli", *words]
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False
    )


class RunningQinglan:
    """A command that goes on, and a file with its output."""

    def __init__(
        self, log: Path, *words: str, cwd: Path, env: dict[str, str] | None = None
    ) -> None:
        self.log = log
        argv = [sys.executable, "-m", "qinglan.cli", *words]
        with log.open("wb") as output:
            self.process = psutil.Popen(
                argv, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, text: str) -> None:
        wait_until(
            text,
            lambda: text in self.output or self.process.poll() is not None,
            explain=lambda: self.output,
        )
        assert text in self.output, self.output
