"""What the router adds to a model's latency, and what happens to requests when models die, hang or
change.

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
from typing import Any

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
"""For what the router may add at p99."""
WARM_UP_S = 2.0
GRACE_MS = 100
"""On top of the deadline, for the load's own process and the way there and back."""
STARTED = "started"
"""The first line of a load; its answers are the second."""
RESULT = Path(__file__).parent / "results" / "router.json"
LETTERS = [chr(0x4E00 + i) for i in range(3000)]

Answer = tuple[float, float, int, str, str, str]
"""Due at (s), latency (ms), HTTP status (0: none), source, version, reason."""


def main() -> None:
    """One of the processes, or the benchmark that starts them."""
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
        print(
            json.dumps(
                asyncio.run(
                    be_the_load(options.load, options.rate, options.seconds, options.give_up_s)
                )
            )
        )
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
    """Requests at a constant rate; every one of them comes back with what became of it."""
    source = random.Random(1)
    bodies = [request_body(source) for _ in range(round(rate * seconds))]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=give_up_s)
    ) as session:
        print(STARTED, flush=True)
        start = time.perf_counter() + 0.1
        tasks = []
        for number, body in enumerate(bodies):
            due = start + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(session, url, body, due, start)))
        return await asyncio.gather(*tasks)


def request_body(source: random.Random) -> bytes:
    """A question of 20 to 40 characters."""
    query = "".join(source.choices(LETTERS, k=source.randint(20, 40)))
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
    status, headers = 0, {}
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as response:
            await response.read()
            status, headers = response.status, dict(response.headers)
    except (aiohttp.ClientError, TimeoutError):
        pass
    told = [headers.get(f"x-qinglan-{name}", "") for name in ("source", "version", "reason")]
    return due - start, 1000 * (time.perf_counter() - due), status, told[0], told[1], told[2]


def benchmark() -> int:
    """All of it; the exit status."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="qinglan-router-") as name:
        folder = Path(name)
        rounds = [one_round(folder) for _ in range(ROUNDS)]
        faults = [scenario(folder, name) for name in SCENARIOS]
    result = {
        "machine": platform.machine(), "cores": os.cpu_count(), "load_average_before": round(load_before, 2),
        "rate": RATE, "seconds": SECONDS, "model_ms": MODEL_MS, "deadline_ms": DEADLINE_MS,
        "rounds": rounds, "median_added_ms": median_added(rounds), "faults": faults,
    }  # fmt: skip
    show(result)
    if (RATE, SECONDS, ROUNDS) == FULL:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nWritten to {RESULT}")
    problems = list(problems_of(result))
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


def problems_of(result: dict[str, Any]) -> Iterator[str]:
    """What must not be."""
    yield from (
        f"{fault['name']}: requests were lost, late or dropped"
        for fault in result["faults"]
        if not fault["ok"]
    )
    if fallbacks := sum(row["router"]["fallbacks"] for row in result["rounds"]):
        yield f"{fallbacks} requests got the original question though the model was well"
    if (added := result["median_added_ms"]["p99"]) > LIMIT_MS:
        yield f"{added:.1f} ms added at p99 are above the limit of {LIMIT_MS:g} ms"


def one_round(folder: Path) -> dict[str, Any]:
    """The same load at the model and through the router, on fresh processes."""
    with ExitStack() as stack:
        model = stack.enter_context(Stub())
        router, _ = stack.enter_context(routed(folder, Routes(champion=model.backend("1"))))
        for url in (model.url, router):
            run_load(url, seconds=WARM_UP_S)
        direct, through = (percentiles(run_load(url)) for url in (model.url, router))
    return {"direct": direct, "router": through}


def median_added(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Router minus direct at each percentile, and the middle of the rounds."""
    return {
        name: round(
            float(np.median([row["router"][name] - row["direct"][name] for row in rounds])), 2
        )
        for name in ("p50", "p99", "p99.9")
    }


def percentiles(answers: list[Answer]) -> dict[str, Any]:
    """Of the latency in ms; a lost request stops the benchmark."""
    if failed := [answer for answer in answers if answer[2] != 200]:
        sys.exit(
            f"error: {len(failed)} of {len(answers)} requests without an answer, first {failed[0]}"
        )
    p50, p99, p999 = (
        np.percentile([answer[1] for answer in answers], [50, 99, 99.9]).round(2).tolist()
    )
    fallbacks, load = (
        sum(answer[3] == "fallback" for answer in answers),
        round(os.getloadavg()[0], 2),
    )
    row = {
        "n": len(answers),
        "p50": p50,
        "p99": p99,
        "p99.9": p999,
        "fallbacks": fallbacks,
        "load_average": load,
    }
    print(row, flush=True)
    return row


class Stub:
    """A model's process, as a context."""

    def __init__(self, port: int = 0) -> None:
        self._process, self.url = started([sys.executable, __file__, "--stub", str(port)])

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def signal(self, number: int) -> None:
        """To its process."""
        self._process.send_signal(number)

    def backend(self, version: str) -> Backend:
        """As the site would write it."""
        return Backend(url=f"{self.url}/v1", model="m", version=version)

    def again(self) -> None:
        """Another process in the place of one that is dead."""
        self._process.wait()
        self._process, self.url = started(
            [sys.executable, __file__, "--stub", self.url.rpartition(":")[2]]
        )


@contextmanager
def routed(folder: Path, routes: Routes) -> Iterator[tuple[str, Path]]:
    """A router's address, and its routes file."""
    path = folder / "routes.json"
    routes.write(path)
    argv = [
        sys.executable,
        "-m",
        "qinglan.serving.router",
        "--profile",
        "embedded",
        "--routes",
        str(path),
        "--port=0",
    ]
    process, url = started([*argv, "--set", f"serve.deadline_ms={DEADLINE_MS}"])
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
        answers, _ = process.communicate()
    return [tuple(answer) for answer in json.loads(answers)]


def kill_and_start_again(model: Stub, _other: Stub, _path: Path) -> None:
    """Dead from a quarter to half of the time."""
    time.sleep(SECONDS / 4)
    model.signal(signal.SIGKILL)
    time.sleep(SECONDS / 4)
    model.again()


def hang(model: Stub, _other: Stub, _path: Path) -> None:
    """Accepts, and never answers, from a quarter to half of the time."""
    time.sleep(SECONDS / 4)
    model.signal(signal.SIGSTOP)
    time.sleep(SECONDS / 4)
    model.signal(signal.SIGCONT)


def swap(model: Stub, other: Stub, path: Path) -> None:
    """Another champion in the middle; the old one goes a second later."""
    time.sleep(SECONDS / 2)
    Routes(champion=other.backend("2")).write(path)
    time.sleep(1.0)
    model.signal(signal.SIGTERM)


SCENARIOS: dict[str, Callable[[Stub, Stub, Path], None]] = {
    "model killed": kill_and_start_again,
    "model hangs": hang,
    "champion swapped": swap,
}


def scenario(folder: Path, name: str) -> dict[str, Any]:
    """A load through the router while something happens."""
    with ExitStack() as stack:
        model, other = stack.enter_context(Stub()), stack.enter_context(Stub())
        router, path = stack.enter_context(routed(folder, Routes(champion=model.backend("1"))))
        run_load(router, seconds=WARM_UP_S)
        answers = run_load(router, lambda: SCENARIOS[name](model, other, path))
    latencies = [answer[1] for answer in answers]
    outcome = {
        "name": name,
        "n": len(answers),
        "lost": sum(answer[2] != 200 for answer in answers),
        "late": sum(latency > DEADLINE_MS + GRACE_MS for latency in latencies),
        "worst_ms": round(max(latencies), 1),
        "sources": Counter(f"{a[3]} {a[5] or a[4]}" for a in answers),
        "ends_with_model": answers[-1][3] == "model",
    }
    dropped = name == "champion swapped" and outcome["sources"].keys() != {"model 1", "model 2"}
    outcome["ok"] = (
        not (outcome["lost"] or outcome["late"] or dropped) and outcome["ends_with_model"]
    )
    return outcome


def show(result: dict[str, Any]) -> None:
    """The tables."""
    print(
        f"\n{RATE:g} requests/s, {SECONDS:g} s a load, model answers after {MODEL_MS} ms, {os.cpu_count()} cores"
    )
    print("| ms | p50 | p99 | p99.9 | load average |\n| --- | ---: | ---: | ---: | ---: |")
    for row in result["rounds"]:
        for name in ("direct", "router"):
            cells = [f"{row[name][key]:.1f}" for key in ("p50", "p99", "p99.9", "load_average")]
            print(f"| {name} | {' | '.join(cells)} |")
    added = result["median_added_ms"]
    print(
        f"| added, median of {ROUNDS} | {added['p50']:.1f} | {added['p99']:.1f} | {added['p99.9']:.1f} | |"
    )
    print(
        "\n| | requests | lost | late | worst ms | answers |\n| --- | ---: | ---: | ---: | ---: | --- |"
    )
    for row in result["faults"]:
        sources = ", ".join(f"{count} {name}" for name, count in sorted(row["sources"].items()))
        print(
            f"| {row['name']} | {row['n']} | {row['lost']} | {row['late']} | {row['worst_ms']} | {sources} |"
        )


if __name__ == "__main__":
    main()
