"""Writes the files of a dataset row by row, all at the same time, under `.partial` names until all
are complete."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from qinglan.runs.artifacts import Artifact, written_whole

_ROW_GROUP = 5_000


class DatasetFiles:
    """The files of a dataset while they are written; `open_files` opens them."""

    def __init__(self, paths: dict[str, Path], sinks: "dict[str, _Parquet | TextIO]") -> None:
        self.rows = dict.fromkeys(paths, 0)
        self._paths, self._sinks = paths, sinks

    def write(self, name: str, record: Any) -> None:
        """Append a record, which may be a complete JSON line where the file holds those."""
        sink = self._sinks[name]
        if isinstance(sink, _Parquet):
            sink.write(record)
        else:
            sink.write(
                (record if isinstance(record, str) else json.dumps(record, ensure_ascii=False))
                + "\n"
            )
        self.rows[name] += 1

    def artifacts(self) -> dict[str, Artifact]:
        return {name: Artifact.of(path, self.rows[name]) for name, path in self._paths.items()}


@contextmanager
def open_files(directory: Path, names: Iterable[str], schema: pa.Schema) -> Iterator[DatasetFiles]:
    """Files of one directory by their stems: `.parquet` ones of one schema, the others JSON lines.

    After an error none of them exists; else all get their names at the end of the block.
    """
    paths, sinks = (
        {Path(name).stem: directory / name for name in names},
        dict[str, _Parquet | TextIO](),
    )
    with ExitStack() as stack:
        partials = {name: stack.enter_context(written_whole(path)) for name, path in paths.items()}
        for (
            name,
            partial,
        ) in partials.items():  # opened last, so that all are closed before the first gets its name
            is_parquet = paths[name].suffix == ".parquet"
            sinks[name] = (
                _Parquet(partial, schema) if is_parquet else partial.open("w", encoding="utf-8")
            )
            stack.callback(sinks[name].close)
        yield DatasetFiles(paths, sinks)


class _Parquet:
    """Row groups of a few thousand records, so that memory holds one."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, schema)
        self._group: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self._group.append(record)
        if len(self._group) == _ROW_GROUP:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._group:
            self._writer.write_table(pa.Table.from_pylist(self._group, schema=self._writer.schema))
            self._group.clear()
