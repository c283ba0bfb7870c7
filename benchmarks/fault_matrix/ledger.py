"""Faults of the ledger's database, while a process asks the teacher through it as distill does."""

import os
import runpy
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil
from night_site.site import ROOT, until

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile, load_profile
from qinglan.rows import Row
from qinglan.runs.artifacts import write_jsonl
from qinglan.runs.launcher import tail

from .proxy import HOST, Proxy
from .site import IN_FLIGHT, MOST_RUNS, PROFILE, Site, TrialResult, Workplace

SQLITE = "SQLite"
POSTGRESQL = "PostgreSQL"
FAULTS = [
    (database, fault)
    for database in (SQLITE, POSTGRESQL)
    for fault in ("locked", "black hole", "restart", "torn write")
]
_KILLING = {(SQLITE, "restart"), (SQLITE, "torn write"), (POSTGRESQL, "torn write")}
"""Faults that kill the asking process; with the others it gets all answers to its questions."""
_QUESTIONS = 120
_WITHIN_S = 400.0
_WAL_HEADER = 32
_FRAME_HEADER = 24
_URL_ENV = "QINGLAN_FAULT_LEDGER"
_SUPPORT = ROOT / "tests" / "support"
_HOLD = """
import sys, time
import sqlalchemy as sa
url, seconds = sys.argv[1], float(sys.argv[2])
engine = sa.create_engine(url)
with engine.connect() as db:
    if engine.dialect.name == "sqlite":
        db.connection.driver_connection.isolation_level = None
        db.exec_driver_sql("BEGIN EXCLUSIVE")
    else:
        db.exec_driver_sql("LOCK TABLE calls, claims, spent IN ACCESS EXCLUSIVE MODE")
    print("locked", flush=True)
    time.sleep(seconds)
"""


def trial(work: Workplace, rng: Random, *, database: str, fault: str) -> TrialResult:
    """Ask, strike, heal, and ask again until every answer is there."""
    with work.site("data") as site, ExitStack() as stack:
        server = None
        proxy = None
        settings: list[str] = []
        if database == POSTGRESQL:
            server = stack.enter_context(_postgres())
            proxy = Proxy((HOST, server.port))
            stack.callback(proxy.close)
            # The process reaches the server through the proxy, which can hold back its bytes.
            address = server.make_database("ledger").replace(f":{server.port}/", f":{proxy.port}/")
            os.environ[_URL_ENV] = f"postgresql://{address}"
            settings.append(f"ledger.url_env={_URL_ENV}")
        profile = load_profile(str(site.folder / "configs" / f"{PROFILE}.yaml"), settings)
        folder = _folder_of_questions(site, profile)
        process = _start(folder)
        moment = rng.randint(10, _QUESTIONS - 30)
        until(
            lambda: work.paid() >= moment or process.poll() is not None,
            _WITHIN_S,
            "the moment to strike",
        )
        with _strike(fault, process, site, server, proxy):
            ends = [_end_of(process, site, folder)]
        while _answers(profile) < _QUESTIONS and len(ends) < MOST_RUNS:
            ends.append(_end_of(_start(folder), site, folder))
        return TrialResult(
            "; then ".join(ends),
            rows_lost=_QUESTIONS - _answers(profile),
            **work.repeats(IN_FLIGHT if (database, fault) in _KILLING else 0),
            hangs=site.hangs,
            other_runs_harmed=int(site.is_harmed()),
            ended_well=ends[-1] == "done",
        )


def _folder_of_questions(site: Site, profile: Profile) -> Path:
    """A folder with the profile and the rows that the process asks about."""
    folder = site.folder / "asking"
    folder.mkdir()
    (folder / "profile.json").write_text(profile.model_dump_json(), encoding="utf-8")
    rows = [
        Row(id=str(number), tenant="t", query=f"虾青素{number}咋吃", source=f"q.csv:{number}")
        for number in range(_QUESTIONS)
    ]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder


@contextmanager
def _postgres() -> Iterator[Any]:
    """The tests' own server; a module of theirs is not in the path of a benchmark."""
    with runpy.run_path(str(_SUPPORT / "postgres.py"))["postgres_server"]() as server:
        yield server


def _start(folder: Path) -> psutil.Popen:
    argv = [sys.executable, str(_SUPPORT / "asking_worker.py"), str(folder)]
    with (folder / "log.txt").open("ab") as log:
        return psutil.Popen(argv, stdout=log, stderr=log, cwd=folder)


def _end_of(process: psutil.Popen, site: Site, folder: Path) -> str:
    end = site.end_of(process, _WITHIN_S)
    return tail(folder / "log.txt", 1)[-160:] if end.startswith("status") else end


def _answers(profile: Profile) -> int:
    with site_ledger(profile) as ledger:
        usage = ledger.usage("r", "teacher")
    return usage.calls - usage.failed


@contextmanager
def _strike(
    fault: str, process: psutil.Popen, site: Site, server: Any, proxy: Proxy | None
) -> Iterator[None]:
    """Strike the database: PostgreSQL where there is a server with its proxy, else SQLite."""
    seconds = min(site.work.seconds, 40.0)
    sqlite_file = site.folder / "state" / "ledger.db"
    if proxy and fault == "black hole":
        proxy.set("black hole")
        time.sleep(seconds)
        proxy.set("pass")
    elif server and fault == "locked":
        _hold_lock(server.owners_url.replace("/postgres?", "/ledger?"), seconds)
    elif server:
        if fault == "torn write":
            process.kill()
            _kill_server(server)
        _restart(server)
    elif fault in ("locked", "black hole"):
        # There is no way to a file that a black hole could be in: its lock is held in place of it.
        _hold_lock(f"sqlite:///{sqlite_file}", seconds)
    else:
        process.kill()
        process.wait()
        if fault == "torn write":
            _tear(sqlite_file.with_name("ledger.db-wal"))
    yield


def _tear(wal: Path) -> None:
    """Write the log's next frame in part, as a power loss leaves it: its checksum is wrong."""
    # The killed process had the database open, so that there is a log.
    content = wal.read_bytes()
    page_bytes = struct.unpack_from(">I", content, 8)[0]
    salts = content[16:24]
    end = _WAL_HEADER
    while content[end + 8 : end + 16] == salts:
        end += _FRAME_HEADER + page_bytes
    assert end > _WAL_HEADER, "the log has no frame"
    with wal.open("r+b") as log:
        log.seek(end)
        log.write(struct.pack(">II", 1, 1) + salts + b"\x17" * (8 + page_bytes // 2))


def _hold_lock(url: str, seconds: float) -> None:
    """Have another process hold the database's lock for a while.

    It is stopped meanwhile, like one on a machine that hangs, and then killed.
    """
    argv = [sys.executable, "-c", _HOLD, url, str(10 * seconds)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline(), "the lock could not be had"
        # A stopped process keeps its lock and its connection, and answers nobody.
        holder.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        holder.kill()
        holder.wait()


def _kill_server(server: Any) -> None:
    """Kill -9 all of the server's processes."""
    head = int((Path(server.folder) / "data" / "postmaster.pid").read_text().split()[0])
    family = [psutil.Process(head), *psutil.Process(head).children(recursive=True)]
    for process in family:
        process.kill()
    psutil.wait_procs(family, timeout=30)


def _restart(server: Any) -> None:
    """Restart the server at once, without ending transactions."""
    control = [str(server.binaries / "pg_ctl"), "-D", f"{server.folder}/data", "-w"]
    # PostgreSQL refuses to run as root.
    if os.geteuid() == 0:
        control = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *control]
    restart = [*control, "-l", f"{server.folder}/log", "-m", "immediate", "restart"]
    subprocess.run(restart, check=True, capture_output=True, cwd=server.folder)
