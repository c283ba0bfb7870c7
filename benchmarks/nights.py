"""Thirty nights of a small site, run by its schedule, with something going wrong in nine of ten.

    make bench NAME=nights                (about half an hour)
    NIGHTS=3 make bench NAME=nights       (a trial; writes no result)

A night: new questions are in the workbook, the schedule's clock is moved so that it fires,
`refresh` runs in the worker of `qinglan up`, something breaks, and training starts when enough good
rows came in. Then clean-up runs, its days shortened to minutes. In the morning the benchmark looks
at states, bills, processes and the disk. Prints a line a night, ends with exit status 1 if anything
was wrong, and a full run writes benchmarks/results/nights.json.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from night_site.checks import Night, look, rows_read, trainings
from night_site.faults import CONCURRENCY, FAULTS, QUIET, Fault
from night_site.site import (
    PROFILE,
    WEBHOOK_ENV,
    Json,
    Site,
    questions_and_documents,
    small_disk,
    until,
)

from qinglan.runs.processes import stop_signals

FULL_NIGHTS = 30
NIGHTS = int(os.environ.get("NIGHTS", FULL_NIGHTS))
RESULT = Path(__file__).parent / "results" / "nights.json"
DISK_MB = 400
TRAIN_AT_ROWS = 90
KEPT_DAYS = 6 / 24 / 60
"""Six minutes stand for a week."""
STRIKE_LATENCY_S = 2.0
EVENTS_HELD_BACK_S = 305.0
_NIGHT_WITHIN_S = 420.0
_CLEANED_WITHIN_S = 180.0


def settings(folder: Path, services_url: str) -> Json:
    """The site's profile."""
    chat = {"base_url": f"{services_url}/v1", "max_retries": 4, "concurrency": CONCURRENCY}
    return {
        "extends": "embedded",
        "name": PROFILE,
        "data": {"workbook": str(folder / "questions.xlsx")},
        "teacher": chat,
        "judge": chat,
        "rag": {"url": f"{services_url}/rag/retrieve", "max_retries": 5},
        "distill": {"batch_rows": 10},
        "embedded": {"pretrain_steps": 40},
        "sft": {"num_train_epochs": 1},
        "rl": {
            "total_steps": 2,
            "train_batch_size": 16,
            "ppo_mini_batch_size": 16,
            "ppo_micro_batch_size_per_gpu": 16,
            "save_freq": 1,
            "test_freq": 1,
        },
        "evaluate": {"latency_queries": 3},
        "refresh": {"train_at_new_rows": TRAIN_AT_ROWS},
        "notify": {"webhook_url_env": WEBHOOK_ENV},
        "automations": {"crashed_after_s": 90},
        "retention": {
            "run_days": KEPT_DAYS,
            "unfinished_days": KEPT_DAYS,
            "checkpoint_days": KEPT_DAYS,
            "superseded_days": KEPT_DAYS,
            "dataset_days": KEPT_DAYS,
            "mlflow_days": KEPT_DAYS,
            "flow_run_days": KEPT_DAYS,
            "min_free_mb": 20,
        },
        "paths": {"runs": str(folder / "runs"), "state": str(folder / "state")},
    }


def main() -> None:
    """Live through the nights."""
    nights: list[Night] = []
    with (
        stop_signals(),
        tempfile.TemporaryDirectory(prefix="qinglan-nights-") as parent,
        small_disk(Path(parent) / "site", DISK_MB),
    ):
        folder = Path(parent) / "site"
        questions, documents = questions_and_documents(Path(parent) / "sample", NIGHTS)
        with services(documents) as url:
            site = Site(folder, url, questions)
            site.prepare(settings(folder, url))
            site.start()
            try:
                for number in range(1, NIGHTS + 1):
                    # The last night is quiet, so that the site is looked at when all should be
                    # over.
                    fault = QUIET if number == NIGHTS else FAULTS[(number - 1) % len(FAULTS)]
                    nights.append(live_through(site, number, fault))
                    print(line_of(nights[-1]), flush=True)
            finally:
                site.stop()
            leftovers = [" ".join(process.cmdline())[:120] for process in site.family()]
            books = site.books()
    summary = summarise(nights, books, leftovers)
    print(json.dumps(summary, indent=2, ensure_ascii=False))
    if NIGHTS == FULL_NIGHTS:
        write(nights, summary)
    if leftovers or any(night.wrong for night in nights):
        sys.exit(1)


def write(nights: list[Night], summary: Json) -> None:
    """Write the results' file."""
    result = {
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load": os.getloadavg(),
        },
        "summary": summary,
        "nights": [night.as_json() for night in nights],
    }
    RESULT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def live_through(site: Site, number: int, fault: Fault) -> Night:
    """One night, and the look in the morning."""
    trainings_before = trainings(site)
    before = site.books()
    site.grow()
    fault.begin(site)
    # The teacher is slow until the strike, so that the strike meets calls that are under way.
    site.switch(latency_s=STRIKE_LATENCY_S)
    start = datetime.now(UTC)
    start_s = time.monotonic()
    site.fire_by_schedule("refresh", made_before_s=EVENTS_HELD_BACK_S if fault.told else 0.0)
    wrong = []
    try:
        until(
            lambda: bool(site.books()["paid"] > before["paid"]) or has_ended(site, start),
            150,
            "the night's refresh",
        )
        fault.strike(site)
    except (TimeoutError, LookupError) as problem:
        wrong.append(str(problem))
    site.switch(latency_s=0.02)
    wait_for_morning(site, fault, start)
    runs = site.runs_of("refresh", start)
    after = site.books()
    night = Night(
        number=number,
        fault=fault.name,
        state=runs[0]["state"]["type"] if runs else "NONE",
        attempts=sum(run["run_count"] for run in runs),
        seconds=round(time.monotonic() - start_s, 1),
        rows=max((rows_read(site, run["id"]) for run in runs), default=0),
        paid=after["paid"] - before["paid"],
        paid_twice=after["paid_twice"] - before["paid_twice"],
        disk_mb=round(site.disk_mb(), 1),
        trained=trainings(site) > trainings_before,
    )
    night.wrong = wrong + look(site, night, fault, runs)
    return night


def wait_for_morning(site: Site, fault: Fault, start: datetime) -> None:
    """Wait for the end of the refresh and of all that it started, then clean up.

    A night that does not end in time goes on: the look in the morning finds what hangs.
    """
    within_s = _NIGHT_WITHIN_S if "COMPLETED" in fault.states else 60.0
    with suppress(TimeoutError):
        until(lambda: has_ended(site, start), within_s, "the end of the night's refresh")
    fault.end(site)
    with suppress(TimeoutError):
        until(
            lambda: has_ended(site, start) and not site.unfinished(),
            _NIGHT_WITHIN_S,
            "the end of the night",
        )
    clean_up(site)


def has_ended(site: Site, start: datetime) -> bool:
    """Is the night's refresh over?"""
    runs = site.runs_of("refresh", start)
    return are_in(runs, ("COMPLETED", "FAILED", "CANCELLED"))


def clean_up(site: Site) -> None:
    """Run the clean-up that the site has scheduled as well."""
    start = datetime.now(UTC)
    site.fire_by_schedule("clean-up")
    final_states = ("COMPLETED", "FAILED", "CRASHED")
    until(
        lambda: are_in(site.runs_of("clean-up", start), final_states),
        _CLEANED_WITHIN_S,
        "clean-up",
    )


def are_in(runs: list[Json], states: tuple[str, ...]) -> bool:
    """Are there flow runs, and is each of them in one of these states?"""
    return bool(runs) and all(run["state"]["type"] in states for run in runs)


def line_of(night: Night) -> str:
    """A night in one line."""
    name = f"{night.number:>3}  {night.fault:<46} {night.state:<10}"
    costs = f"{night.attempts} attempts {night.seconds:>6.1f} s {night.paid:>3} paid"
    trained = "  trained" if night.trained else ""
    verdict = "; ".join(night.wrong) or "right"
    return f"{name} {costs}, {night.paid_twice} twice  {night.disk_mb:>6.1f} MB{trained}  {verdict}"


def summarise(nights: list[Night], books: Json, leftovers: list[str]) -> Json:
    """Figures over all nights, and everything that was wrong.

    Args:
        leftovers: processes that the site has left behind.
    """
    later_disk_mb = [night.disk_mb for night in nights[len(nights) // 3 :]]
    wrong_nights = [night for night in nights if night.wrong]
    return {
        "nights": len(nights),
        "right": len(nights) - len(wrong_nights),
        "wrong": [f"night {night.number}: {', '.join(night.wrong)}" for night in wrong_nights],
        "paid": books["paid"],
        "paid_twice": books["paid_twice"],
        "trainings": sum(night.trained for night in nights),
        "disk_mb_largest": max(night.disk_mb for night in nights),
        "disk_mb_last_two_thirds": [min(later_disk_mb), max(later_disk_mb)],
        "processes_left": leftovers,
        "seconds": round(sum(night.seconds for night in nights), 1),
    }


@contextmanager
def services(documents: Path) -> Iterator[str]:
    """Teacher, RAG and webhook, outside the site."""
    script = Path(__file__).parent / "night_site" / "services.py"
    argv = [sys.executable, str(script), str(documents)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
