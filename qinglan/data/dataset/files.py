"""Writes the files of a dataset row by row, all at the same time.

They have `.partial` names until all are complete.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qinglan.runs.artifacts import Artifact, written_whole

_ROW_GROUP = 5_000


class DatasetFiles:
    """The files of a dataset while they are written; `open_files` opens them."""

    def __init__(self, paths: dict[str, Path], sinks: "dict[str, _Parquet | _JsonLines]") -> None:
        self.rows = dict.fromkeys(paths, 0)
        """Records that were written, by the file's name."""
        self._paths = paths
        self._sinks = sinks

    def write(self, name: str, record: Any) -> None:
        """Append a record, which may be a complete JSON line where the file holds those."""
        self._sinks[name].write(record)
        self.rows[name] += 1

    def artifacts(self) -> dict[str, Artifact]:
        return {name: Artifact.of(path, self.rows[name]) for name, path in self._paths.items()}


@contextmanager
def open_files(directory: Path, names: Iterable[str], schema: pa.Schema) -> Iterator[DatasetFiles]:
    """Files of one directory by their stems: `.parquet` ones of one schema, the others JSON lines.

    After an error none of them exists; else all get their names at the end of the block.
    """
    paths = {Path(name).stem: directory / name for name in names}
    sinks: dict[str, _Parquet | _JsonLines] = {}
    with ExitStack() as stack:
        partials = {name: stack.enter_context(written_whole(path)) for name, path in paths.items()}
        # Opened last, so that all are closed before the first gets its name.
        for name, partial in partials.items():
            is_parquet = paths[name].suffix == ".parquet"
            sink: _Parquet | _JsonLines = (
                _Parquet(partial, schema) if is_parquet else _JsonLines(partial)
            )
            stack.callback(sink.close)
            sinks[name] = sink
        yield DatasetFiles(paths, sinks)


class _JsonLines:
    """A JSON object a line; a text is taken for a complete line."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w", encoding="utf-8")

    def write(self, record: Any) -> None:
        line = record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)
        self._stream.write(f"{line}\n")

    def close(self) -> None:
        self._stream.close()


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
