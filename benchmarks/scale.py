"""A million rows through selection and dataset: seconds, and how much memory they take at most.

    make bench NAME=scale            # ROWS=100000 for a smaller one

The rows are what `validate` leaves: questions of 20 to 40 characters with rewrite and two
retrievals of ten passages. One in a hundred repeats an earlier question with one more character;
one in two hundred is of a template of which thousands differ in one word. Selection and dataset run
in one process of their own, once for a tenant's first night and once with the first night's splits
pinned. Prints the table; a full run also writes benchmarks/results/scale.json.
"""

import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qinglan.config import load_profile
from qinglan.data.dataset import build
from qinglan.recipes import get_recipe
from qinglan.recipes.selection import select
from qinglan.rows import Retrieved, Row, Split, row_id
from qinglan.runs.artifacts import read_jsonl, write_jsonl
from qinglan.text import count

FULL_ROWS = 1_000_000
ROWS = int(os.environ.get("ROWS", FULL_ROWS))
MEMORY_LIMIT_MB = 1536
SEED = 1
RESULT = Path(__file__).parent / "results" / "scale.json"
LETTERS = [chr(0x4E00 + number) for number in range(3000)]
Figures = dict[str, Any]


def main() -> None:
    """Generate, run the two nights, print and write."""
    with tempfile.TemporaryDirectory(prefix="qinglan-scale-") as folder:
        validated = Path(folder) / "validated.jsonl"
        print(f"generating {count(ROWS)} rows", flush=True)
        size = write_jsonl(validated, generated(ROWS)).path.stat().st_size
        nights = [night(Path(folder), name) for name in ("first", "second")]
    print(f"\n{count(ROWS)} rows, {size / 1e9:.2f} GB of JSON lines")
    print("\n".join(table(nights)))
    if ROWS == FULL_ROWS:
        result = {
            "rows": ROWS,
            "bytes": size,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "nights": nights,
        }
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"\nWritten to {RESULT}")
    worst = max(figures["peak_mb"] for figures in nights)
    if worst > MEMORY_LIMIT_MB:
        sys.exit(f"peak memory {worst:,.0f} MB is above the limit of {MEMORY_LIMIT_MB:,} MB")


def table(nights: list[Figures]) -> Iterator[str]:
    """Markdown: a night a line."""
    yield "| Night | selection s | dataset s | rows/s | peak memory MB | SFT rows | test rows |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for figures in nights:
        times = f"{figures['select_s']:.0f} | {figures['dataset_s']:.0f}"
        names = ("rows_per_s", "peak_mb", "sft_train", "test")
        counts = " | ".join(count(figures[name]) for name in names)
        yield f"| {figures['night']} | {times} | {counts} |"


def generated(rows: int) -> Iterator[Row]:
    """Validated rows, the same at every call."""
    source = random.Random(SEED)
    recent: list[str] = []
    for number in range(rows):
        kind = source.random()
        if kind < 0.005:
            query = f"请问一下医生每天早上空腹吃{letters(source, 3)}的话会不会伤胃有没有什么副作用"
        elif kind < 0.015 and recent:
            query = source.choice(recent) + letters(source, 1)
        else:
            query = letters(source, source.randint(20, 40))
            recent = [*recent[-99:], query]
        yield Row(
            id=row_id("scale", query),
            tenant="scale",
            query=query,
            source=f"scale.jsonl:{number}",
            answer=f"{query[:4]} {letters(source, source.randint(4, 12))}",
            answer_request=f"{number:064x}",
            answer_latency_ms=812.5,
            answer_cost_usd=0.000123,
            judge_score=float(source.randint(2, 5)),
            original_retrieved=retrieved(source, 0.7),
            answer_retrieved=retrieved(source, 0.9),
        )


def letters(source: random.Random, length: int) -> str:
    """Chinese characters, drawn evenly."""
    return "".join(source.choices(LETTERS, k=length))


def retrieved(source: random.Random, best: float) -> Retrieved:
    """Ten passages."""
    scores = sorted((round(best * source.random() ** 0.3, 4) for _ in range(10)), reverse=True)
    ids = [f"doc-{source.randrange(10_000):05d}" for _ in scores]
    titles = [f"关于{name}的说明与服用方法" for name in ids]
    return Retrieved(ids=tuple(ids), scores=tuple(scores), titles=tuple(titles))


def night(folder: Path, name: str) -> Figures:
    """Run a night in a process of its own, and read what it measured."""
    print(f"{name} night", flush=True)
    # A process of its own: its peak of memory is then that of the two stages alone.
    argv = [sys.executable, __file__, "--night", name, str(folder)]
    process = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(process.stdout))


def measure(name: str, folder: Path) -> Figures:
    """Selection and dataset, as the stages call them."""
    profile = load_profile("embedded")
    start = time.perf_counter()
    recipe = get_recipe(profile.recipe)
    rows = select(read_jsonl(folder / "validated.jsonl", Row), recipe.grader, profile.select)
    selected = write_jsonl(folder / "selected.jsonl", rows).path
    middle = time.perf_counter()
    pinned_splits = splits_of(folder / "first" / "rows.jsonl") if name == "second" else None
    dataset = build(selected, folder / name, profile, pinned_splits)
    end = time.perf_counter()
    return {
        "night": name,
        "select_s": round(middle - start, 1),
        "dataset_s": round(end - middle, 1),
        "rows_per_s": round(dataset.after.total / (end - start)),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "cpu_s": round(time.process_time(), 1),
        "sft_train": dataset.artifacts["sft_train"].rows,
        "test": dataset.artifacts["test"].rows,
        "failed": dict(dataset.after.reasons),
    }


def splits_of(rows: Path) -> dict[str, Split]:
    """The splits that a night's rows got, by the rows' ids."""
    splits: dict[str, Split] = {}
    with rows.open(encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            splits[row["id"]] = row["split"]
    return splits


if __name__ == "__main__":
    if sys.argv[1:2] == ["--night"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]))))
    else:
        main()
