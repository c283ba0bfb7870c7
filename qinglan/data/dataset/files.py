"""Writes the files of a dataset row by row, all at the same time, under `.partial` names until all are complete."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from qinglan.runs.artifacts import Artifact, written_whole

_ROW_GROUP = 5_000


class DatasetFiles:
    """Files of one directory by their stems: `.parquet` ones of one schema, the others JSON lines.

    After an error none of them exists; else all get their names at the end of the block.
    """

    def __init__(self, directory: Path, names: tuple[str, ...], schema: pa.Schema) -> None:
        self.rows = {Path(name).stem: 0 for name in names}
        self._paths = {Path(name).stem: directory / name for name in names}
        self._schema = schema
        self._sinks: dict[str, _Parquet | TextIO] = {}

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            # Opened last, so that all are closed before the first gets its name.
            for name, partial in [(n, opening.enter_context(written_whole(p))) for n, p in self._paths.items()]:
                is_parquet = self._paths[name].suffix == ".parquet"
                sink = _Parquet(partial, self._schema) if is_parquet else partial.open("w", encoding="utf-8")
                opening.callback(sink.close)
                self._sinks[name] = sink
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def write(self, name: str, record: Any) -> None:
        """Append a record, which may be a complete JSON line where the file holds those."""
        sink = self._sinks[name]
        if isinstance(sink, _Parquet):
            sink.write(record)
        else:
            sink.write((record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)) + "\n")
        self.rows[name] += 1

    def artifacts(self) -> dict[str, Artifact]:
        return {name: Artifact.of(path, self.rows[name]) for name, path in self._paths.items()}


class _Parquet:
    """Row groups of a few thousand records, so that memory holds one."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, schema)
        self._schema = schema
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
            self._writer.write_table(pa.Table.from_pylist(self._group, schema=self._schema))
            self._group.clear()
