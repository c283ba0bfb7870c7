"""Compares the numbers of training's operations on this processor and on ones that QEMU emulates.

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
# The sizes of the demo's model.
WIDTH = 128
WIDER = 512
VOCABULARY = 2117
PRETRAINING_STEPS = 3


def main() -> None:
    """Run every operation everywhere and print where the results are equal."""
    parser = argparse.ArgumentParser(
        description=(
            "Would another processor give the same numbers? The operations of training, on "
            "processors that QEMU emulates."
        )
    )
    parser.add_argument(
        "--digests", choices=("operations", "rag"), help="print these digests of this process"
    )
    digests_of = parser.parse_args().digests
    if digests_of:
        print(json.dumps(dict(operations()) if digests_of == "operations" else rag()))
        return
    here = digests([])
    emulated = [digests(["qemu-x86_64", "-cpu", name]) for name in PROCESSORS]
    print(f"| operation | {' | '.join(PROCESSORS)} |")
    print("| --- |" + " --- |" * len(PROCESSORS))
    for name, digest in here.items():
        cells = [_equal(digest, digests_there[name]) for digests_there in emulated]
        print(f"| {name} | {' | '.join(cells)} |")
    # QEMU has no AVX-512, so this processor runs without it instead.
    with_avx512 = run([], "--digests", "rag")
    without = run([], "--digests", "rag", env={"NPY_DISABLE_CPU_FEATURES": "X86_V4"})
    print(f"\nsimulated RAG with and without NumPy's AVX-512: {_equal(with_avx512, without)}")


def _equal(digest: str, digest_there: str) -> str:
    return "equal" if digest == digest_there else "different"


def digests(emulator: Sequence[str]) -> dict[str, str]:
    """The digest of each operation and of pretraining, by name."""
    digest_of: dict[str, str] = json.loads(run(emulator, "--digests", "operations"))
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "domain": "query_rewrite",
            "seed": 1,
            "steps": PRETRAINING_STEPS,
            "seconds_max": 3600,
            "output": f"{folder}/model",
            "metrics": f"{folder}/metrics.jsonl",
            "threads": THREADS,
        }
        run(emulator, "-m", "qinglan.simulators.pretrain", json.dumps(settings))
        weights = Path(folder, "model", "model.safetensors").read_bytes()
    digest_of[f"{PRETRAINING_STEPS} steps of pretraining"] = hashlib.sha256(weights).hexdigest()
    return digest_of


def run(emulator: Sequence[str], *argv: str, env: Mapping[str, str] | None = None) -> str:
    """The output of a Python process; its program is this file unless `argv` names a module."""
    program = [] if argv[0] == "-m" else [__file__]
    environment = {**os.environ, **cpu_env(THREADS, "float32"), **(env or {})}
    command = [*emulator, sys.executable, *program, *argv]
    process = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{' '.join(command)}\n{process.stderr}")
    return process.stdout


def operations() -> Iterator[tuple[str, str]]:
    """Name and digest of each operation, on the same random numbers everywhere."""
    random = np.random.Generator(np.random.Philox(key=1))

    def tensor(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype(np.float32))

    for rows in (1, 8, 64, 2000):
        product = linear(tensor(rows, WIDTH), tensor(WIDER, WIDTH))
        yield f"matrix product, {rows} rows", _digest(product)
    yield "logits, 64 rows", _digest(linear(tensor(64, WIDTH), tensor(VOCABULARY, WIDTH)))
    yield "weight gradient, 2000 rows", _digest(tensor(2000, WIDER).t() @ tensor(2000, WIDTH))
    yield "value head, 2000 rows", _digest(linear(tensor(2000, WIDTH), tensor(1, WIDTH)))
    numbers = tensor(20_000).abs()
    for name in ("exp", "log", "sqrt", "rsqrt", "sigmoid"):
        yield name, _digest(getattr(torch, name)(numbers))
    yield "softmax", _digest(tensor(64, VOCABULARY).softmax(-1))
    yield "logsumexp", _digest(tensor(64, VOCABULARY).logsumexp(-1))
    weights = tensor(WIDER, WIDTH)
    gradient = tensor(WIDER, WIDTH)
    for name, is_fused in (("AdamW, not fused", False), ("AdamW, fused", True)):
        updated = weights.clone().requires_grad_()
        updated.grad = gradient
        torch.optim.AdamW([updated], fused=is_fused).step()
        yield name, _digest(updated.detach())


def rag() -> dict[str, str]:
    """Digest of the documents that the simulated RAG retrieves for parts of all its titles."""
    retriever = Retriever(documents())
    queries = sorted({title(*document.id.rsplit("-", 1))[-4:] for document in documents()})
    retrieved_ids = []
    for query in queries:
        retrieved_ids.append([hit.document.id for hit in retriever.search(query)])
    digest = hashlib.sha256(json.dumps(retrieved_ids).encode()).hexdigest()
    return {"simulated RAG": digest}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
