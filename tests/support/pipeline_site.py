"""A small real run of the whole DAG in a working folder of its own, as a user starts it."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
from waiting import wait_until

SMALL = {
    "embedded.sample_train_rows": 240,
    "embedded.sample_dev_rows": 40,
    "embedded.sample_test_rows": 60,
    "embedded.pretrain_steps": 40,
    "embedded.teacher_latency_ms": 40,
    "teacher.concurrency": 4,
    "distill.batch_rows": 40,
    "sft.num_train_epochs": 2,
    "sft.save_steps": 8,
    "sft.eval_steps": 8,
    "rl.total_steps": 3,
    "rl.train_batch_size": 16,
    "rl.ppo_mini_batch_size": 16,
    "rl.ppo_micro_batch_size_per_gpu": 16,
    "rl.save_freq": 1,
    "rl.test_freq": 1,
    "evaluate.latency_queries": 5,
}
ROWS = 340


class Site:
    """A user's working directory."""

    def __init__(
        self, root: Path, profile: str = "embedded", settings: Mapping[str, Any] = SMALL
    ) -> None:
        self.root = root
        values = {**settings, "paths.runs": root / "runs", "paths.state": root / "state"}
        self.command = [sys.executable, "-m", "qinglan.cli", "run", "pipeline"]
        self.command += ["--profile", profile]
        for key, value in values.items():
            self.command += ["--set", f"{key}={value}"]
        self.log = root / "terminal.log"

    def start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.root)

    def run(self) -> None:
        assert self.start().wait(timeout=1800) == 0, self.log.read_text()[-4000:]

    def kill_when(self, ready: Callable[[], bool]) -> None:
        """Kill -9 the flow's process, and only that, as soon as `ready`."""
        process = self.start()
        wait_until(
            "the moment to kill",
            lambda: ready() or process.poll() is not None,
            1200,
            explain=self.log.read_text,
            look_every_s=0.05,
        )
        assert process.poll() is None, self.log.read_text()[-4000:]
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=300)
        assert not alive, f"left behind: {[process.cmdline() for process in alive]}"

    def found(self, pattern: str) -> bool:
        return any(self.root.glob(pattern))

    def paid(self, role: str) -> int:
        path = self.root / "state" / "ledger.db"
        if not path.exists():
            return 0
        with closing(sqlite3.connect(path)) as connection:
            try:
                (count,) = connection.execute(
                    "SELECT count(*) FROM calls WHERE role = ?", (role,)
                ).fetchone()
            except sqlite3.OperationalError:
                # The table is not created yet.
                return 0
        return int(count)

    @property
    def run_directory(self) -> Path:
        return (self.root / "runs" / "latest").resolve()

    def report(self) -> dict[str, Any]:
        return json.loads((self.run_directory / "report.json").read_text())
