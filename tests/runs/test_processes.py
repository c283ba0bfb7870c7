"""Background processes: started again, held to a start that works, their logs kept small.

The processes are real and tiny.
"""

import errno
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from subprocess import run
from typing import Any

import httpx2
import pytest
from waiting import wait_until

from qinglan.errors import EngineError
from qinglan.runs import launcher
from qinglan.runs import processes as module
from qinglan.runs.back_off import BackOff
from qinglan.runs.launcher import Command
from qinglan.runs.processes import HOST, Processes


class EnoughError(Exception):
    """Ends what would go on for ever."""


def python(code: str) -> Command:
    return Command([sys.executable, "-c", code])


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(module, "RESTARTS", BackOff(0.1, 0.3))


def until(times: int, names: list[str]) -> Callable[[str], None]:
    """A function that notes the names that it gets, and ends the work after so many."""

    def recover(name: str) -> None:
        names.append(name)
        if len(names) == times:
            raise EnoughError

    return recover


def test_what_ends_is_started_again_after_ever_longer_waits(tmp_path: Path):
    lines: list[str] = []
    restarted: list[str] = []
    with Processes(tmp_path, lines.append) as running:
        running.start("brief", python("print('once more'); raise SystemExit(3)"))
        running.start("steady", python("import time; time.sleep(60)"))
        start = time.monotonic()
        with pytest.raises(EnoughError):
            running.keep_running(until(4, restarted))
        assert time.monotonic() - start >= 0.1 + 0.2 + 0.3 + 0.3
    assert restarted == ["brief"] * 4
    log = tmp_path / "brief.log"
    assert lines[0] == f"brief ended with status 3; starting it again in 0 s; {log}"
    assert log.read_text() == "once more\n" * 4


def test_a_restart_waits_for_what_it_needs(tmp_path: Path):
    enough = until(3, [])

    def recover(name: str) -> None:
        enough(name)
        raise httpx2.ConnectError("the server is away")

    with Processes(tmp_path, lambda _: None) as running:
        running.start("brief", python("print('once')"))
        with pytest.raises(EnoughError):
            running.keep_running(recover)
    assert (tmp_path / "brief.log").read_text() == "once\n"


def test_what_the_machine_can_not_start_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    real_popen = launcher.subprocess.Popen
    starts = count(1)

    def popen(*args: Any, **options: Any) -> Any:
        # The first start works, then two are refused.
        if next(starts) in (2, 3):
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return real_popen(*args, **options)

    monkeypatch.setattr(launcher.subprocess, "Popen", popen)
    with Processes(tmp_path, lines.append) as running:
        running.start("brief", python("print('once')"))
        with pytest.raises(EnoughError):
            running.keep_running(until(4, []))
    assert (tmp_path / "brief.log").read_text() == "once\n" * 2
    assert len([line for line in lines if "brief can't be started: [Errno 11]" in line]) == 2


def test_who_dies_before_all_are_ready_is_an_error_that_names_the_log(tmp_path: Path):
    with Processes(tmp_path, lambda _: None) as running:
        running.start("server", python("raise SystemExit('port taken')"))
        url = f"http://{HOST}:{module.free_port()}/health"
        problem = r"server ended with status 1; full log: .*server\.log"
        with pytest.raises(EngineError, match=problem):
            running.wait_for("the server", url)


def test_a_port_for_a_server_is_none_that_the_system_gives_to_a_client_meanwhile():
    range_of_system = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first_of_system = int(range_of_system.split()[0])
    ports = [module.free_port() for _ in range(200)]
    assert max(ports) < first_of_system
    assert len(set(ports)) == len(ports)


def test_a_huge_log_is_set_aside_while_its_process_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_LOG_BYTES", 1000)
    monkeypatch.setattr(module, "_LOGS_EVERY_S", 0.05)
    log = tmp_path / "chatty.log"
    aside = tmp_path / "chatty.log.1"
    chatty = (
        "import os, time\n"
        "print('x' * 2000)\n"
        "while os.fstat(1).st_size: time.sleep(0.01)\n"
        "print('y')"
    )
    with Processes(tmp_path, lambda _: None) as running:
        running.start("chatty", python(chatty))
        with pytest.raises(EnoughError):
            running.keep_running(until(1, []))
    assert aside.read_text() == "x" * 2000 + "\n"
    assert log.read_text() == "y\n"


@pytest.mark.parametrize("trouble", ["removed", "full"])
def test_a_log_that_cannot_be_made_smaller_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
):
    def full(_: Path, aside: Path) -> None:
        aside.write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_LOG_BYTES", 10)
    monkeypatch.setattr(module, "_LOGS_EVERY_S", 0.01)
    monkeypatch.setattr(module.shutil, "copyfile", full)
    lines: list[str] = []
    log = tmp_path / "chatty.log"
    with Processes(tmp_path, lines.append) as running:
        running.start("chatty", python("import time; print('x' * 2000); time.sleep(60)"))
        wait_until("its log", lambda: log.stat().st_size > 10, look_every_s=0.01)
        if trouble == "removed":
            log.unlink()
        running.start("brief", python("pass"))
        with pytest.raises(EnoughError):
            running.keep_running(until(3, []))
    problem = f"{log}: can't be made smaller: No space left on device; chatty goes on"
    problems = [problem] if trouble == "full" else []
    assert [line for line in lines if "chatty" in line] == problems
    assert not log.with_suffix(".log.1").exists()


def test_each_pause_is_twice_the_one_before_up_to_a_limit_and_jitter_keeps_callers_apart():
    expected = {1: 0.5, 2: 1.0, 3: 2.0, 4: 3.0, 10_000: 3.0}
    assert {failures: BackOff(0.5, 3.0).pause_s(failures) for failures in expected} == expected
    pauses = {BackOff(1.0, 8.0, jitter=True).pause_s(3) for _ in range(50)}
    assert len(pauses) == 50
    assert min(pauses) >= 0
    assert max(pauses) <= 4


IMPATIENT = """
import asyncio, os, signal, threading, time
from qinglan.runs.processes import in_event_loop

def interrupt():
    for _ in range(3):
        time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

@in_event_loop
async def ask():
    one_at_a_time = asyncio.Semaphore(8)
    async def question():
        async with one_at_a_time:
            await asyncio.sleep(0.01)
    async with asyncio.TaskGroup() as questions:
        for _ in range(3000):
            questions.create_task(question())
        await asyncio.sleep(0.1)
        threading.Thread(target=interrupt).start()

try:
    ask()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_second_interrupt_does_not_hang_what_the_first_one_ends() -> None:
    argv = [sys.executable, "-c", IMPATIENT]
    for _ in range(3):
        process = run(argv, capture_output=True, text=True, timeout=30)
        assert process.stderr == ""
        assert process.stdout == "interrupted\n"
        assert process.returncode == 0
