"""Faults of the ledger's database, while a process asks the teacher through it, as the distill
stage does."""

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
from .site import IN_FLIGHT, MOST_RUNS, PROFILE, Seen, Site, Workplace

SQLITE, POSTGRESQL = "SQLite", "PostgreSQL"
FAULTS = [
    (base, fault)
    for base in (SQLITE, POSTGRESQL)
    for fault in ("locked", "black hole", "restart", "torn write")
]
_KILLING = {(SQLITE, "restart"), (SQLITE, "torn write"), (POSTGRESQL, "torn write")}
"""Those that kill the asking process; the others leave it its answers."""
_QUESTIONS, _WITHIN_S = 120, 400.0
_WAL_HEADER, _FRAME_HEADER = 32, 24
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


def trial(work: Workplace, rng: Random, *, database: str, fault: str) -> Seen:
    """Ask, strike, heal, and ask again until every answer is there."""
    with work.site("data") as site, ExitStack() as stack:
        server = stack.enter_context(_postgres()) if database == POSTGRESQL else None
        proxy = Proxy((HOST, server.port)) if server else None
        settings = list[str]()
        if server and proxy:
            stack.callback(proxy.close)
            address = server.make_database("ledger").replace(f":{server.port}/", f":{proxy.port}/")
            os.environ[_URL_ENV] = f"postgresql://{address}"
            settings.append(f"ledger.url_env={_URL_ENV}")
        profile = load_profile(str(site.folder / "configs" / f"{PROFILE}.yaml"), settings)
        folder = site.folder / "asking"
        folder.mkdir()
        (folder / "profile.json").write_text(profile.model_dump_json(), encoding="utf-8")
        rows = [
            Row(id=str(n), tenant="t", query=f"虾青素{n}咋吃", source=f"q.csv:{n}")
            for n in range(_QUESTIONS)
        ]
        write_jsonl(folder / "rows.jsonl", rows)
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
        return Seen(
            "; then ".join(ends),
            rows_lost=_QUESTIONS - _answers(profile),
            **work.repeats(IN_FLIGHT if (database, fault) in _KILLING else 0),
            hangs=site.hangs,
            other_runs_harmed=int(site.is_harmed()),
            ended_well=ends[-1] == "done",
        )


@contextmanager
def _postgres() -> Iterator[Any]:
    """The tests' own server; a module of theirs is not in the path of a benchmark."""
    with runpy.run_path(str(_SUPPORT / "postgres.py"))["postgres_server"]() as server:
        yield server


def _start(folder: Path) -> psutil.Popen:
    with (folder / "log.txt").open("ab") as log:
        return psutil.Popen(
            [sys.executable, str(_SUPPORT / "asking_worker.py"), str(folder)],
            stdout=log,
            stderr=log,
            cwd=folder,
        )


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
    seconds, file = min(site.work.seconds, 40.0), site.folder / "state" / "ledger.db"
    if fault == "locked" or (fault == "black hole" and not proxy):
        with _held(
            server.owners_url.replace("/postgres?", "/ledger?") if server else f"sqlite:///{file}",
            seconds,
        ):
            yield
    elif proxy and fault == "black hole":
        proxy.set("black hole")
        time.sleep(seconds)
        proxy.set("pass")
        yield
    elif server:
        if fault == "torn write":
            process.kill()
            _kill_server(server)
        _restart(server)
        yield
    else:
        process.kill()
        process.wait()
        if fault == "torn write":
            _tear(file.with_name("ledger.db-wal"))
        yield


def _tear(wal: Path) -> None:
    """The next frame of the log is there in part, as a power loss leaves it: its checksum is
    wrong."""
    content = wal.read_bytes()  # the killed process had the database open, so there is one
    page_bytes, salts = struct.unpack_from(">I", content, 8)[0], content[16:24]
    end = _WAL_HEADER
    while content[end + 8 : end + 16] == salts:
        end += _FRAME_HEADER + page_bytes
    assert end > _WAL_HEADER, "the log has no frame"
    with wal.open("r+b") as log:
        log.seek(end)
        log.write(struct.pack(">II", 1, 1) + salts + b"\x17" * (8 + page_bytes // 2))


@contextmanager
def _held(url: str, seconds: float) -> Iterator[None]:
    """Another process holds the lock, stopped like one on a machine that hangs, and is killed after
    a while."""
    argv = [sys.executable, "-c", _HOLD, url, str(10 * seconds)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline(), "the lock could not be had"
        holder.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        holder.kill()
        holder.wait()
        yield


def _kill_server(server: Any) -> None:
    """Kill -9 of all its processes."""
    head = int((Path(server.folder) / "data" / "postmaster.pid").read_text().split()[0])
    family = [psutil.Process(head), *psutil.Process(head).children(recursive=True)]
    for each in family:
        each.kill()
    psutil.wait_procs(family, timeout=30)


def _restart(server: Any) -> None:
    """At once, without ending transactions."""
    as_user = (
        ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        if os.geteuid() == 0
        else []
    )
    control = [*as_user, str(server.binaries / "pg_ctl"), "-D", f"{server.folder}/data", "-w"]
    restart = [*control, "-l", f"{server.folder}/log", "-m", "immediate", "restart"]
    subprocess.run(restart, check=True, capture_output=True, cwd=server.folder)
