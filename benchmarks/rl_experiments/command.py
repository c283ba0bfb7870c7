"""The command: run the experiments that have no result yet, then write the tables.

Results that are there stay if it is stopped.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from filelock import FileLock, Timeout

from qinglan.config import load_profile
from qinglan.errors import EngineError, QinglanError
from qinglan.runs.artifacts import hash_of
from qinglan.runs.launcher import tail
from qinglan.tasks.attempts import digests_of
from qinglan.text import duration, number

from .matrix import EXPERIMENTS, RIVALS, Experiment, Settings
from .results import Result, Site, mean_top1, result_of_run
from .rivals import measure_rival
from .tables import document, seed_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "experiments"
PAGE = RESULTS.with_suffix(".md")
RUNS = ROOT / "runs" / "experiments"
LEDGER_ENV = "QINGLAN_EXPERIMENT_LEDGER"

Groups = dict[str, str]
Job = tuple[Experiment, int]
Measure = Callable[[Experiment, int, Settings, bool], tuple[Result, Groups]]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, run, write."""
    options = _parse(argv)
    if options.list:
        print_list()
        return
    extra = tuple(options.set)
    site = Site(options.results, extra)
    failed: list[str] = []
    if not options.tables_only:
        jobs = chosen(options.only, options.seeds)
        try:
            with FileLock(_existing(RUNS) / ".lock").acquire(blocking=False):
                # Two commands at once would share the cores, and the seconds would tell nothing.
                failed = run_all(jobs, site, measure, extra=extra, fresh=options.fresh)
        except Timeout:
            sys.exit(
                f"error: another experiments command is running in {RUNS}; its timings and yours "
                "would be spoilt"
            )
    page = PAGE if options.results == RESULTS else _existing(options.results) / PAGE.name
    results = site.load()
    groups = site.groups()
    left_out = site.left_out()
    page.write_text(document(results, groups), encoding="utf-8")
    print(f"\n{seed_table(results.get('default', {}), groups)}\n\nAll tables: {page}")
    if left_out:
        print(f"{len(left_out)} results are left out: {'; '.join(left_out)}")
    if failed:
        sys.exit(f"error: {len(failed)} failed: {', '.join(failed)}")


def print_list() -> None:
    """Show every experiment with its seeds."""
    for experiment in EXPERIMENTS.values():
        seeds = ", ".join(map(str, experiment.seeds))
        print(f"{experiment.name:18} seeds {seeds:8} {experiment.title}")
    print(f"{len(EXPERIMENTS)} experiments, {len(chosen([], []))} runs")


def chosen(only: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """The jobs of these experiments and seeds; all if none are named.

    One seed of every experiment comes before the next seed, so that a command that is stopped
    leaves whole tables.
    """
    unknown = [name for name in only if name not in EXPERIMENTS]
    if unknown:
        raise SystemExit(f"error: no experiment `{unknown[0]}`; --list shows them all")
    jobs: list[Job] = []
    for experiment in EXPERIMENTS.values():
        if only and experiment.name not in only:
            continue
        jobs.extend((experiment, seed) for seed in experiment.seeds if not seeds or seed in seeds)
    return sorted(jobs, key=lambda job: job[1])


def run_all(
    jobs: Sequence[Job], site: Site, measure: Measure, *, extra: Settings, fresh: bool
) -> list[str]:
    """Run the jobs that have no result with these settings yet; the names of those that failed.

    Each result is saved as soon as it is there.
    """
    due = [job for job in jobs if fresh or not is_done(site, *job, extra)]
    print(f"{len(jobs) - len(due)} of {len(jobs)} are done, {len(due)} to run", flush=True)
    failed: list[str] = []
    for place, (experiment, seed) in enumerate(due):
        name = f"{experiment.name} seed {seed}"
        print(f"[{place + 1}/{len(due)}] {name}{time_left(due[place:], site)}", flush=True)
        try:
            result, groups = measure(experiment, seed, extra, fresh)
        except QinglanError as error:
            print(f"  failed: {error}", flush=True)
            failed.append(f"{experiment.name}-{seed}")
            continue
        site.save(result, groups)
        top1 = [f"{arm} {number(mean_top1(result, arm))}" for arm in ("teacher", "sft", "rl")]
        alarms = ", ".join(result.alarms) or "none"
        print(
            f"  {duration(result.wall_s)}, top-1: {', '.join(top1)}; alarms: {alarms}", flush=True
        )
    return failed


def is_done(site: Site, experiment: Experiment, seed: int, extra: Settings) -> bool:
    """Is there a result, and of the settings that the matrix has now?"""
    path = site.path(experiment.name, seed)
    if not path.exists():
        return False
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    return bool(settings == [*experiment.settings, *extra])


def time_left(jobs: Iterable[Job], site: Site) -> str:
    """Time that the jobs will take; empty where a trainer has no earlier experiments to tell it."""
    seconds: dict[str, list[float]] = {}
    for name, results in site.load().items():
        trainer_seconds = seconds.setdefault(EXPERIMENTS[name].trainer, [])
        trainer_seconds.extend(result.wall_s for result in results.values())
    trainers = [experiment.trainer for experiment, _ in jobs]
    if any(trainer not in seconds for trainer in trainers):
        return ""
    return f", {duration(sum(fmean(seconds[trainer]) for trainer in trainers))} left"


def measure(
    experiment: Experiment, seed: int, extra: Settings, fresh: bool
) -> tuple[Result, Groups]:
    """Train and evaluate.

    Raises:
        QinglanError: it failed; with the end of the log.
    """
    start = time.monotonic()
    overrides = _overrides(experiment, seed, extra)
    profile = load_profile("embedded", overrides)
    name = f"{experiment.name}-{seed}"
    fields = {
        "experiment": experiment.name,
        "seed": seed,
        "settings": (*experiment.settings, *extra),
        "sources": hash_of(digests_of(profile, "qinglan.tasks.rl")),
        "own_ledger": True,
    }
    if experiment.trainer == "qinglan":
        directory = _pipeline(name, overrides, fresh=fresh)
        result, groups = result_of_run(directory, **fields, wall_s=time.monotonic() - start)
        # Checkpoints are tens of megabytes a run; the model stays.
        shutil.rmtree(directory / "rl" / "checkpoints", ignore_errors=True)
        return result, groups
    # The SFT model, the prompts and the reward of our own run; its stages are reused if it was
    # measured before.
    verl_overrides = _overrides(EXPERIMENTS[RIVALS[0]], seed, extra)
    verl_run = _pipeline(f"{RIVALS[0]}-{seed}", verl_overrides, fresh=False)
    _empty_ledger(name)
    return measure_rival(experiment.trainer, profile, verl_run, fields)


def _overrides(experiment: Experiment, seed: int, extra: Settings) -> Settings:
    site = (
        f"paths.runs={RUNS}",
        f"paths.state={ROOT / '.qinglan'}",
        f"ledger.url_env={LEDGER_ENV}",
    )
    # A champion would be one more arm in every later experiment.
    return (*experiment.settings, *extra, f"rl.seed={seed}", "release.promote=none", *site)


def _empty_ledger(name: str) -> None:
    """Have this process and those that it starts keep answers of judge and RAG in a new ledger."""
    folder = _existing(RUNS / "ledgers")
    for old_file in folder.glob(f"{name}.db*"):
        old_file.unlink()
    os.environ[LEDGER_ENV] = f"sqlite:///{folder / name}.db"


def _pipeline(name: str, overrides: Settings, *, fresh: bool) -> Path:
    """Run the pipeline with an empty ledger; the run's folder."""
    _empty_ledger(name)
    log = RUNS / f"{name}.log"
    argv = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", "embedded"]
    for override in overrides:
        argv += ["--set", override]
    if fresh:
        argv.append("--fresh")
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.run(
            argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if process.returncode:
        raise EngineError(
            f"`qinglan run pipeline` ended with status {process.returncode}; full log: {log}\n"
            f"{tail(log)}"
        )
    return (RUNS / "latest").resolve()


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"The experiments on the embedded task; see {PAGE}."
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these experiments")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[], metavar="SEED", help="these seeds"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="run again what has a result, all stages anew"
    )
    parser.add_argument("--tables-only", action="store_true", help="run nothing, write the tables")
    parser.add_argument("--list", action="store_true", help="show the experiments")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override more, for a trial"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, metavar="DIR", help="where results are kept"
    )
    options = parser.parse_args(argv)
    options.results = options.results.resolve()
    if options.set and options.results == RESULTS:
        parser.error(
            "--set is for trials, whose results don't belong to the others: give --results as well"
        )
    return options
