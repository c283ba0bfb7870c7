"""Questions a second that the released student answers through the router, by vLLM and by default.

    make demo && make setup-vllm
    make bench NAME=serving_backends

`qinglan serve` with the champion of `make demo`, on the CPU, by each backend with two threads and
with one; 16 clients ask the sample's test questions in three rounds, after one to warm up. Prints a
line for each and the ratios of the medians, and writes benchmarks/results/serving_backends.json.
Exits with 1 where the model did not answer a question.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median

import httpx2

from qinglan.config import load_profile
from qinglan.ops.estimate.counting import questions_of

RESULT = Path(__file__).parent / "results" / "serving_backends.json"
PROFILES = {"transformers": "embedded", "vllm": "embedded_vllm"}
CLIENTS = 16
QUESTIONS = 320
ROUNDS = 3
PROFILES_THREADS = 2
"""`trainer.threads` as the profiles have it, which the model's server takes."""
ONE_THREAD = 1
"""The number of threads that suits so small a model better."""
THREADS = (PROFILES_THREADS, ONE_THREAD)
READY_WITHIN_S = 600.0
TARGET_RATIO = 1.4
UNUSABLE = {"empty_answer", "truncated", "rewrite_too_long", "boilerplate", "repetitive_rewrite"}
"""Reasons for which the router gives out the question in place of an answer of the model."""


def main() -> None:
    """Measure, print and write."""
    with questions_of(load_profile("embedded")) as rows:
        test_queries = (row.query for row in rows if row.split == "test")
        questions = list(islice(test_queries, QUESTIONS))
    per_second = {
        (backend, threads): rounds_of(backend, threads, questions)
        for backend, threads in product(PROFILES, THREADS)
    }
    ratios = {
        threads: median(per_second["vllm", threads]) / median(per_second["transformers", threads])
        for threads in THREADS
    }
    result = {
        "commit": subprocess.check_output(
            ["git", "rev-parse", "--short", "HEAD"], text=True
        ).strip(),
        "cores": os.cpu_count(),
        "clients": CLIENTS,
        "questions": len(questions),
        "ratios": ratios,
        "arms": [
            {"backend": backend, "threads": threads, "answers_per_s": rates}
            for (backend, threads), rates in per_second.items()
        ],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n| backend | threads | answers/s, median | lowest | highest |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for (backend, threads), rates in per_second.items():
        cells = [f"{rate:.1f}" for rate in (median(rates), min(rates), max(rates))]
        print(f"| {backend} | {threads} | {' | '.join(cells)} |")
    print(f"\nwith {ONE_THREAD} thread vllm answers {ratios[ONE_THREAD]:.2f} times as many")
    ratio = ratios[PROFILES_THREADS]
    verdict = "met   " if ratio >= TARGET_RATIO else "MISSED"
    print(
        f"{verdict}  as the profiles have it, {ratio:.2f} times as many, at least {TARGET_RATIO} "
        "wanted"
    )


def rounds_of(backend: str, threads: int, questions: Sequence[str]) -> list[float]:
    """Answers a second of each round."""
    rates = []
    with (
        serving(backend, threads) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=120) as client,
    ):
        for number in range(ROUNDS + 1):
            start = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as pool:
                reasons = Counter(pool.map(partial(ask, client), questions))
            rates.append(len(questions) / (time.perf_counter() - start))
            unusable = {reason: count for reason, count in reasons.items() if reason}
            name = f"{backend}, {threads} threads, round {number}"
            print(
                f"{name}: {rates[-1]:.1f} answers/s; without a usable rewrite: {unusable}",
                flush=True,
            )
            failures = sorted(unusable.keys() - UNUSABLE)
            if failures:
                sys.exit(
                    f"error: {backend}: not every question was answered by the model: "
                    f"{', '.join(failures)}"
                )
    # The first round is there to warm up.
    return rates[1:]


def ask(client: httpx2.Client, question: str) -> str:
    """The reason why there is no usable answer; empty where there is one."""
    body = {"model": "champion", "messages": [{"role": "user", "content": question}]}
    answer = client.post("/v1/chat/completions", json=body)
    if not answer.is_success:
        return f"HTTP {answer.status_code}"
    return answer.headers.get("x-qinglan-reason", "")


@contextmanager
def serving(backend: str, threads: int) -> Iterator[str]:
    """`qinglan serve` with the champion of `embedded`.

    Yields the router's address, once the model is ready.
    """
    of_backend = load_profile(PROFILES[backend])
    settings = {
        "serve.backend": backend,
        "serve.extra": json.dumps(of_backend.serve.extra),
        "trainer.python": of_backend.trainer.python,
        "serve.deadline_ms": "60000",
        "trainer.threads": str(threads),
    }
    argv = [sys.executable, "-m", "qinglan.cli", "serve", "--profile", "embedded", "--port", "0"]
    for key, value in settings.items():
        if value is not None:
            argv += ["--set", f"{key}={value}"]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _address(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + READY_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline_s:
        output = log.read_text(encoding="utf-8")
        address = re.search(r"^Router\s+(\S+)/v1$", output, re.MULTILINE)
        if address and re.search(r"version \d+: ready", output):
            return address[1]
        time.sleep(0.5)
    sys.exit(f"error: the model is not ready:\n{log.read_text(encoding='utf-8')[-3000:]}")


if __name__ == "__main__":
    main()
