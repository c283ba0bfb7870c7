"""What goes wrong, and what comes of it: every component with each of its faults, against the real
parts.

    make bench NAME=faults                              (200 trials, several hours; goes on where it
    was stopped) python benchmarks/faults.py --jobs 4                (four trials at a time, each in
    a site of its own) python benchmarks/faults.py --only distill          (also `--only "ledger on
    SQLite"`; a component's trials) python benchmarks/faults.py --short                 (20 random
    quick trials, seeded by the date; writes no result;
                                                         with `--only` or `--fault`, random ones of
                                                         those)

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
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from random import Random
from typing import Any

import injection
import psutil
from fault_matrix.site import TRAINING, Seen, Workplace
from fault_matrix.trials import Line, matrix, random_quick_lines
from night_site.site import small_disk

from qinglan.runs.processes import stop_signals

RESULT = Path(__file__).parent / "results" / "faults.json"
FULL_TRIALS, SHORT_TRIALS = 200, 20
FULL_SECONDS, SHORT_SECONDS = 300.0, 10.0
COUNTS = ("rows_lost", "paid_twice", "failures_as_scores", "hangs", "other_runs_harmed")
Found = dict[str, Any]
Trial = tuple[Line, int]
"""A line of the matrix and the trial's number."""


def main() -> None:
    """Make the trials that have no result yet, then print and write."""
    lines = list(matrix())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        metavar="COMPONENT",
        action="append",
        choices=sorted({one.component for one in lines}),
    )
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
    options = parser.parse_args()
    seed = options.seed or (date.today().toordinal() if options.short else 1)
    trials = options.trials or (SHORT_TRIALS if options.short else FULL_TRIALS)
    print(f"seed {seed}", flush=True)
    rng = Random(seed)
    components = options.only or {line.component for line in lines}
    faults = options.fault or {line.fault for line in lines}
    wanted = [line for line in lines if line.component in components and line.fault in faults]
    if options.short and (options.only or options.fault):
        plan = [(rng.choice(wanted), number) for number in range(trials)]
    elif options.short:
        with (
            tempfile.TemporaryDirectory() as probe,
            small_disk(Path(probe) / "disk", 1) as own_disk,
        ):
            lines_in_turn = random_quick_lines(rng, trials, own_disk=own_disk)
            plan = [(line, number) for number, line in enumerate(lines_in_turn)]
    else:
        plan = [(line, 0) for line in lines]
        short = [line for line in lines if line.component not in TRAINING]
        plan += [(rng.choice(short), number) for number in range(1, trials - len(plan) + 1)]
    chosen = [
        one for one in plan[:trials] if one[0].component in components and one[0].fault in faults
    ]
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    before = (
        json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
        if RESULT.exists() and not options.short
        else []
    )
    known = [
        one for one in before if one["ok"] or one["commit"] == commit
    ]  # after a change, what failed is tried again
    seconds = options.seconds or (SHORT_SECONDS if options.short else FULL_SECONDS)
    left = [
        one for one in chosen if not any(which(*one, seed).items() <= row.items() for row in known)
    ]
    made = []
    for found in outcomes(left, seed, seconds, options.jobs):
        made.append(found | {"commit": commit})
        print(line_of(made[-1]), flush=True)
        if not options.short:
            write(known + made)
    rows = made if options.short else known + made
    print("\n".join(table(rows)))
    if not all(one["ok"] for one in made):
        sys.exit(1)


def which(line: Line, number: int, seed: int) -> Found:
    """What names a trial among all results."""
    return {"component": line.component, "fault": line.fault, "seed": seed, "number": number}


def outcomes(trials: Sequence[Trial], seed: int, seconds: float, jobs: int) -> Iterator[Found]:
    """What came of each, as they end; processes of their own make several at a time."""
    # Those of training share a prepared site, so one process makes them all; they take longest, so
    # they begin.
    training = [one for one in trials if one[0].component in TRAINING]
    parts = [part for part in (training, *([one] for one in trials if one not in training)) if part]
    context = multiprocessing.get_context("fork")
    waiting, done = context.SimpleQueue(), context.SimpleQueue()
    with (
        tempfile.TemporaryDirectory(prefix="qinglan-faults-", ignore_cleanup_errors=True) as folder,
        stop_signals(),
    ):
        places = [Path(folder, str(job)) for job in range(min(jobs, len(parts)))]
        workers = [
            context.Process(target=work_off, args=(parts, waiting, done, seed, seconds, it))
            for it in places
        ]
        for worker in workers:
            worker.start()
        for number in (*range(len(parts)), *(None for _ in workers)):
            waiting.put(number)
        try:
            for _ in trials:
                while done.empty():
                    if any(worker.exitcode for worker in workers):
                        sys.exit("error: a process that makes trials ended; see above")
                    time.sleep(0.1)
                yield done.get()
        except BaseException:
            for worker in workers:
                worker.terminate()
            raise
        finally:
            for worker in workers:
                worker.join()


def work_off(
    parts: Sequence[Sequence[Trial]],
    waiting: "SimpleQueue[int | None]",
    done: "SimpleQueue[Found]",
    seed: int,
    seconds: float,
    folder: Path,
) -> None:
    """Make the trials of one part after the other, until none waits."""
    folder.mkdir()
    with stop_signals(), closing(Workplace(folder, seconds)) as work:
        for part in iter(waiting.get, None):
            for line, number in parts[part]:
                name = which(line, number, seed)
                done.put(name | tried(work, line, Random(f"{name}")))


def tried(work: Workplace, line: Line, rng: Random) -> Found:
    """One trial's outcome."""
    begun = time.monotonic()
    try:
        seen = line.trial(work, rng)
    except (TimeoutError, subprocess.TimeoutExpired, psutil.TimeoutExpired) as problem:
        seen = Seen(f"hung ({problem})", hangs=1, ended_well=False)
    except (LookupError, OSError, AssertionError, subprocess.SubprocessError) as problem:
        seen = Seen(f"the trial itself failed: {str(problem)[-500:]}", ended_well=False)
    counts = {name: getattr(seen, name) for name in (*COUNTS, "repeated")}
    told = {"expected": line.expected, "seen": seen.what, "ok": seen.ok}
    return told | counts | {"seconds": round(time.monotonic() - begun, 1)}


def write(rows: list[Found]) -> None:
    """Figures over all trials, and a line for each."""
    figures = {name: sum(one[name] for one in rows) for name in COUNTS}
    cases, within = injection.count()
    result = {
        "trials": len(rows),
        **figures,
        "injections": {"tried": cases, "within": within},
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def line_of(one: Found) -> str:
    """A trial in one line."""
    wrong = ", ".join(f"{name} {one[name]}" for name in COUNTS if one[name])
    outcome = ("ok" if one["ok"] else f"WRONG {wrong}") + f", {one['repeated']} asked again" * (
        one["repeated"] > 0
    )
    return f"{one['component']:<20} {one['fault']:<26} {one['seconds']:>6.1f} s  {outcome}  {one['seen']}"


def table(rows: list[Found]) -> Iterator[str]:
    """Markdown: a line of the matrix a line."""
    yield "\n| component | fault | expected | trials | ok | seen |\n| --- | --- | --- | ---: | ---: | --- |"
    for line in matrix():
        mine = [
            one for one in rows if (one["component"], one["fault"]) == (line.component, line.fault)
        ]
        if mine:
            worst = min(mine, key=lambda one: one["ok"])["seen"].splitlines()[0]
            ok = sum(one["ok"] for one in mine)
            yield f"| {line.component} | {line.fault} | {line.expected} | {len(mine)} | {ok} | {worst} |"
    yield (
        "\n"
        + ", ".join(f"{name} {sum(one[name] for one in rows)}" for name in COUNTS)
        + f", {len(rows)} trials"
    )
    yield ", ".join(
        f"{count} at {commit}" for commit, count in Counter(one["commit"] for one in rows).items()
    )


if __name__ == "__main__":
    main()
