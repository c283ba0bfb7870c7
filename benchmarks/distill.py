"""Distillation against the physical limit, and against the plan's own script, curator and
distilabel.

    make bench NAME=distill                             (10,000 rows, about ten minutes) ROWS=300
    RIVALS=curator make bench NAME=distill     (a trial, beside one rival; RIVALS= for none)

All contestants ask the same questions of the same server, which answers after 200 ms, with 64
requests under way at once. Nothing is pinned: server, clients and Prefect share the machine's
cores, for all alike. Then ours alone: faults, reruns, new rows, a budget. Prints both tables; a
full run also writes benchmarks/results/distill.json. Rivals are installed into environments of
their own, see distill_rivals/envs.py.
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
CHOSEN = os.environ.get("RIVALS", " ".join(PACKAGES)).split()
CONCURRENCY, LATENCY_S = 64, 0.2
FAULT_SHARE, TIMEOUT_S = 0.05, 0.6
USD_PER_MILLION = {
    "input_per_million_usd": 10.0,
    "output_per_million_usd": 100.0,
}  # half a cent a row
USD_PER_ROW = (10.0 * latency_server.PROMPT_TOKENS + 100.0 * latency_server.COMPLETION_TOKENS) / 1e6
HERE = Path(__file__).parent
RIVALS = HERE / "distill_rivals"
RESULT = HERE / "results" / "distill.json"
_LONGEST_S = 1800.0


@dataclass(frozen=True)
class Bench:
    """What all measurements share."""

    folder: Path
    url: str
    """Of the server, without `/v1`."""

    def reset(self, fault_share: float = 0.0) -> None:
        """Count anew from here."""
        settings = {"latency_s": LATENCY_S, "fault_share": fault_share, "seed": 1}
        httpx2.post(f"{self.url}/reset", json=settings, trust_env=False).raise_for_status()

    def stats(self) -> dict[str, Any]:
        """What the server counted."""
        found: dict[str, Any] = (
            httpx2.get(f"{self.url}/stats", trust_env=False).raise_for_status().json()
        )
        return found


def main() -> None:
    """Measure, print, write."""
    RESULT.parent.mkdir(exist_ok=True)
    asked, new = list(questions(ROWS)), list(questions(max(1, ROWS // 100), start=ROWS))
    with tempfile.TemporaryDirectory(prefix="qinglan-bench-") as folder, _server() as url:
        bench = Bench(Path(folder), url)
        ours, scenarios = measure_ours(bench, asked, new)
        contestants = [ours, *(measure_rival(bench, name, asked, new) for name in CHOSEN)]
    result: dict[str, Any] = {
        "rows": ROWS,
        "concurrency": CONCURRENCY,
        "latency_s": LATENCY_S,
        "ideal_rows_per_s": CONCURRENCY / LATENCY_S,
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg(),
        },
        "contestants": contestants,
        "scenarios": scenarios,
    }
    result["targets"] = verdicts(result)
    if ROWS >= FULL_ROWS and set(CHOSEN) == set(PACKAGES):
        RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print("\n".join(["", *contestants_table(result), "", *scenarios_table(result), ""]))
    for target in result["targets"]:
        print(
            f"{'met   ' if target['met'] else 'MISSED'}  {target['target']}: {target['measured']}"
        )


def measure_ours(
    bench: Bench, asked: list[Question], new: list[Question]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contestant's figures, and the scenarios'."""
    book = write_workbook(bench.folder / "questions.csv", asked)
    first = run_ours(bench, "first", book, "main")
    grown = write_workbook(bench.folder / "grown.csv", asked + new)
    budget = f"budget.per_run_usd={0.1 * ROWS * USD_PER_ROW}"
    scenarios = {
        "fault-free": first,
        "faults": run_ours(
            bench,
            "faults",
            book,
            "faults",
            f"teacher.timeout_s={TIMEOUT_S}",
            fault_share=FAULT_SHARE,
        ),
        "rerun": run_ours(bench, "rerun", book, "main"),
        "recomputed": run_ours(bench, "recomputed", book, "main", fresh=True),
        "new rows": run_ours(bench, "new-rows", grown, "main") | {"new": len(new)},
        "budget": run_ours(bench, "budget", book, "budget", budget),
    }
    for scenario in scenarios.values():
        scenario["usd"] = scenario["server"]["answered"] * USD_PER_ROW
    scenarios["budget"] |= {
        "cap_usd": 0.1 * ROWS * USD_PER_ROW,
        "in_flight_usd": CONCURRENCY * USD_PER_ROW,
    }
    grown_run = scenarios["new rows"]
    again = {
        "calls_with_new": grown_run["server"]["calls"],
        "rows_with_new": grown_run.get("rows_out", 0),
    }
    ours = {"name": "Qinglan, in a Prefect flow", "rows": first.get("rows_out", 0)}
    return first | again | ours, scenarios


def run_ours(
    bench: Bench,
    name: str,
    book: Path,
    site: str,
    *settings: str,
    fault_share: float = 0.0,
    fresh: bool = False,
) -> dict[str, Any]:
    """One flow run; `site` has the ledger and the earlier runs."""
    _say(f"ours: {name}")
    prices = json.dumps(USD_PER_MILLION)
    endpoint = (
        f"base_url={bench.url}/v1",
        f"model={latency_server.MODEL}",
        f"concurrency={CONCURRENCY}",
    )
    common = (
        f"data.workbook={book}",
        *(f"{role}.{setting}" for role in ("teacher", "judge") for setting in endpoint),
        f"prices.{latency_server.MODEL}={prices}",
        f"paths.runs={bench.folder / site / 'runs'}",
        f"paths.state={bench.folder / site / 'state'}",
        f"tracking.uri=sqlite:///{bench.folder / 'mlflow.db'}",
    )
    out = bench.folder / f"{name}.json"
    argv = [
        sys.executable,
        str(RIVALS / "qinglan_flow.py"),
        str(out),
        "fresh" if fresh else "reuse",
    ]
    env = {
        **os.environ,
        "PREFECT_HOME": str(bench.folder / "prefect"),
        "PYTHONPATH": str(HERE.parent),
    }
    found, watched = _measure(bench, name, [*argv, *common, *settings], env, fault_share)
    if "failed" in found:
        sys.exit(f"error: {name}: {found['failed']}")
    found |= json.loads(out.read_text(encoding="utf-8"))
    if "error" in found:
        print(f"  {found['error']}", flush=True)
    start_s, end_s = found.pop("distill_start_s"), found.pop("distill_end_s")
    found |= {"stage_s": end_s - start_s, "ingest_s": start_s - found.pop("ingest_start_s")}
    found["stage_cpu_s"] = watched.cpu_between(start_s, end_s)
    found["prefect_cpu_s"] = watched.cpu_between(start_s, end_s, "prefect")
    return found


def measure_rival(
    bench: Bench, rival: str, asked: list[Question], new: list[Question]
) -> dict[str, Any]:
    """All rows in a fresh environment, then again with some new ones, which shows what its cache is
    worth."""
    _say(f"rival: {rival}")
    try:
        python = python_of(rival)
    except NotInstalledError as error:
        return {"name": rival, "packages": PACKAGES[rival], "failed": f"not installed: {error}"}
    home = bench.folder / rival
    home.mkdir()
    script = RIVALS / (f"{rival}.py" if rival.endswith("_script") else f"{rival}_script.py")

    def ask(name: str, questions: list[Question]) -> dict[str, Any]:
        prompts = write_prompts(home / f"{name}.jsonl", questions, load_profile("embedded").tenant)
        arguments = [
            str(prompts),
            f"{bench.url}/v1",
            latency_server.MODEL,
            str(CONCURRENCY),
            str(home),
        ]
        label = f"{rival}-{name}"
        found, _ = _measure(bench, label, [python, str(script), *arguments], offline_env(home), 0.0)
        if "failed" not in found:  # the script's last line says how many rows came out
            found |= json.loads(tail(bench.folder / f"{label}.log").splitlines()[-1])
        return found

    found = {"name": rival, "packages": PACKAGES[rival], **ask("all", asked)}
    if "failed" not in found:
        grown = ask("grown", asked + new)
        found |= {"calls_with_new": grown["server"]["calls"], "rows_with_new": grown["rows"]}
    return found


def _measure(
    bench: Bench, name: str, argv: list[str], env: dict[str, str], fault_share: float
) -> tuple[dict[str, Any], Watched]:
    bench.reset(fault_share)
    log = bench.folder / f"{name}.log"
    watched = watch(argv, env, log, _LONGEST_S)
    stats = bench.stats()
    span_s = stats["last_s"] - stats["first_s"]
    found: dict[str, Any] = {
        "server": stats,
        "load_at_end": os.getloadavg()[0],
        "span_s": span_s,
        "rows_per_s": stats["answered"] / span_s if stats["answered"] else 0.0,
        "span_cpu_s": watched.cpu_between(stats["first_s"], stats["last_s"])
        if stats["answered"]
        else 0.0,
        "process_wall_s": watched.wall_s,
        "process_cpu_s": watched.cpu_s,
        "peak_rss_mb": dict(watched.peak_rss_mb),
    }
    if watched.returncode:
        found["failed"] = (
            f"exit status {watched.returncode}: {(tail(log).splitlines() or ['no output'])[-1]}"
        )
        print(f"  {found['failed']}", flush=True)
    return found, watched


@contextmanager
def _server() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(RIVALS / "latency_server.py"), "0"], stdout=subprocess.PIPE, text=True
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
