"""How many questions a second the released student answers through the router: by vLLM, and by the
default server.

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
from itertools import islice, product
from pathlib import Path
from statistics import median

import httpx2

from qinglan.config import load_profile
from qinglan.ops.estimate import questions_of

RESULT = Path(__file__).parent / "results" / "serving_backends.json"
PROFILES = {"transformers": "embedded", "vllm": "embedded_vllm"}
CLIENTS, QUESTIONS, ROUNDS = 16, 320, 3
THREADS = (2, 1)
"""Of the model's server (`trainer.threads`): the profiles' own, and what suits so small a model
better."""
READY_WITHIN_S = 600.0
TARGET_RATIO = 1.4
UNUSABLE = {"empty_answer", "truncated", "rewrite_too_long", "boilerplate", "repetitive_rewrite"}
"""What the model answered in full, and the router gave out the question in place of it."""


def main() -> None:
    with questions_of(load_profile("embedded")) as rows:
        questions = [
            row.query for row in islice((row for row in rows if row.split == "test"), QUESTIONS)
        ]
    per_second = {arm: rounds_of(*arm, questions) for arm in product(PROFILES, THREADS)}
    ratios = {
        threads: median(per_second["vllm", threads]) / median(per_second["transformers", threads])
        for threads in THREADS
    }
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    result = {
        "commit": commit,
        "cores": os.cpu_count(),
        "clients": CLIENTS,
        "questions": len(questions),
        "ratios": ratios,
    }
    arms = [
        {"backend": arm[0], "threads": arm[1], "answers_per_s": rates}
        for arm, rates in per_second.items()
    ]
    RESULT.write_text(json.dumps(result | {"arms": arms}, indent=1) + "\n", encoding="utf-8")
    print(
        "\n| backend | threads | answers/s, median | lowest | highest |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for (backend, threads), rates in per_second.items():
        print(
            f"| {backend} | {threads} | {median(rates):.1f} | {min(rates):.1f} | {max(rates):.1f} |"
        )
    print(f"\nwith {THREADS[1]} thread vllm answers {ratios[THREADS[1]]:.2f} times as many")
    verdict = "met   " if ratios[THREADS[0]] >= TARGET_RATIO else "MISSED"
    print(
        f"{verdict}  as the profiles have it, {ratios[THREADS[0]]:.2f} times as many, at least {TARGET_RATIO} wanted"
    )


def rounds_of(backend: str, threads: int, questions: Sequence[str]) -> list[float]:
    """Answers a second of each round."""
    with (
        serving(backend, threads) as url,
        httpx2.Client(base_url=url, trust_env=False, timeout=120) as client,
    ):

        def ask(question: str) -> str:
            body = {"model": "champion", "messages": [{"role": "user", "content": question}]}
            answer = client.post("/v1/chat/completions", json=body)
            return (
                answer.headers.get("x-qinglan-reason", "")
                if answer.is_success
                else f"HTTP {answer.status_code}"
            )

        rates = []
        for number in range(ROUNDS + 1):
            begun = time.perf_counter()
            with ThreadPoolExecutor(CLIENTS) as pool:
                reasons = Counter(pool.map(ask, questions))
            rates.append(len(questions) / (time.perf_counter() - begun))
            unusable = {reason: count for reason, count in reasons.items() if reason}
            done = f"{backend}, {threads} threads, round {number}: {rates[-1]:.1f} answers/s"
            print(f"{done}; without a usable rewrite: {unusable}", flush=True)
            if failures := unusable.keys() - UNUSABLE:
                sys.exit(
                    f"error: {backend}: not every question was answered by the model: {', '.join(sorted(failures))}"
                )
    return rates[1:]


@contextmanager
def serving(backend: str, threads: int) -> Iterator[str]:
    """`qinglan serve` with the champion of `embedded`; the router's address, once the model is
    ready."""
    of_backend = load_profile(PROFILES[backend])
    chosen = {"serve.backend": backend, "serve.extra": json.dumps(of_backend.serve.extra)}
    chosen |= {
        "trainer.python": of_backend.trainer.python,
        "serve.deadline_ms": "60000",
        "trainer.threads": str(threads),
    }
    argv = [sys.executable, "-m", "qinglan.cli", "serve", "--profile", "embedded", "--port", "0"]
    argv += [
        word
        for key, value in chosen.items()
        if value is not None
        for word in ("--set", f"{key}={value}")
    ]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield _address(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + READY_WITHIN_S
    while process.poll() is None and time.monotonic() < until:
        told = log.read_text(encoding="utf-8")
        if (found := re.search(r"^Router\s+(\S+)/v1$", told, re.MULTILINE)) and re.search(
            r"version \d+: ready", told
        ):
            return found[1]
        time.sleep(0.5)
    sys.exit(f"error: the model is not ready:\n{log.read_text(encoding='utf-8')[-3000:]}")


if __name__ == "__main__":
    main()
