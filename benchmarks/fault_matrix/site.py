"""A trial's site: a folder in which a user runs the same command until it ends well.

Every trial begins with a copy of a prepared site: a finished run of another profile, the bystander,
and for training the run as it was when its process was killed at the beginning of the stage. A run
keeps absolute paths, so the site of every trial is the same folder, on a disk of its own where this
machine allows that. The site also says what must hold afterwards.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import openpyxl
import psutil
import yaml
from night_site.site import processes_of, small_disk, until

from qinglan.config.data import Columns
from qinglan.config.site import Embedded
from qinglan.rows import ArmRow, Row
from qinglan.runs.artifacts import MANIFEST, StageResult, read_jsonl, sha256_of
from qinglan.runs.run import RUN_FILE, runs_of
from qinglan.simulators.domains import write_workbook
from qinglan.simulators.domains.query_rewrite import write_sample

from .proxy import HOST, Proxy

PROFILE = "trial"
BYSTANDER = "bystander"
TRAINING = ("sft", "rl", "evaluate", "register")
SERVICES = {"teacher": "/v1", "judge": "/v1", "rag": "/retrieve"}
CONCURRENCY = 4
IN_FLIGHT = CONCURRENCY + max(8, CONCURRENCY // 2)
"""Answers that a killed process may lose, see docs/how-to/teachers.md."""
ROWS = 40
DISK_MB = 1500
MOST_RUNS = 4
STARTED = "started.json"
_LATENCY_S = 0.25
_NO_LINE = "no error line"
# For a command, on a machine that does other things as well; on top of how long the fault lasts.
_DATA_WITHIN_S = 420.0
_TRAINING_WITHIN_S = 1200.0
RowValues = tuple[Any, ...]
"""A row's text, judge score, retrieval scores, status and reason."""


@dataclass
class TrialResult:
    """The result of a trial: how its commands ended, and what was counted."""

    what: str
    rows_lost: int = 0
    paid_twice: int = 0
    """Answers paid twice that no fault explains: those that were in flight in a killed process, or
    were spoiled on their way, don't count."""
    repeated: int = 0
    """Paid answers to a question that had been answered before, whatever became of that answer."""
    failures_as_scores: int = 0
    hangs: int = 0
    other_runs_harmed: int = 0
    ended_well: bool = True

    @property
    def ok(self) -> bool:
        figures = (
            self.rows_lost,
            self.paid_twice,
            self.failures_as_scores,
            self.hangs,
            self.other_runs_harmed,
        )
        return self.ended_well and not any(figures)


class Workplace:
    """The things that all trials of a session share: services, their proxies, prepared sites."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.site_folder = folder / "site"
        sample = write_sample(
            folder / "sample",
            Embedded(sample_train_rows=240, sample_dev_rows=40, sample_test_rows=60),
        )
        assert sample.knowledge_base is not None
        self._workbook = sample.workbook
        self.documents = sample.knowledge_base.read_text(encoding="utf-8")
        self._services = subprocess.Popen(
            [sys.executable, "-m", "fault_matrix.services", str(sample.knowledge_base)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._services.stdout is not None
        self.url = self._services.stdout.readline().strip()
        port = int(self.url.rpartition(":")[2])
        self.proxies = {service: Proxy((HOST, port)) for service in SERVICES}
        self.post("switch", latency_s=_LATENCY_S)
        self._prepared: dict[str, Path] = {}
        self.expected: dict[str, dict[str, RowValues]] = {}
        """The rows of an undisturbed run, by kind of site."""
        self.usual_s: dict[str, float] = {}
        """Seconds that each stage takes undisturbed."""

    def close(self) -> None:
        """End what was started."""
        for proxy in self.proxies.values():
            proxy.close()
        self._services.kill()
        self._services.wait()

    def post(self, path: str, **state: Any) -> None:
        """Tell the services something."""
        # A proxy of the user's must not stand in between, here and below.
        response = httpx2.post(f"{self.url}/{path}", json=state, trust_env=False, timeout=60)
        response.raise_for_status()

    def paid(self) -> int:
        """Answers that the services gave, since the books were reset."""
        return int(self._books()["paid"])

    def repeats(self, in_flight: int) -> dict[str, int]:
        """`repeated` and `paid_twice` of a trial's result.

        Args:
            in_flight: answers that a process that was struck may have lost.
        """
        books = self._books()
        return {
            "repeated": books["repeated"],
            "paid_twice": max(0, books["paid_twice"] - in_flight),
        }

    def _books(self) -> dict[str, Any]:
        response = httpx2.get(f"{self.url}/books", trust_env=False, timeout=60)
        books: dict[str, Any] = response.raise_for_status().json()
        return books

    def service_url(self, service: str) -> str:
        """The service's address, through its proxy."""
        return f"http://{HOST}:{self.proxies[service].port}/{service}{SERVICES[service]}"

    @contextmanager
    def site(self, kind: str) -> Iterator["Site"]:
        """A copy of the site that was prepared for this kind: `data`, or a stage of training."""
        if kind not in self._prepared:
            if kind in TRAINING:
                self._prepare_training()
            else:
                self._prepare_data()
        self.post("reset", kind=kind)
        with self._folder() as on_own_disk:
            shutil.copytree(
                self._prepared[kind], self.site_folder, symlinks=True, dirs_exist_ok=True
            )
            site = Site(self, kind, on_own_disk)
            try:
                yield site
            finally:
                for process in processes_of(self.site_folder):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()

    @contextmanager
    def _folder(self) -> Iterator[bool]:
        try:
            with small_disk(self.site_folder, DISK_MB) as on_own_disk:
                yield on_own_disk
        finally:
            shutil.rmtree(self.site_folder)

    def _prepare_data(self) -> None:
        """Keep a bystander's finished run.

        The trial's own undisturbed run is looked at and thrown away.
        """
        with self._folder():
            self._write_profile(PROFILE, 0, ROWS)
            self._write_profile(BYSTANDER, ROWS, ROWS + ROWS // 2)
            site = Site(self, "data", own_disk=False)
            site.must_run("refresh", BYSTANDER)
            self._keep("data")
            site.must_run("refresh", PROFILE)
            self._expect("data", site)

    def _prepare_training(self) -> None:
        """Run the pipeline, killed at the beginning of each stage and continued.

        A copy is kept of every beginning.
        """
        with self.site("data") as site:
            self._write_profile(PROFILE, 0, None)
            site.kind = "register"
            # Each start continues the run that was killed before, as its finished stages are
            # reused.
            for stage in TRAINING:
                process = site.start("pipeline")
                site.wait_for(stage, process)
                process.kill()
                process.wait()
                until(
                    lambda: not processes_of(self.site_folder),
                    300,
                    "the end of the engine's processes",
                )
                self._keep(stage)
            site.must_run("pipeline", PROFILE)
            for stage in TRAINING:
                self._expect(stage, site)

    def _keep(self, kind: str) -> None:
        self._prepared[kind] = self.folder / f"prepared-{kind}"
        shutil.copytree(self.site_folder, self._prepared[kind], symlinks=True)
        self.post("keep", kind=kind)

    def _expect(self, kind: str, site: "Site") -> None:
        self.expected[kind] = site.rows_by_stage()
        for manifest in site.run.glob(f"*/{MANIFEST}"):
            self.usual_s[manifest.parent.name] = StageResult.read(manifest).seconds

    def _write_profile(self, name: str, first: int, last: int | None) -> None:
        """Write a profile with questions of its own: these lines of the sample.

        Args:
            last: None for all lines from the beginning, with their splits.
        """
        workbook = self.site_folder / f"{name}.xlsx"
        header, lines = self._sample_lines(with_splits=last is None)
        write_workbook(workbook, "questions", header, lines if last is None else lines[first:last])
        chat = {"max_retries": 3, "timeout_s": 5, "concurrency": CONCURRENCY}
        small_batches = {
            "train_batch_size": 16,
            "ppo_mini_batch_size": 16,
            "ppo_micro_batch_size_per_gpu": 16,
        }
        profile = {
            "extends": "embedded",
            "name": name,
            "data": {"workbook": str(workbook)},
            "teacher": {**chat, "base_url": self.service_url("teacher")},
            "judge": {**chat, "base_url": self.service_url("judge")},
            "rag": {"url": self.service_url("rag"), "max_retries": 4, "timeout_s": 5},
            "distill": {"batch_rows": 10},
            "embedded": {"pretrain_steps": 40},
            "sft": {"num_train_epochs": 2, "save_steps": 8, "eval_steps": 8},
            "rl": {**small_batches, "total_steps": 3, "save_freq": 1, "test_freq": 1},
            "evaluate": {"latency_queries": 3},
            "retention": {"min_free_mb": 20},
            "paths": {
                "runs": str(self.site_folder / "runs"),
                "state": str(self.site_folder / "state"),
            },
        }
        path = self.site_folder / "configs" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(profile, allow_unicode=True), encoding="utf-8")

    def _sample_lines(self, *, with_splits: bool) -> tuple[list[str], list[list[str]]]:
        """Header and lines of the sample's workbook."""
        sheet = openpyxl.load_workbook(self._workbook, read_only=True).active
        header, *lines = sheet.iter_rows(values_only=True)
        columns = [
            place for place, title in enumerate(header) if with_splits or title != Columns().split
        ]

        def chosen(cells: tuple[Any, ...]) -> list[str]:
            return [str(cells[place] or "") for place in columns]

        return chosen(header), list(map(chosen, lines))


class Site:
    """The folder of one trial."""

    def __init__(self, work: Workplace, kind: str, own_disk: bool) -> None:
        self.work = work
        self.kind = kind
        self.own_disk = own_disk
        self.folder = work.site_folder
        # Outside of the site's disk: what a full one makes the command say must not be lost.
        self.log = work.folder / "terminal.log"
        self.log.write_bytes(b"")
        self.flow = "pipeline" if kind in TRAINING else "refresh"
        self.settings: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.within_s = _TRAINING_WITHIN_S if kind in TRAINING else _DATA_WITHIN_S
        self.hangs = 0
        self.began_s = time.time()
        self._bystander = self._digests()

    # Commands

    def start(self, flow: str = "", profile: str = PROFILE) -> psutil.Popen:
        """Give the user's command."""
        argv = [sys.executable, "-m", "qinglan.cli", "run", flow or self.flow]
        argv += ["--profile", profile]
        for key, value in self.settings.items():
            argv += ["--set", f"{key}={value}"]
        # A Prefect that the benchmark's user has set up is none of the site's.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        env |= self.env
        with self.log.open("ab") as log:
            return psutil.Popen(argv, cwd=self.folder, env=env, stdout=log, stderr=log)

    def must_run(self, flow: str, profile: str) -> None:
        """Run a command without any fault, or end the benchmark where it fails."""
        if self.start(flow, profile).wait(_TRAINING_WITHIN_S):
            sys.exit(f"error: without any fault, {flow} failed:\n{self.log.read_text()[-3000:]}")

    def end_of(self, process: psutil.Popen, within_s: float = 0.0) -> str:
        """The end of a command: `done`, its error line, or that it hung, which is counted.

        None of its processes may go on.
        """
        try:
            status = process.wait(within_s or self.within_s)
            until(lambda: not processes_of(self.folder), 90, "the end of the command's processes")
        except (psutil.TimeoutExpired, TimeoutError) as problem:
            self.hangs += 1
            # What goes on would change the site while it is looked at.
            for hanging in processes_of(self.folder):
                hanging.kill()
            return f"hung ({problem})"
        if status == 0:
            return "done"
        if status < 0:
            return f"killed ({status})"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1][:160] if errors else f"status {status}, {_NO_LINE}"

    def wait_for(self, stage: str, process: psutil.Popen) -> None:
        """Wait until the stage has begun.

        Raises:
            LookupError: the command ended first.
            TimeoutError: it takes longer than the whole command may.
        """
        deadline_s = time.monotonic() + self.within_s
        while not self._has(stage, STARTED):
            if process.poll() is not None:
                raise LookupError(f"{stage} never began:\n{self.log.read_text()[-2000:]}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{stage} did not begin within {self.within_s:.0f} s")
            time.sleep(0.01)

    def wait_for_moment(self, stage: str, process: psutil.Popen, rng: Random) -> None:
        """Wait until a random moment of the stage's work.

        Where the stage takes less time than usual, that moment is its end.

        Raises:
            LookupError: the command ended first, so that nothing can strike it.
        """
        self.wait_for(stage, process)
        moment_s = time.monotonic() + rng.uniform(0, 0.9 * self.work.usual_s[stage])
        while time.monotonic() < moment_s and not self._has(stage, MANIFEST):
            time.sleep(0.01)
        if process.poll() is not None:
            raise LookupError(f"the command ended before the moment to strike {stage}")

    def _has(self, stage: str, file: str) -> bool:
        """Has the stage written this file since the trial began?"""
        with suppress(OSError, IndexError):
            return (self.run / stage / file).stat().st_mtime >= self.began_s
        return False

    # What must hold

    @property
    def run(self) -> Path:
        """The trial's newest run."""
        return runs_of(self.folder / "runs", PROFILE)[0]

    def rows_by_stage(self) -> dict[str, RowValues]:
        """The values that the last stage has of each row, by file and id.

        Files that are not there, or are written just now, have no rows.
        """
        values: dict[str, RowValues] = {}
        with suppress(OSError, IndexError, ValueError):
            for row in read_jsonl(self.run / "select" / "rows.jsonl", Row):
                values[f"select {row.id}"] = (
                    row.answer,
                    row.judge_score,
                    row.answer_retrieved.scores if row.answer_retrieved else None,
                    row.status,
                    row.reason,
                )
            if self.kind not in TRAINING:
                return values
            for arm in sorted(self.run.glob("evaluate/arm_*.jsonl")):
                for entry in read_jsonl(arm, ArmRow):
                    values[f"{arm.stem} {entry.row_id}"] = (
                        entry.text,
                        entry.judge_score,
                        entry.retrieved.scores if entry.retrieved else None,
                        "",
                        entry.reason,
                    )
        return values

    def is_well(self) -> bool:
        """Is the run finished, with nothing that another run would ask again?"""
        with suppress(OSError, IndexError, ValueError):
            finished = json.loads((self.run / RUN_FILE).read_text(encoding="utf-8"))["finished"]
            return bool(finished) and self.rows_by_stage() == self.work.expected[self.kind]
        return False

    def finish(self, ends: list[str]) -> None:
        """The user gives the same command again until it ends well."""
        while len(ends) < MOST_RUNS:
            if ends[-1] == "done" and self.is_well():
                return
            ends.append(self.end_of(self.start()))

    def look(self, ends: list[str], in_flight: int) -> TrialResult:
        """Every count after the trial.

        Args:
            in_flight: answers that may have been lost with the process.
        """
        expected = self.work.expected[self.kind]
        rows = self.rows_by_stage()
        has_error_lines = not any(_NO_LINE in end for end in ends)
        strange_rows = [
            key for key, values in rows.items() if has_strange_value(values, expected.get(key))
        ]
        return TrialResult(
            "; then ".join(ends),
            rows_lost=len(expected.keys() - rows.keys()),
            **self.work.repeats(in_flight),
            failures_as_scores=len(strange_rows) + self._miscounted(),
            hangs=self.hangs,
            other_runs_harmed=int(self.is_harmed()),
            ended_well=ends[-1] == "done" and rows == expected and has_error_lines,
        )

    def _miscounted(self) -> int:
        """Do the teacher's means count other rows than those that were measured?"""
        with suppress(OSError, IndexError, KeyError):
            report = json.loads((self.run / "report.json").read_text(encoding="utf-8"))
            rows = list(read_jsonl(self.run / "validate" / "rows.jsonl", Row))
            measured = sum(row.answer_retrieved is not None for row in rows)
            return int(report["arms"]["teacher"]["scores"]["top1"]["n"] > measured)
        return 0

    def _digests(self) -> Mapping[str, str]:
        """The digests of the bystander's files, by path."""
        runs = self.folder / "runs"
        digests: dict[str, str] = {}
        for folder in runs_of(runs, BYSTANDER) if runs.exists() else []:
            for path in folder.rglob("*"):
                if path.is_file() and path.name != ".lock":
                    digests[str(path)] = sha256_of(path)
        return digests

    def is_harmed(self) -> bool:
        """Has the bystander's run other files than before, or can it not be shown any more?"""
        name = runs_of(self.folder / "runs", BYSTANDER)[0].name
        argv = [sys.executable, "-m", "qinglan.cli", "show", name, "--profile", BYSTANDER]
        show = subprocess.run(argv, cwd=self.folder, capture_output=True, check=False, timeout=300)
        return show.returncode != 0 or self._digests() != self._bystander


def has_strange_value(values: RowValues, expected: RowValues | None) -> bool:
    """Has a row a text or a score that an undisturbed run does not give it?

    The services answer the same question with the same answer, so any other value came from a
    failure.
    """
    expected_values = expected or (None, None, None)
    for value, expected_value in zip(values[:3], expected_values[:3], strict=True):
        if value is not None and value != expected_value:
            return True
    return False
