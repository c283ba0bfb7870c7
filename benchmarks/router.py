"""Latency that the router adds, and the fate of requests when models die, hang or change.

    make bench NAME=router            # RATE=100 SECONDS=5 ROUNDS=1 for a smaller one

A stub model that answers after 20 ms, the router, and the load are a process each. Requests come at
a constant rate whatever the answers do (open loop), each with a question of its own, and count from
the moment when they were due. A round is the same load straight at the model, and through the
router; then one load each during which the model's process is killed and started again, stopped for
a while (SIGSTOP), and exchanged for another by a new routes file. Prints the tables; a full run
also writes benchmarks/results/router.json. Exits with 1 where a request was lost or late, or where
the router added more than 5 ms at p99: on a machine that is busy with other things, it will.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web

from qinglan.serving.routes import Backend, Routes

FULL = (200.0, 20.0, 3)
RATE = float(os.environ.get("RATE", FULL[0]))
SECONDS = float(os.environ.get("SECONDS", FULL[1]))
ROUNDS = int(os.environ.get("ROUNDS", FULL[2]))
MODEL_MS = 20
GIVE_UP_S = 10.0
DEADLINE_MS = 800
LIMIT_MS = 5.0
"""Most that the router may add at p99."""
WARM_UP_S = 2.0
GRACE_MS = 100
"""Time on top of the deadline, for the load's own process and the way there and back."""
STARTED = "started"
"""The first line of a load; its answers are the second."""
RESULT = Path(__file__).parent / "results" / "router.json"
LETTERS = [chr(0x4E00 + number) for number in range(3000)]

Figures = dict[str, Any]


class Answer(NamedTuple):
    """A request's end, as the load's process writes it."""

    due_s: float
    """Seconds from the start of the load until the request was due."""
    latency_ms: float
    status: int
    """The HTTP status; 0 if there was no answer."""
    source: str
    version: str
    reason: str


def main() -> None:
    """Be one of the processes, or the benchmark that starts them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stub", type=int, metavar="PORT", help="be the model")
    parser.add_argument("--model-ms", type=float, default=MODEL_MS)
    parser.add_argument("--load", metavar="URL", help="be the load; prints its answers as JSON")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument(
        "--give-up-s", type=float, default=GIVE_UP_S, help="after which an answer is none"
    )
    parser.add_argument(
        "--scenario", choices=SCENARIOS, help="only this one; prints its outcome as JSON"
    )
    options = parser.parse_args()
    if options.scenario:
        with tempfile.TemporaryDirectory(prefix="qinglan-router-") as folder:
            print(json.dumps(scenario(Path(folder), options.scenario)))
    elif options.stub is not None:
        asyncio.run(be_the_model(options.stub, options.model_ms / 1000))
    elif options.load:
        load = be_the_load(options.load, options.rate, options.seconds, options.give_up_s)
        print(json.dumps(asyncio.run(load)))
    else:
        sys.exit(benchmark())


async def be_the_model(port: int, answer_after_s: float) -> None:
    """An OpenAI-compatible server that always answers the same; the first line says where."""
    message = {"role": "assistant", "content": "益生菌 服用时间 饭前饭后"}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": usage}).encode()

    async def complete(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(answer_after_s)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


async def be_the_load(url: str, rate: float, seconds: float, give_up_s: float) -> list[Answer]:
    """Send requests at a constant rate; the answers in the order of the requests."""
    rng = random.Random(1)
    bodies = [request_body(rng) for _ in range(round(rate * seconds))]
    # Without a limit: a request must not wait for the answer to another one.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=give_up_s)
    ) as session:
        print(STARTED, flush=True)
        # The first request must not be late already.
        start = time.perf_counter() + 0.1
        tasks = []
        for number, body in enumerate(bodies):
            due = start + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(session, url, body, due, start)))
        return await asyncio.gather(*tasks)


def request_body(rng: random.Random) -> bytes:
    """A question of 20 to 40 characters."""
    query = "".join(rng.choices(LETTERS, k=rng.randint(20, 40)))
    body = {
        "model": "champion",
        "messages": [{"role": "user", "content": query}],
        "history": "上次问过益生菌",
    }
    return json.dumps(body, ensure_ascii=False).encode()


async def ask(
    session: aiohttp.ClientSession, url: str, body: bytes, due: float, start: float
) -> Answer:
    """One request, timed from when it was due."""
    status = 0
    headers: dict[str, str] = {}
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as response:
            await response.read()
            status = response.status
            headers = dict(response.headers)
    except (aiohttp.ClientError, TimeoutError):
        pass
    return Answer(
        due_s=due - start,
        # From when it was due: a load that falls behind must not hide what waits.
        latency_ms=1000 * (time.perf_counter() - due),
        status=status,
        source=headers.get("x-qinglan-source", ""),
        version=headers.get("x-qinglan-version", ""),
        reason=headers.get("x-qinglan-reason", ""),
    )


def benchmark() -> int:
    """All rounds and scenarios; the exit status."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="qinglan-router-") as folder:
        rounds = [one_round(Path(folder)) for _ in range(ROUNDS)]
        faults = [scenario(Path(folder), name) for name in SCENARIOS]
    result = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average_before": round(load_before, 2),
        "rate": RATE,
        "seconds": SECONDS,
        "model_ms": MODEL_MS,
        "deadline_ms": DEADLINE_MS,
        "rounds": rounds,
        "median_added_ms": median_added(rounds),
        "faults": faults,
    }
    show(result)
    if (RATE, SECONDS, ROUNDS) == FULL:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nWritten to {RESULT}")
    problems = list(problems_of(result))
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


def problems_of(result: Figures) -> Iterator[str]:
    """A sentence for each thing that must not be."""
    for fault in result["faults"]:
        if not fault["ok"]:
            yield f"{fault['name']}: requests were lost, late or dropped"
    fallbacks = sum(row["router"]["fallbacks"] for row in result["rounds"])
    if fallbacks:
        yield f"{fallbacks} requests got the original question though the model was well"
    added_ms = result["median_added_ms"]["p99"]
    if added_ms > LIMIT_MS:
        yield f"{added_ms:.1f} ms added at p99 are above the limit of {LIMIT_MS:g} ms"


def one_round(folder: Path) -> Figures:
    """The same load at the model and through the router, on fresh processes."""
    with ExitStack() as stack:
        model = stack.enter_context(Stub())
        router, _ = stack.enter_context(routed(folder, Routes(champion=model.backend("1"))))
        # First requests open connections and load code.
        run_load(model.url, seconds=WARM_UP_S)
        run_load(router, seconds=WARM_UP_S)
        direct = percentiles(run_load(model.url))
        through_router = percentiles(run_load(router))
    return {"direct": direct, "router": through_router}


def median_added(rounds: list[Figures]) -> dict[str, float]:
    """Router minus direct at each percentile, and the middle of the rounds."""
    medians: dict[str, float] = {}
    for name in ("p50", "p99", "p99.9"):
        added_ms = [row["router"][name] - row["direct"][name] for row in rounds]
        medians[name] = round(float(np.median(added_ms)), 2)
    return medians


def percentiles(answers: list[Answer]) -> Figures:
    """Percentiles of the latency in ms; a lost request stops the benchmark."""
    failed = [answer for answer in answers if answer.status != 200]
    if failed:
        count = f"{len(failed)} of {len(answers)} requests"
        sys.exit(f"error: {count} without an answer, first {tuple(failed[0])}")
    latencies_ms = [answer.latency_ms for answer in answers]
    p50, p99, p999 = np.percentile(latencies_ms, [50, 99, 99.9]).round(2).tolist()
    row = {
        "n": len(answers),
        "p50": p50,
        "p99": p99,
        "p99.9": p999,
        "fallbacks": sum(answer.source == "fallback" for answer in answers),
        "load_average": round(os.getloadavg()[0], 2),
    }
    print(row, flush=True)
    return row


class Stub:
    """A model's process, as a context."""

    def __init__(self, port: int = 0) -> None:
        self._start(port)

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def _start(self, port: int) -> None:
        self._process, self.url = started([sys.executable, __file__, "--stub", str(port)])

    def signal(self, number: int) -> None:
        """Send a signal to the model's process."""
        self._process.send_signal(number)

    def backend(self, version: str) -> Backend:
        """The model as the site would write it into its routes."""
        return Backend(url=f"{self.url}/v1", model="m", version=version)

    def again(self) -> None:
        """Start another process in the place of one that is dead."""
        self._process.wait()
        self._start(int(self.url.rpartition(":")[2]))


@contextmanager
def routed(folder: Path, routes: Routes) -> Iterator[tuple[str, Path]]:
    """A router's address, and its routes file."""
    path = folder / "routes.json"
    routes.write(path)
    argv = [sys.executable, "-m", "qinglan.serving.router", "--profile", "embedded"]
    argv += ["--routes", str(path), "--port=0", "--set", f"serve.deadline_ms={DEADLINE_MS}"]
    process, url = started(argv)
    try:
        yield url, path
    finally:
        process.terminate()
        process.wait()


def started(argv: list[str]) -> tuple[subprocess.Popen[str], str]:
    """A process and the address that its first line says."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    url = process.stdout.readline().strip()
    if not url:
        sys.exit(f"error: {argv[1:3]} did not start")
    return process, url


def run_load(
    url: str, meanwhile: Callable[[], None] = lambda: None, seconds: float = SECONDS
) -> list[Answer]:
    """The load's answers; `meanwhile` is called once it runs."""
    argv = [sys.executable, __file__, "--load", url, "--rate", str(RATE), "--seconds", str(seconds)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        meanwhile()
        output, _ = process.communicate()
    return [Answer(*values) for values in json.loads(output)]


def kill_and_start_again(model: Stub, _new_model: Stub, _path: Path) -> None:
    """Kill the model for the second quarter of the time."""
    time.sleep(SECONDS / 4)
    model.signal(signal.SIGKILL)
    time.sleep(SECONDS / 4)
    model.again()


def hang(model: Stub, _new_model: Stub, _path: Path) -> None:
    """Have the model accept, and never answer, for the second quarter of the time."""
    time.sleep(SECONDS / 4)
    model.signal(signal.SIGSTOP)
    time.sleep(SECONDS / 4)
    model.signal(signal.SIGCONT)


def swap(model: Stub, new_model: Stub, path: Path) -> None:
    """Name another champion in the middle; the old one goes a second later."""
    time.sleep(SECONDS / 2)
    Routes(champion=new_model.backend("2")).write(path)
    time.sleep(1.0)
    model.signal(signal.SIGTERM)


SCENARIOS: dict[str, Callable[[Stub, Stub, Path], None]] = {
    "model killed": kill_and_start_again,
    "model hangs": hang,
    "champion swapped": swap,
}


def scenario(folder: Path, name: str) -> Figures:
    """A load through the router while something happens."""
    with ExitStack() as stack:
        model = stack.enter_context(Stub())
        new_model = stack.enter_context(Stub())
        router, path = stack.enter_context(routed(folder, Routes(champion=model.backend("1"))))
        run_load(router, seconds=WARM_UP_S)
        answers = run_load(router, lambda: SCENARIOS[name](model, new_model, path))
    latencies_ms = [answer.latency_ms for answer in answers]
    outcome = {
        "name": name,
        "n": len(answers),
        "lost": sum(answer.status != 200 for answer in answers),
        "late": sum(latency_ms > DEADLINE_MS + GRACE_MS for latency_ms in latencies_ms),
        "worst_ms": round(max(latencies_ms), 1),
        "sources": Counter(
            f"{answer.source} {answer.reason or answer.version}" for answer in answers
        ),
        "ends_with_model": answers[-1].source == "model",
    }
    # A swap must be seen by no request: each is answered by the one champion or by the other.
    both_champions = {"model 1", "model 2"}
    is_dropped = name == "champion swapped" and outcome["sources"].keys() != both_champions
    is_bad = outcome["lost"] or outcome["late"] or is_dropped
    outcome["ok"] = not is_bad and outcome["ends_with_model"]
    return outcome


def show(result: Figures) -> None:
    """Print the tables."""
    print(
        f"\n{RATE:g} requests/s, {SECONDS:g} s a load, model answers after {MODEL_MS} ms, "
        f"{os.cpu_count()} cores"
    )
    print("| ms | p50 | p99 | p99.9 | load average |\n| --- | ---: | ---: | ---: | ---: |")
    for row in result["rounds"]:
        for name in ("direct", "router"):
            cells = [f"{row[name][key]:.1f}" for key in ("p50", "p99", "p99.9", "load_average")]
            print(f"| {name} | {' | '.join(cells)} |")
    added_ms = result["median_added_ms"]
    cells = [f"{added_ms[key]:.1f}" for key in ("p50", "p99", "p99.9")]
    print(f"| added, median of {ROUNDS} | {' | '.join(cells)} | |")
    print("\n| | requests | lost | late | worst ms | answers |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for row in result["faults"]:
        sources = ", ".join(f"{count} {name}" for name, count in sorted(row["sources"].items()))
        counts = f"{row['n']} | {row['lost']} | {row['late']} | {row['worst_ms']}"
        print(f"| {row['name']} | {counts} | {sources} |")


if __name__ == "__main__":
    main()
