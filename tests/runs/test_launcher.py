"""Processes are started for real: their output, their end, and that nothing outlives the caller."""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from waiting import wait_until

from qinglan.errors import EngineError, StageError
from qinglan.runs import launcher
from qinglan.runs.launcher import (
    Command,
    JsonlTail,
    LineTail,
    Metrics,
    launch,
    remove_leaked_memory,
)
from qinglan.runs.supervise import descendants

# A command with a child of its own, a grandchild that went into another session and lost its parent
# (as torchrun's and Ray's workers do), and no ear for SIGTERM if asked for. Writes everyone's
# process id.
FAMILY = """
import json, os, signal, subprocess, sys, time
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
child = subprocess.Popen(sleep)
middle = (
    "import subprocess, sys; "
    "print(subprocess.Popen(sys.argv[1:], stdout=-3, start_new_session=True).pid)"
)
argv = [sys.executable, "-c", middle, *sleep]
orphan = int(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
open(sys.argv[1] + ".partial", "w").write(json.dumps([os.getpid(), child.pid, orphan]))
os.rename(sys.argv[1] + ".partial", sys.argv[1])
if "leave" not in sys.argv:
    time.sleep(60)
"""
FLOW = """
import sys
from pathlib import Path
from qinglan.runs.launcher import Command, launch
launch(Command([sys.executable, "-c", *sys.argv[2:]]), name="train", log=Path(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "POLL_S", 0.02)


def python(code: str, *arguments: str, **env: str) -> Command:
    return Command([sys.executable, "-c", code, *arguments], env)


def family(path: Path) -> list[int]:
    wait_until("the family", path.exists, look_every_s=0.02)
    pids: list[int] = json.loads(path.read_text())
    return pids


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_failure_shows_status_path_and_the_end_of_this_attempts_log(tmp_path: Path):
    log = tmp_path / "deep" / "x.log"
    log.parent.mkdir()
    log.write_bytes(b"of an earlier attempt\n" + b"\xff" * 20_000 + b"\n")
    command = python("[print(n) for n in range(50)]; raise SystemExit(3)")
    with pytest.raises(EngineError) as caught:
        launch(command, name="ms-swift SFT", log=log)
    sentence = f"ms-swift SFT ended with status 3; full log: {log}"
    assert str(caught.value) == sentence
    assert caught.value.in_terminal == f"{sentence}; its last line: 49"
    assert caught.value.said.splitlines() == [f"    {n}" for n in range(38, 50)]


@pytest.mark.parametrize(
    ("argv", "status"),
    [(["/no/such/program"], 1), ([sys.executable, "-c", "import os; os.abort()"], 134)],
)
def test_a_program_that_is_not_there_or_aborts_has_a_status(
    tmp_path: Path, argv: list[str], status: int
):
    with pytest.raises(EngineError, match=f"ended with status {status}"):
        launch(Command(argv), name="x", log=tmp_path / "x.log")


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("FROM_HERE", "1")
    names = ["CUDA_VISIBLE_DEVICES", "FROM_HERE", "MINE", "DO_NOT_TRACK"]
    code = f"import os; print([os.environ.get(n) for n in {names}])"
    launch(python(code, MINE="2"), name="x", log=tmp_path / "x.log")
    assert (tmp_path / "x.log").read_text().strip() == "['', '1', '2', 'true']", (
        "an empty one hides all GPUs"
    )


def test_shared_memory_that_a_killed_engine_left_is_removed(tmp_path: Path):
    name = f"psm_{uuid4().hex}"
    start_s = time.time() - 1
    mapped = Path(f"/dev/shm/{name}_mapped")
    older = Path(f"/dev/shm/{name}_older")
    for path in (mapped, older):
        path.write_bytes(b"x")
    os.utime(older, (0, 0))
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 1):
        leak = python(f"open('/dev/shm/{name}_leaked', 'w').write('x')")
        launch(leak, name="x", log=tmp_path / "x.log")
        remove_leaked_memory(start_s)
        older.touch()
        remove_leaked_memory(start_s, start_s + 1e-3)
    remaining = {*Path("/dev/shm").glob(f"{name}*")}
    for path in remaining:
        path.unlink()
    assert remaining == {mapped, older}


def test_on_poll_sees_everything_even_of_a_short_command(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    follow = JsonlTail(path)
    records: list[Metrics] = []
    code = "import sys; f = open(sys.argv[1], 'w'); f.write('{\"step\": 1}\\n{\"step\": 2}\\n')"
    command = python(code, str(path))
    log = tmp_path / "x.log"
    launch(command, name="x", log=log, on_poll=lambda: records.extend(follow.new()))
    assert records == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("end", ["error in on_poll", "leave"])
def test_nothing_of_the_family_outlives_the_command(tmp_path: Path, end: str):
    path = tmp_path / "pids"

    def stop_when_born() -> None:
        if end != "leave" and path.exists():
            raise StageError("too many samples could not be scored")

    with nullcontext() if end == "leave" else pytest.raises(StageError, match="too many samples"):
        command = python(FAMILY, str(path), end)
        launch(command, name="x", log=tmp_path / "x.log", on_poll=stop_when_born)
    assert list(filter(is_running, family(path))) == []


def test_kill_9_of_the_flow_ends_the_whole_family(tmp_path: Path):
    path = tmp_path / "pids"
    argv = [sys.executable, "-c", FLOW, str(tmp_path / "x.log"), FAMILY, str(path)]
    with subprocess.Popen(argv) as flow:
        pids = family(path)
        supervisors = descendants(flow.pid)
        assert set(pids) < set(supervisors)
        flow.send_signal(signal.SIGKILL)
    wait_until("their end", lambda: not any(map(is_running, [*pids, *supervisors])))


def test_who_does_not_hear_sigterm_is_killed_after_the_grace_period(tmp_path: Path):
    path = tmp_path / "pids"
    code = (
        "import sys; from qinglan.runs import supervise; "
        "supervise.GRACE_S = 0.3; sys.exit(supervise.main())"
    )
    argv = [sys.executable, "-c", code, sys.executable, "-c", FAMILY, str(path), "deaf"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as supervisor:
        pids = family(path)
        supervisor.stdin.close()
        assert supervisor.wait(60) == 128 + signal.SIGKILL
    wait_until("their end", lambda: not any(map(is_running, pids)))


def test_a_command_hears_sigint_though_its_shell_had_it_ignored():
    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    argv = [sys.executable, str(launcher.SUPERVISOR), sys.executable, "-c", code]
    with subprocess.Popen(
        argv, preexec_fn=ignore, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout.read() == "True\n"


def test_kill_9_of_the_supervisor_ends_the_command(tmp_path: Path):
    path = tmp_path / "pids"
    argv = [sys.executable, str(launcher.SUPERVISOR), sys.executable, "-c", FAMILY, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as supervisor:
        command, *descendant_pids = family(path)
        supervisor.kill()
    wait_until("its end", lambda: not is_running(command))
    # Nobody is left who could.
    for pid in descendant_pids:
        os.kill(pid, signal.SIGKILL)


def test_lines_are_read_once_they_are_whole(tmp_path: Path):
    path = tmp_path / "m.jsonl"
    follow = JsonlTail(path)
    assert list(follow.new()) == []
    # The second was cut off by a kill.
    path.write_text('{"a": 1}\n{"b{"c": 2}\n\n{"d": 3}\n{"e"')
    from_end = LineTail(path, from_end=True)
    assert list(follow.new()) == [{"a": 1}, {"d": 3}]
    with path.open("a") as stream:
        stream.write(': "二"}\nhalf')
    assert list(follow.new()) == [{"e": "二"}]
    assert list(from_end.new()) == [': "二"}\n'.encode()]
    path.with_suffix(".partial").write_text('{"a": 1}\n')
    path.with_suffix(".partial").replace(path)
    assert list(follow.new()) == [{"a": 1}], "another file is read from its start"


def test_the_files_of_all_attempts_are_read_in_their_order(tmp_path: Path):
    follow = JsonlTail(tmp_path / "metrics.*.jsonl")
    for number in (10, 2):
        (tmp_path / f"metrics.{number}.jsonl").write_text(f'{{"n": {number}}}\n')
    assert list(follow.new()) == [{"n": 2}, {"n": 10}]
