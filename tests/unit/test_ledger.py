"""The ledger: kept before used, shared by processes, every paid call counted."""

import signal
import subprocess
import sys
from pathlib import Path

from qinglan.ledger import Call, open_ledger

WRITER = """
import sys
from pathlib import Path
from qinglan.ledger import Call, Ledger
ledger = Ledger(Path(sys.argv[1]))
for number in range(40):
    names = {"run_id": "r", "tenant": "t", "role": "judge", "model": "m", "text": "x", "finish_reason": "stop"}
    numbers = {"prompt_tokens": 1, "completion_tokens": 1, "cost_usd": 0.5, "latency_ms": 1}
    ledger.record(Call(request_hash=f"{sys.argv[2]}-{number}", **names, **numbers))
    assert ledger.get(f"{sys.argv[2]}-{number}")
print("done", flush=True)
sys.stdin.read()
"""


def call(request_hash: str = "h", text: str = "改写", run_id: str = "r") -> Call:
    return Call(
        request_hash=request_hash,
        run_id=run_id,
        tenant="t",
        role="teacher",
        model="m",
        text=text,
        finish_reason="stop",
        prompt_tokens=100,
        completion_tokens=10,
        cost_usd=0.25,
        latency_ms=12.5,
    )


def test_an_answer_comes_back_whole(tmp_path: Path):
    with open_ledger(tmp_path / "deep" / "ledger.db") as ledger:
        assert ledger.get("h") is None
        ledger.record(call())
    with open_ledger(tmp_path / "deep" / "ledger.db") as ledger:
        assert ledger.get("h") == call()


def test_two_who_asked_at_once_both_count_and_the_first_answer_stays(tmp_path: Path):
    with open_ledger(tmp_path / "ledger.db") as ledger:
        ledger.record(call(text="first"))
        ledger.record(call(text="second"))
        assert ledger.get("h").text == "first"
        assert (ledger.usage("r", "teacher").calls, ledger.usage("r", "teacher").cost_usd) == (2, 0.5)


def test_usage_is_per_run_and_role_and_counts_failures(tmp_path: Path):
    with open_ledger(tmp_path / "ledger.db") as ledger:
        ledger.record(call("a"))
        ledger.record(call("b", run_id="other"))
        ledger.record_failure("c", "r", "t", "teacher", "m", "http_500")
        usage = ledger.usage("r", "teacher")
        assert (usage.calls, usage.failed, usage.prompt_tokens, usage.cost_usd) == (2, 1, 100, 0.25)
        assert ledger.usage("r", "judge").calls == 0


def test_processes_share_a_file_and_kill_9_loses_nothing_recorded(tmp_path: Path):
    path = tmp_path / "ledger.db"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, str(n)], **pipes) for n in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "done\n"
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    with open_ledger(path) as ledger:
        assert ledger.usage("r", "judge").calls == 120
        assert ledger.usage("r", "judge").cost_usd == 60.0
