"""Distillation against the physical limit, and against rivals: the plan's script and two libraries.

    make bench NAME=distill                             (10,000 rows, about ten minutes)
    ROWS=300 RIVALS=curator make bench NAME=distill     (a trial, beside one rival)
    ROWS=300 RIVALS= make bench NAME=distill            (a trial, beside none)

The rivals are the plan's own script, curator and distilabel. All contestants ask the same questions
of the same server, which answers after 200 ms, with 64 requests under way at once. Nothing is
pinned: server, clients and Prefect share the machine's cores, for all alike. Then ours alone:
faults, reruns, new rows, a budget. Prints both tables; a full run also writes
benchmarks/results/distill.json. Rivals are installed into environments of their own, see
distill_rivals/envs.py.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from distill_rivals import latency_server
from distill_rivals.envs import PACKAGES, NotInstalledError, offline_env, python_of
from distill_rivals.questions import Question, questions, write_prompts, write_workbook
from distill_rivals.tables import contestants_table, scenarios_table, verdicts
from distill_rivals.watch import Watched, watch

from qinglan.config import load_profile
from qinglan.runs.launcher import tail

FULL_ROWS = 10_000
ROWS = int(os.environ.get("ROWS", FULL_ROWS))
RIVALS = os.environ.get("RIVALS", " ".join(PACKAGES)).split()
CONCURRENCY = 64
LATENCY_S = 0.2
FAULT_SHARE = 0.05
TIMEOUT_S = 0.6
# Half a cent a row.
USD_PER_MILLION = {
    "input_per_million_usd": 10.0,
    "output_per_million_usd": 100.0,
}
USD_PER_ROW = (10.0 * latency_server.PROMPT_TOKENS + 100.0 * latency_server.COMPLETION_TOKENS) / 1e6
BUDGET_USD = 0.1 * ROWS * USD_PER_ROW
HERE = Path(__file__).parent
SCRIPTS = HERE / "distill_rivals"
RESULT = HERE / "results" / "distill.json"
_LONGEST_S = 1800.0
Figures = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The folder and the server that all measurements share."""

    folder: Path
    url: str
    """The server's address, without `/v1`."""

    def reset(self, fault_share: float = 0.0) -> None:
        """Count anew from here."""
        settings = {"latency_s": LATENCY_S, "fault_share": fault_share, "seed": 1}
        # A proxy of the user's has no business between the benchmark and its own server.
        httpx2.post(f"{self.url}/reset", json=settings, trust_env=False).raise_for_status()

    def stats(self) -> Figures:
        """The server's counts."""
        response = httpx2.get(f"{self.url}/stats", trust_env=False)
        stats: Figures = response.raise_for_status().json()
        return stats


def main() -> None:
    """Measure, print, write."""
    RESULT.parent.mkdir(exist_ok=True)
    rows = list(questions(ROWS))
    new_rows = list(questions(max(1, ROWS // 100), start=ROWS))
    with tempfile.TemporaryDirectory(prefix="qinglan-bench-") as folder, _server() as url:
        bench = Bench(Path(folder), url)
        ours, scenarios = measure_ours(bench, rows, new_rows)
        rivals = [measure_rival(bench, name, rows, new_rows) for name in RIVALS]
    result: Figures = {
        "rows": ROWS,
        "concurrency": CONCURRENCY,
        "latency_s": LATENCY_S,
        "ideal_rows_per_s": CONCURRENCY / LATENCY_S,
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg(),
        },
        "contestants": [ours, *rivals],
        "scenarios": scenarios,
    }
    result["targets"] = verdicts(result)
    if ROWS >= FULL_ROWS and set(RIVALS) == set(PACKAGES):
        RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(["", *contestants_table(result), "", *scenarios_table(result), ""]))
    for target in result["targets"]:
        verdict = "met   " if target["met"] else "MISSED"
        print(f"{verdict}  {target['target']}: {target['measured']}")


def measure_ours(
    bench: Bench, rows: list[Question], new_rows: list[Question]
) -> tuple[Figures, Figures]:
    """The contestant's figures, and the scenarios'."""
    book = write_workbook(bench.folder / "questions.csv", rows)
    first = run_ours(bench, "first", book, "main")
    grown_book = write_workbook(bench.folder / "grown.csv", rows + new_rows)
    timeout = f"teacher.timeout_s={TIMEOUT_S}"
    # A site of its own: the ledger of the first run would answer everything.
    faults = run_ours(bench, "faults", book, "faults", timeout, fault_share=FAULT_SHARE)
    rerun = run_ours(bench, "rerun", book, "main")
    recomputed = run_ours(bench, "recomputed", book, "main", fresh=True)
    grown = run_ours(bench, "new-rows", grown_book, "main")
    grown["new"] = len(new_rows)
    # A site of its own, for the same reason.
    budget = run_ours(bench, "budget", book, "budget", f"budget.per_run_usd={BUDGET_USD}")
    scenarios = {
        "fault-free": first,
        "faults": faults,
        "rerun": rerun,
        "recomputed": recomputed,
        "new rows": grown,
        "budget": budget,
    }
    for scenario in scenarios.values():
        scenario["usd"] = scenario["server"]["answered"] * USD_PER_ROW
    budget["cap_usd"] = BUDGET_USD
    budget["in_flight_usd"] = CONCURRENCY * USD_PER_ROW
    ours = {
        **first,
        "calls_with_new": grown["server"]["calls"],
        "rows_with_new": grown.get("rows_out", 0),
        "name": "Qinglan, in a Prefect flow",
        "rows": first.get("rows_out", 0),
    }
    return ours, scenarios


def run_ours(
    bench: Bench,
    name: str,
    book: Path,
    site: str,
    *settings: str,
    fault_share: float = 0.0,
    fresh: bool = False,
) -> Figures:
    """One flow run; `site` has the ledger and the earlier runs."""
    _say(f"ours: {name}")
    common = [f"data.workbook={book}"]
    for role in ("teacher", "judge"):
        common += [
            f"{role}.base_url={bench.url}/v1",
            f"{role}.model={latency_server.MODEL}",
            f"{role}.concurrency={CONCURRENCY}",
        ]
    common += [
        f"prices.{latency_server.MODEL}={json.dumps(USD_PER_MILLION)}",
        f"paths.runs={bench.folder / site / 'runs'}",
        f"paths.state={bench.folder / site / 'state'}",
        f"tracking.uri=sqlite:///{bench.folder / 'mlflow.db'}",
    ]
    out = bench.folder / f"{name}.json"
    script = SCRIPTS / "qinglan_flow.py"
    argv = [sys.executable, str(script), str(out), "fresh" if fresh else "reuse"]
    env = {
        **os.environ,
        "PREFECT_HOME": str(bench.folder / "prefect"),
        "PYTHONPATH": str(HERE.parent),
    }
    figures, watched = _measure(bench, name, [*argv, *common, *settings], env, fault_share)
    if "failed" in figures:
        sys.exit(f"error: {name}: {figures['failed']}")
    figures |= json.loads(out.read_text(encoding="utf-8"))
    if "error" in figures:
        print(f"  {figures['error']}", flush=True)
    start_s = figures.pop("distill_start_s")
    end_s = figures.pop("distill_end_s")
    figures["stage_s"] = end_s - start_s
    figures["ingest_s"] = start_s - figures.pop("ingest_start_s")
    figures["stage_cpu_s"] = watched.cpu_between(start_s, end_s)
    figures["prefect_cpu_s"] = watched.cpu_between(start_s, end_s, "prefect")
    return figures


def measure_rival(
    bench: Bench, rival: str, rows: list[Question], new_rows: list[Question]
) -> Figures:
    """All rows in a fresh environment, then again with some new ones.

    The second time shows what the rival's cache is worth.
    """
    _say(f"rival: {rival}")
    name = {"name": rival, "packages": PACKAGES[rival]}
    try:
        python = python_of(rival)
    except NotInstalledError as error:
        return {**name, "failed": f"not installed: {error}"}
    home = bench.folder / rival
    home.mkdir()
    figures = {**name, **ask_rival(bench, rival, python, "all", rows)}
    if "failed" not in figures:
        grown = ask_rival(bench, rival, python, "grown", rows + new_rows)
        figures["calls_with_new"] = grown["server"]["calls"]
        figures["rows_with_new"] = grown["rows"]
    return figures


def ask_rival(bench: Bench, rival: str, python: str, name: str, rows: list[Question]) -> Figures:
    """Run a rival's script once."""
    home = bench.folder / rival
    script = SCRIPTS / f"{rival.removesuffix('_script')}_script.py"
    prompts = write_prompts(home / f"{name}.jsonl", rows, load_profile("embedded").tenant)
    arguments = [
        str(prompts),
        f"{bench.url}/v1",
        latency_server.MODEL,
        str(CONCURRENCY),
        str(home),
    ]
    label = f"{rival}-{name}"
    argv = [python, str(script), *arguments]
    figures, _ = _measure(bench, label, argv, offline_env(home), 0.0)
    if "failed" not in figures:
        # The script's last line says how many rows came out.
        last_line = tail(bench.folder / f"{label}.log").splitlines()[-1]
        figures |= json.loads(last_line)
    return figures


def _measure(
    bench: Bench, name: str, argv: list[str], env: dict[str, str], fault_share: float
) -> tuple[Figures, Watched]:
    """Run a process against the server; what both saw of it."""
    bench.reset(fault_share)
    log = bench.folder / f"{name}.log"
    watched = watch(argv, env, log, _LONGEST_S)
    stats = bench.stats()
    span_s = stats["last_s"] - stats["first_s"]
    rows_per_s = 0.0
    span_cpu_s = 0.0
    if stats["answered"]:
        rows_per_s = stats["answered"] / span_s
        span_cpu_s = watched.cpu_between(stats["first_s"], stats["last_s"])
    figures: Figures = {
        "server": stats,
        "load_at_end": os.getloadavg()[0],
        "span_s": span_s,
        "rows_per_s": rows_per_s,
        "span_cpu_s": span_cpu_s,
        "process_wall_s": watched.wall_s,
        "process_cpu_s": watched.cpu_s,
        "peak_rss_mb": dict(watched.peak_rss_mb),
    }
    if watched.returncode:
        lines = tail(log).splitlines() or ["no output"]
        figures["failed"] = f"exit status {watched.returncode}: {lines[-1]}"
        print(f"  {figures['failed']}", flush=True)
    return figures, watched


@contextmanager
def _server() -> Iterator[str]:
    """The latency server's address, while it serves."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "latency_server.py"), "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _say(text: str) -> None:
    print(f"{text}, load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
