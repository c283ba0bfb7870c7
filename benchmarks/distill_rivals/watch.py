"""Runs a contestant and measures it from outside: CPU seconds and memory of its whole process tree.

The CPU counters are read a few times a second with the system's monotonic clock, which the server
uses too, so that the CPU between its first request and its last answer can be told from imports and
clean-up, the same way for all.
"""

import os
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_EVERY_S = 0.2
Part = str
"""`client` asks the questions; `prefect` is Prefect's server; `simulator` is the embedded RAG."""


@dataclass
class Watched:
    """The time and memory that a process tree took."""

    returncode: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of all processes that were waited for, imports and clean-up included."""
    peak_rss_mb: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    samples: list[tuple[float, dict[Part, float]]] = field(default_factory=list)
    """Monotonic time, and the CPU seconds up to then."""

    def cpu_between(self, start_s: float, end_s: float, part: Part = "client") -> float:
        """CPU seconds between two moments, interpolated."""
        return self._cpu_at(end_s, part) - self._cpu_at(start_s, part)

    def _cpu_at(self, moment_s: float, part: Part) -> float:
        before_s = 0.0
        cpu_before = 0.0
        for sample_s, cpu_of_parts in self.samples:
            cpu = cpu_of_parts.get(part, 0.0)
            if sample_s >= moment_s:
                share = (moment_s - before_s) / (sample_s - before_s)
                return cpu_before + share * (cpu - cpu_before)
            before_s = sample_s
            cpu_before = cpu
        return cpu_before


def watch(argv: list[str], env: dict[str, str], log: Path, timeout_s: float) -> Watched:
    """Run to the end; output goes to `log`.

    A process that takes longer than `timeout_s` is killed.
    """
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    result = Watched()
    ended = threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, result, ended))
    sampler.start()
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    # Not `process.wait()`, which does not tell what the process used.
    _, status, usage = os.wait4(process.pid, 0)
    result.wall_s = time.monotonic() - start_s
    result.cpu_s = usage.ru_utime + usage.ru_stime
    result.returncode = process.returncode = os.waitstatus_to_exitcode(status)
    killer.cancel()
    ended.set()
    sampler.join()
    return result


def _sample(pid: int, result: Watched, ended: threading.Event) -> None:
    root = psutil.Process(pid)
    cpu_s: dict[int, float] = {}
    parts: dict[int, Part] = {}
    while not ended.wait(_EVERY_S):
        rss_mb: dict[Part, float] = defaultdict(float)
        try:
            tree = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in tree:
            try:
                times = process.cpu_times()
                memory_mb = process.memory_info().rss / 1e6
                # A fork may yet become something else than its parent.
                if parts.get(process.pid, "client") == "client":
                    parts[process.pid] = _part_of(process.cmdline())
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            cpu_s[process.pid] = times.user + times.system
            rss_mb[parts[process.pid]] += memory_mb
        total_s: dict[Part, float] = defaultdict(float)
        # Processes that have ended count with the last that was seen of them.
        for process_id, seconds in cpu_s.items():
            total_s[parts[process_id]] += seconds
        result.samples.append((time.monotonic(), dict(total_s)))
        for part, memory_mb in rss_mb.items():
            result.peak_rss_mb[part] = max(result.peak_rss_mb[part], memory_mb)


def _part_of(command: list[str]) -> Part:
    text = " ".join(command)
    if "prefect" in text and "server" in text:
        return "prefect"
    return "simulator" if "qinglan.simulators" in text else "client"
