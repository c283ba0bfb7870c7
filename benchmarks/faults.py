"""The fault matrix: every component with each of its faults, against the real parts.

    make bench NAME=faults                        (200 trials, several hours)
    python benchmarks/faults.py --jobs 4          (four at a time, each in a site of its own)
    python benchmarks/faults.py --only distill    (also `--only "ledger on SQLite"`)
    python benchmarks/faults.py --short           (20 random quick trials, seeded by the date)

It goes on where it was stopped. `--only` makes a component's trials. `--short` writes no result;
with `--only` or `--fault` it makes random trials of those.

A trial is a site of its own in which the fault strikes at a random moment of a component's work and
heals again; the user then gives the same command up to three more times, until it ends well. Then
everything is counted: rows lost, answers paid twice (by the services' own books; a question may be
asked again where its answer was spoiled on its way, or may have been in flight in a process that
was killed), failures that became a score, commands that did not end within their time, and damage
to another run of the same site. Every line of the matrix is tried once, then random ones of those
that need no training. Prints a line a trial and the table, writes benchmarks/results/faults.json,
and exits with 1 where anything was wrong.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import date
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any

import injection
import psutil
from fault_matrix.site import TRAINING, TrialResult, Workplace
from fault_matrix.trials import Line, matrix, random_quick_lines
from night_site.site import small_disk

from qinglan.runs.processes import stop_signals

RESULT = Path(__file__).parent / "results" / "faults.json"
FULL_TRIALS = 200
SHORT_TRIALS = 20
FULL_SECONDS = 300.0
SHORT_SECONDS = 10.0
COUNTS = ("rows_lost", "paid_twice", "failures_as_scores", "hangs", "other_runs_harmed")
Outcome = dict[str, Any]
"""A trial as the results' file keeps it."""
Trial = tuple[Line, int]
"""A line of the matrix and the trial's number."""


def main() -> None:
    """Make the trials that have no result yet, then print and write."""
    lines = list(matrix())
    options = parse_options(lines)
    seed = options.seed or (date.today().toordinal() if options.short else 1)
    seconds = options.seconds or (SHORT_SECONDS if options.short else FULL_SECONDS)
    print(f"seed {seed}", flush=True)
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    earlier = [] if options.short else outcomes_to_keep(commit)
    pending = [
        (line, number)
        for line, number in planned_trials(lines, options, Random(seed))
        if not is_among(earlier, line, number, seed)
    ]
    outcomes = []
    for outcome in outcomes_of(pending, seed, seconds, options.jobs):
        outcome["commit"] = commit
        outcomes.append(outcome)
        print(line_of(outcome), flush=True)
        if not options.short:
            write(earlier + outcomes)
    print("\n".join(table(earlier + outcomes)))
    if not all(outcome["ok"] for outcome in outcomes):
        sys.exit(1)


def parse_options(lines: Sequence[Line]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(
            "What goes wrong, and what comes of it: every component with each of its faults, "
            "against the real parts."
        )
    )
    components = sorted({line.component for line in lines})
    parser.add_argument("--only", metavar="COMPONENT", action="append", choices=components)
    parser.add_argument("--fault", action="append", choices=sorted({line.fault for line in lines}))
    parser.add_argument("--trials", type=int, help=f"{FULL_TRIALS}, or {SHORT_TRIALS} with --short")
    parser.add_argument("--seed", type=int, help="1, or today's date with --short")
    parser.add_argument(
        "--seconds", type=float, help=f"how long servers stay down; {FULL_SECONDS:g}"
    )
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument(
        "--short", action="store_true", help="random quick trials; nothing is written"
    )
    return parser.parse_args()


def planned_trials(
    lines: Sequence[Line], options: argparse.Namespace, rng: Random
) -> Iterator[Trial]:
    """The trials that the options ask for.

    Without `--short`, the plan is drawn before components and faults are chosen from it, so that
    what is chosen are trials of a full session.
    """
    components = options.only or {line.component for line in lines}
    faults = options.fault or {line.fault for line in lines}
    chosen_lines = [line for line in lines if line.component in components and line.fault in faults]
    trials = options.trials or (SHORT_TRIALS if options.short else FULL_TRIALS)
    if options.short and (options.only or options.fault):
        plan = [(rng.choice(chosen_lines), number) for number in range(trials)]
    elif options.short:
        quick_lines = random_quick_lines(rng, trials, own_disk=can_mount_a_disk())
        plan = [(line, number) for number, line in enumerate(quick_lines)]
    else:
        plan = [(line, 0) for line in lines]
        short_lines = [line for line in lines if line.component not in TRAINING]
        further = range(1, trials - len(plan) + 1)
        plan += [(rng.choice(short_lines), number) for number in further]
    for line, number in plan[:trials]:
        if line.component in components and line.fault in faults:
            yield line, number


def can_mount_a_disk() -> bool:
    """Can a site have a disk of its own on this machine?"""
    with tempfile.TemporaryDirectory() as probe, small_disk(Path(probe) / "disk", 1) as own_disk:
        return own_disk


def outcomes_to_keep(commit: str) -> list[Outcome]:
    """The outcomes in the results' file; after a change, trials that failed are made again."""
    if not RESULT.exists():
        return []
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["ok"] or row["commit"] == commit]


def is_among(outcomes: Sequence[Outcome], line: Line, number: int, seed: int) -> bool:
    """Has this trial an outcome?"""
    name = name_of(line, number, seed)
    return any(name.items() <= outcome.items() for outcome in outcomes)


def name_of(line: Line, number: int, seed: int) -> Outcome:
    """The part of an outcome that names the trial among all."""
    return {"component": line.component, "fault": line.fault, "seed": seed, "number": number}


def outcomes_of(trials: Sequence[Trial], seed: int, seconds: float, jobs: int) -> Iterator[Outcome]:
    """The outcome of each trial, as they end.

    Processes of their own make several trials at a time.
    """
    parts = parts_of(trials)
    # A forked process has the trials already, which hold functions that can't be pickled.
    context = multiprocessing.get_context("fork")
    waiting, ready = context.SimpleQueue(), context.SimpleQueue()
    with (
        tempfile.TemporaryDirectory(prefix="qinglan-faults-", ignore_cleanup_errors=True) as folder,
        stop_signals(),
    ):
        workers = [
            context.Process(
                target=work_off, args=(parts, waiting, ready, seed, seconds, Path(folder, str(job)))
            )
            for job in range(min(jobs, len(parts)))
        ]
        for worker in workers:
            worker.start()
        for number in range(len(parts)):
            waiting.put(number)
        for _ in workers:
            waiting.put(None)
        try:
            for _ in trials:
                wait_for_outcome(ready, workers)
                yield ready.get()
        except BaseException:
            for worker in workers:
                worker.terminate()
            raise
        finally:
            for worker in workers:
                worker.join()


def parts_of(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials by the process that makes them, in the order in which they begin."""
    # Those of training share a prepared site, so one process makes them all; they take longest, so
    # they begin.
    training = [trial for trial in trials if trial[0].component in TRAINING]
    single_trials = [[trial] for trial in trials if trial not in training]
    return [training, *single_trials] if training else single_trials


def wait_for_outcome(ready: "SimpleQueue[Outcome]", workers: Sequence[BaseProcess]) -> None:
    while ready.empty():
        if any(worker.exitcode for worker in workers):
            sys.exit("error: a process that makes trials ended; see above")
        time.sleep(0.1)


def work_off(
    parts: Sequence[Sequence[Trial]],
    waiting: "SimpleQueue[int | None]",
    ready: "SimpleQueue[Outcome]",
    seed: int,
    seconds: float,
    folder: Path,
) -> None:
    """Make the trials of one part after the other, until none waits."""
    folder.mkdir()
    # The first process ends this one by SIGTERM, which must clean up as Ctrl-C does.
    with stop_signals(), closing(Workplace(folder, seconds)) as work:
        for part in iter(waiting.get, None):
            for line, number in parts[part]:
                name = name_of(line, number, seed)
                ready.put(name | outcome_of(work, line, Random(f"{name}")))


def outcome_of(work: Workplace, line: Line, rng: Random) -> Outcome:
    """The outcome of one trial."""
    start = time.monotonic()
    try:
        result = line.trial(work, rng)
    except (TimeoutError, subprocess.TimeoutExpired, psutil.TimeoutExpired) as problem:
        result = TrialResult(f"hung ({problem})", hangs=1, ended_well=False)
    except (LookupError, OSError, AssertionError, subprocess.SubprocessError) as problem:
        message = f"the trial itself failed: {str(problem)[-500:]}"
        result = TrialResult(message, ended_well=False)
    counts = {name: getattr(result, name) for name in (*COUNTS, "repeated")}
    return {
        "expected": line.expected,
        "seen": result.what,
        "ok": result.ok,
        **counts,
        "seconds": round(time.monotonic() - start, 1),
    }


def write(outcomes: list[Outcome]) -> None:
    """Figures over all trials, and a line for each."""
    cases, within = injection.count()
    result = {
        "trials": len(outcomes),
        **totals(outcomes),
        "injections": {"tried": cases, "within": within},
        "rows": outcomes,
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def totals(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Each count over all trials."""
    return {name: sum(map(itemgetter(name), outcomes)) for name in COUNTS}


def line_of(outcome: Outcome) -> str:
    """A trial in one line."""
    wrong = ", ".join(f"{name} {outcome[name]}" for name in COUNTS if outcome[name])
    verdict = "ok" if outcome["ok"] else f"WRONG {wrong}"
    if outcome["repeated"] > 0:
        verdict += f", {outcome['repeated']} asked again"
    name = f"{outcome['component']:<20} {outcome['fault']:<26} {outcome['seconds']:>6.1f} s"
    return f"{name}  {verdict}  {outcome['seen']}"


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Markdown: a line of the matrix a line."""
    yield "\n| component | fault | expected | trials | ok | seen |"
    yield "| --- | --- | --- | ---: | ---: | --- |"
    for line in matrix():
        trials = [
            outcome
            for outcome in outcomes
            if (outcome["component"], outcome["fault"]) == (line.component, line.fault)
        ]
        if trials:
            worst = min(trials, key=lambda outcome: outcome["ok"])["seen"].splitlines()[0]
            counts = f"{len(trials)} | {sum(outcome['ok'] for outcome in trials)}"
            yield f"| {line.component} | {line.fault} | {line.expected} | {counts} | {worst} |"
    counts = [f"{name} {total}" for name, total in totals(outcomes).items()]
    yield f"\n{', '.join(counts)}, {len(outcomes)} trials"
    commits = Counter(outcome["commit"] for outcome in outcomes)
    yield ", ".join(f"{count} at {commit}" for commit, count in commits.items())


if __name__ == "__main__":
    main()
