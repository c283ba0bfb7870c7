"""Would another processor give the same numbers? The operations of training, on processors that
QEMU emulates.

    apt-get install qemu-user
    make bench NAME=processors                          (some ten minutes)

Each operation, a few steps of pretraining and the simulated RAG run with the environment of an
engine's process, on this processor and on others. QEMU 7.2 emulates AVX2 but not AVX-512, and takes
approximate square roots exactly: it shows where another processor computes in another way, not
which bits it gives. So the RAG runs with and without NumPy's AVX-512 instead. Prints a table;
writes nothing.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear

from qinglan.cpu import cpu_env
from qinglan.simulators.domains.query_rewrite.facts import documents, title
from qinglan.simulators.retriever import Retriever

PROCESSORS = ("EPYC-Milan", "Skylake-Client-noTSX-IBRS")
THREADS = 2
WIDTH, WIDER, VOCABULARY = 128, 512, 2117
"""Of the demo's model."""
PRETRAINING_STEPS = 3


def main() -> None:
    """Run every operation everywhere and print where the results are equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--digests", choices=("operations", "rag"), help="print these digests of this process"
    )
    if part := parser.parse_args().digests:
        print(json.dumps(dict(operations()) if part == "operations" else {"simulated RAG": rag()}))
        return
    here = digests([])
    emulated = {name: digests(["qemu-x86_64", "-cpu", name]) for name in PROCESSORS}
    print("| operation | " + " | ".join(PROCESSORS) + " |\n| --- |" + " --- |" * len(PROCESSORS))
    for name, value in here.items():
        print(
            f"| {name} | "
            + " | ".join(_equal(value, each[name]) for each in emulated.values())
            + " |"
        )
    ranked = [
        run([], "--digests", "rag", env=env) for env in ({}, {"NPY_DISABLE_CPU_FEATURES": "X86_V4"})
    ]
    print(f"\nsimulated RAG with and without NumPy's AVX-512: {_equal(*ranked)}")


def _equal(one: str, other: str) -> str:
    return "equal" if one == other else "different"


def digests(emulator: Sequence[str]) -> dict[str, str]:
    """Of each operation and of pretraining, by name."""
    found: dict[str, str] = json.loads(run(emulator, "--digests", "operations"))
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            "domain": "query_rewrite",
            "seed": 1,
            "steps": PRETRAINING_STEPS,
            "seconds_max": 3600,
        }
        paths = {
            "output": f"{folder}/model",
            "metrics": f"{folder}/metrics.jsonl",
            "threads": THREADS,
        }
        run(emulator, "-m", "qinglan.simulators.pretrain", json.dumps(wanted | paths))
        weights = hashlib.sha256(
            Path(folder, "model", "model.safetensors").read_bytes()
        ).hexdigest()
    return found | {f"{PRETRAINING_STEPS} steps of pretraining": weights}


def run(emulator: Sequence[str], *argv: str, env: Mapping[str, str] | None = None) -> str:
    """What a Python process printed; its program is this file where `argv` names no module."""
    program = [] if argv[0] == "-m" else [__file__]
    environment = {**os.environ, **cpu_env(THREADS, "float32"), **(env or {})}
    command = [*emulator, sys.executable, *program, *argv]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def operations() -> Iterator[tuple[str, str]]:
    """Name and digest of each."""
    random = np.random.Generator(np.random.Philox(key=1))

    def tensor(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    for rows in (1, 8, 64, 2000):
        yield (
            f"matrix product, {rows} rows",
            _digest(linear(tensor(rows, WIDTH), tensor(WIDER, WIDTH))),
        )
    yield "logits, 64 rows", _digest(linear(tensor(64, WIDTH), tensor(VOCABULARY, WIDTH)))
    yield "weight gradient, 2000 rows", _digest(tensor(2000, WIDER).t() @ tensor(2000, WIDTH))
    yield "value head, 2000 rows", _digest(linear(tensor(2000, WIDTH), tensor(1, WIDTH)))
    numbers = tensor(20_000).abs()
    for name in ("exp", "log", "sqrt", "rsqrt", "sigmoid"):
        yield name, _digest(getattr(torch, name)(numbers))
    yield "softmax", _digest(tensor(64, VOCABULARY).softmax(-1))
    yield "logsumexp", _digest(tensor(64, VOCABULARY).logsumexp(-1))
    weights, gradient = tensor(WIDER, WIDTH), tensor(WIDER, WIDTH)
    for fused in (False, True):
        moved = weights.clone().requires_grad_()
        moved.grad = gradient
        torch.optim.AdamW([moved], fused=fused).step()
        yield f"AdamW, {'fused' if fused else 'not fused'}", _digest(moved.detach())


def rag() -> str:
    """Digest of what the simulated RAG finds for parts of all its titles."""
    retriever = Retriever(documents())
    queries = sorted({title(*document.id.rsplit("-", 1))[-4:] for document in documents()})
    found = [[hit.document.id for hit in retriever.search(query)] for query in queries]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
