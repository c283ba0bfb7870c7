"""Parquet, a batch of rows at a time."""

from collections.abc import Iterator
from pathlib import Path

from qinglan.data.sources.records import Record, Wanted, locate
from qinglan.errors import WorkbookError

_BATCH_ROWS = 1000


def read_parquet(path: Path, wanted: Wanted) -> Iterator[Record]:
    """Records of a parquet file, numbered from 1; only the used columns are read.

    Raises:
        WorkbookError: the file can't be used.
    """
    import pyarrow.parquet

    with path.open("rb") as stream:
        try:
            file = pyarrow.parquet.ParquetFile(stream)
            places = locate(file.schema_arrow.names, wanted, str(path))
            names = {field: file.schema_arrow.names[place] for field, place in places.items()}
            number = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=list(dict.fromkeys(names.values()))):
                columns = [batch.column(name).to_pylist() for name in names.values()]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield Record(f"{path.name}:", number, dict(zip(names, values, strict=True)))
        except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
            detail = " ".join(str(error).split()) or type(error).__name__
            raise WorkbookError(f"{path}: is damaged or no parquet file ({detail[:200]}); write it again") from error
