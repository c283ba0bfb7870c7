"""The command: run what has no result yet, then write the tables. What is done stays done if it is
stopped."""

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
        for experiment in EXPERIMENTS.values():
            print(
                f"{experiment.name:18} seeds {', '.join(map(str, experiment.seeds)):8} {experiment.title}"
            )
        print(f"{len(EXPERIMENTS)} experiments, {len(chosen([], []))} runs")
        return
    extra = tuple(options.set)
    site = Site(options.results, extra)
    failed: list[str] = []
    if not options.tables_only:
        jobs = chosen(options.only, options.seeds)
        try:
            with FileLock(_made(RUNS) / ".lock").acquire(blocking=False):
                failed = run_all(jobs, site, measure, extra=extra, fresh=options.fresh)
        except Timeout:
            sys.exit(
                f"error: another experiments command is running in {RUNS}; its timings and yours would be spoilt"
            )
    page = PAGE if options.results == RESULTS else _made(options.results) / PAGE.name
    results, groups, left_out = site.load(), site.groups(), site.left_out()
    page.write_text(document(results, groups), encoding="utf-8")
    print(f"\n{seed_table(results.get('default', {}), groups)}\n\nAll tables: {page}")
    if left_out:
        print(f"{len(left_out)} results are left out: {'; '.join(left_out)}")
    if failed:
        sys.exit(f"error: {len(failed)} failed: {', '.join(failed)}")


def chosen(only: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """One seed of every experiment before the next seed, so that a command that is stopped leaves
    whole tables."""
    if unknown := [name for name in only if name not in EXPERIMENTS]:
        raise SystemExit(f"error: no experiment `{unknown[0]}`; --list shows them all")
    picked = [
        experiment for experiment in EXPERIMENTS.values() if not only or experiment.name in only
    ]
    jobs = [
        (experiment, seed)
        for experiment in picked
        for seed in experiment.seeds
        if not seeds or seed in seeds
    ]
    return sorted(jobs, key=lambda job: job[1])


def run_all(
    jobs: Sequence[Job], site: Site, measure: Measure, *, extra: Settings, fresh: bool
) -> list[str]:
    """Run what has no result with these settings yet, saving each as soon as it is there; returns
    what failed."""
    due = [job for job in jobs if fresh or not is_done(site, *job, extra)]
    print(f"{len(jobs) - len(due)} of {len(jobs)} are done, {len(due)} to run", flush=True)
    failed: list[str] = []
    for place, (experiment, seed) in enumerate(due):
        print(
            f"[{place + 1}/{len(due)}] {experiment.name} seed {seed}{time_left(due[place:], site)}",
            flush=True,
        )
        try:
            result, groups = measure(experiment, seed, extra, fresh)
        except QinglanError as error:
            print(f"  failed: {error}", flush=True)
            failed.append(f"{experiment.name}-{seed}")
            continue
        site.save(result, groups)
        arms = ", ".join(
            f"{arm} {number(mean_top1(result, arm))}" for arm in ("teacher", "sft", "rl")
        )
        print(
            f"  {duration(result.wall_s)}, top-1: {arms}; alarms: {', '.join(result.alarms) or 'none'}",
            flush=True,
        )
    return failed


def is_done(site: Site, experiment: Experiment, seed: int, extra: Settings) -> bool:
    """Whether there is a result, and of the settings that the matrix has now."""
    path = site.path(experiment.name, seed)
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["settings"] == [
        *experiment.settings,
        *extra,
    ]


def time_left(jobs: Iterable[Job], site: Site) -> str:
    """By what earlier experiments took, where there were any with the same trainer."""
    took: dict[str, list[float]] = {}
    for name, seeds in site.load().items():
        took.setdefault(EXPERIMENTS[name].trainer, []).extend(
            result.wall_s for result in seeds.values()
        )
    trainers = [experiment.trainer for experiment, _ in jobs]
    if any(trainer not in took for trainer in trainers):
        return ""
    return f", {duration(sum(fmean(took[trainer]) for trainer in trainers))} left"


def measure(
    experiment: Experiment, seed: int, extra: Settings, fresh: bool
) -> tuple[Result, Groups]:
    """Train and evaluate.

    Raises:
        QinglanError: it failed; with the end of the log.
    """
    settings, overrides = (*experiment.settings, *extra), _overrides(experiment, seed, extra)
    profile, start = load_profile("embedded", overrides), time.monotonic()
    name = f"{experiment.name}-{seed}"
    known = {
        "experiment": experiment.name,
        "seed": seed,
        "settings": settings,
        "sources": hash_of(digests_of(profile, "qinglan.tasks.rl")),
    }
    known["own_ledger"] = True
    if experiment.trainer == "qinglan":
        directory = _pipeline(name, overrides, fresh=fresh)
        result, groups = result_of_run(directory, **known, wall_s=time.monotonic() - start)
        shutil.rmtree(
            directory / "rl" / "checkpoints", ignore_errors=True
        )  # tens of megabytes a run; the model stays
        return result, groups
    # The SFT model, the prompts and the reward of our own run; its stages are reused if it was
    # measured before.
    verl_run = _pipeline(
        f"{RIVALS[0]}-{seed}", _overrides(EXPERIMENTS[RIVALS[0]], seed, extra), fresh=False
    )
    _empty_ledger(name)
    return measure_rival(experiment.trainer, profile, verl_run, known)


def _overrides(experiment: Experiment, seed: int, extra: Settings) -> Settings:
    site = (
        f"paths.runs={RUNS}",
        f"paths.state={ROOT / '.qinglan'}",
        f"ledger.url_env={LEDGER_ENV}",
    )
    # A champion would be one more arm in every later experiment.
    return (*experiment.settings, *extra, f"rl.seed={seed}", "release.promote=none", *site)


def _empty_ledger(name: str) -> None:
    """Where this process and those that it starts keep what judge and RAG answer: nobody has asked
    for it before."""
    folder = _made(RUNS / "ledgers")
    for left in folder.glob(f"{name}.db*"):
        left.unlink()
    os.environ[LEDGER_ENV] = f"sqlite:///{folder / name}.db"


def _pipeline(name: str, overrides: Settings, *, fresh: bool) -> Path:
    _empty_ledger(name)
    log = RUNS / f"{name}.log"
    argv = [sys.executable, "-m", "qinglan.cli", "run", "pipeline", "--profile", "embedded"]
    argv += [word for override in overrides for word in ("--set", override)] + ["--fresh"] * fresh
    with log.open("w", encoding="utf-8") as output:
        ended = subprocess.run(argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        raise EngineError(
            f"`qinglan run pipeline` ended with status {ended.returncode}; full log: {log}\n{tail(log)}"
        )
    return (RUNS / "latest").resolve()


def _made(folder: Path) -> Path:
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
