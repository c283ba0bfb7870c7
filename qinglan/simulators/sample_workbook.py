"""Draws a sample's rows and writes its workbook: the same rows give the same bytes, whatever the time."""

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

from qinglan.config import Embedded
from qinglan.errors import ConfigError
from qinglan.rows import Split

Item = TypeVar("Item")

_MISSES_MAX = 2000
"""For one row, before the sample counts as exhausted."""
_FIXED_TIME = (2026, 1, 1, 0, 0, 0)


def draw_splits(config: Embedded, draw: Callable[[Split, int, Random], list[Item]]) -> list[Item]:
    """Train, then dev, then test, each with its own random numbers."""
    counts: dict[Split, int] = {
        "train": config.sample_train_rows,
        "dev": config.sample_dev_rows,
        "test": config.sample_test_rows,
    }
    return [row for split, n in counts.items() for row in draw(split, n, Random(f"{config.sample_seed}-{split}"))]


def draw_rows(split: Split, count: int, draw: Callable[[int], Item | None]) -> list[Item]:
    """`count` rows; `draw` gets the number of rows so far, and returns None where its row was drawn before."""
    rows: list[Item] = []
    misses = 0
    while len(rows) < count:
        if misses == _MISSES_MAX:
            raise ConfigError(
                f"embedded.sample_{split}_rows: {count} is too many, there are about {len(rows)} different questions"
            )
        row = draw(len(rows))
        misses += 1
        if row is not None:
            rows.append(row)
            misses = 0
    return rows


def rounds(items: Iterable[Item], rng: Random) -> Iterator[Item]:
    """All items again and again, in a new order each round."""
    while True:
        waiting = list(items)
        rng.shuffle(waiting)
        while waiting:
            yield waiting.pop()


def write_workbook(path: Path, sheet: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write an .xlsx of one sheet with a header row; it appears whole."""
    from openpyxl import Workbook  # absent from the trainer's environment, which loads the domains too

    book = Workbook(write_only=True)
    table = book.create_sheet(sheet)
    table.append(list(header))
    for row in rows:
        table.append(list(row))
    buffer = io.BytesIO()
    book.save(buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(_without_timestamps(buffer.getvalue()))
    partial.replace(path)


def _without_timestamps(workbook: bytes) -> bytes:
    """The same archive with fixed times; openpyxl stamps the current one on every member and into the properties."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(workbook)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "docProps/core.xml":
                content = re.sub(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", b"2026-01-01T00:00:00Z", content)
            target.writestr(zipfile.ZipInfo(name, _FIXED_TIME), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
