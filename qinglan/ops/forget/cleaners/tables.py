"""Cleans files of tables: Parquet and workbooks."""

import zipfile
from pathlib import Path

from qinglan.data.sources.excel import load_book
from qinglan.ops.forget.cleaners.removal import NOTHING, Removal, rewrite
from qinglan.ops.forget.traces import Traces


def clean_parquet(path: Path, traces: Traces, *, dry_run: bool) -> Removal:
    """Remove the rows from a Parquet file."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    stays = [not traces.is_about(record) for record in table.to_pylist()]
    rows = stays.count(False)
    if rows and not dry_run:
        rewrite(path, lambda partial: pq.write_table(table.filter(stays), partial))
    return Removal("rows", rows, rows)


def clean_workbook(path: Path, traces: Traces, *, dry_run: bool) -> Removal:
    """Remove the rows from all sheets of a workbook."""
    # Opening a workbook with openpyxl takes seconds, and saving it may lose what openpyxl does
    # not know.
    with zipfile.ZipFile(path) as archive:
        if not any(traces.bytes_pattern.search(archive.read(name)) for name in archive.namelist()):
            return NOTHING
    with path.open("rb") as stream:
        book = load_book(stream)
    rows = 0
    for sheet in book.worksheets:
        numbers: list[int] = []
        for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
            if traces.is_about(cells):
                numbers.append(number)
        # From the last to the first, as the rows below a deleted one move up.
        for number in reversed(numbers):
            sheet.delete_rows(number)
        rows += len(numbers)
    if rows and not dry_run:
        rewrite(path, book.save)
    return Removal("rows", rows, rows)
