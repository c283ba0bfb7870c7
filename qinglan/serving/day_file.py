"""The files of the request log: one a day and process, for others to read once it is whole.

A day's lines go to `<day>.jsonl.partial`, which gets its final name when its day or its process
ends. The next process finishes what a killed one left, whose lock is free. A second file of a day
is `<day>.2.jsonl`.
"""

import errno
import fcntl
import itertools
import json
import os
import re
from collections import Counter
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Literal

MOST_A_DAY = 1_000_000
"""Questions in a day's files; their ids are kept in memory, some 100 MB at most."""
Outcome = Literal["written", "duplicate", "day_full", "quota_full"]
_PARTIAL = ".partial"
_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})(\.\d+)?\.jsonl(\.partial)?")
_IDENTITY = re.compile(rb'"row_id": "([0-9a-f]{16})"(?:, "origin": "([^"]*)")?')


class DayFile:
    """The file that one process writes on one day.

    Every question is written once a day, those in the day's earlier files included.
    """

    def __init__(self, folder: Path, day: date) -> None:
        self.day = day
        self._folder = folder
        self._row_numbers: set[int] = set()
        """The day's row ids, as numbers, which take less memory than texts."""
        self._by_origin: Counter[str] = Counter()
        for path in log_files(folder, day):
            self._count(path)
        self._path: Path | None = None
        """The open file; there is none before the first line."""
        self._descriptor = -1
        self._size = 0

    def add(
        self, identity: str, record: dict[str, Any], origin: str = "", quota: int | None = None
    ) -> Outcome:
        """Write a record that holds this row id.

        It is left out where the day has that question already, or its quota of this origin.

        Raises:
            OSError: it can't be written; the file is as it was before.
        """
        number = int(identity, 16)
        if number in self._row_numbers:
            return "duplicate"
        if len(self._row_numbers) >= MOST_A_DAY:
            return "day_full"
        if quota is not None and self._by_origin[origin] >= quota:
            return "quota_full"
        self._append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._row_numbers.add(number)
        self._by_origin[origin] += 1
        return "written"

    def finish(self) -> None:
        """Close the file and give it its final name."""
        if self._path is None:
            return
        path = self._path
        # The file is closed even where it can't be renamed, so it must not be written to any more.
        self._path = None
        try:
            # Somebody may have removed or moved it.
            with suppress(FileNotFoundError):
                _name_finally(path, self._size)
        finally:
            os.close(self._descriptor)

    def _count(self, path: Path) -> None:
        """Note the questions of an earlier file, and their origins."""
        with path.open("rb") as lines:
            for line in lines:
                match = _IDENTITY.search(line)
                # A line that a full disk has cut, or that somebody added, holds no id.
                if match:
                    self._row_numbers.add(int(match[1], 16))
                    origin = match[2] or b""
                    self._by_origin[origin.decode()] += 1

    def _append(self, line: bytes) -> None:
        if self._path is not None:
            is_removed = os.fstat(self._descriptor).st_nlink == 0
            if is_removed:
                self.finish()
        if self._path is None:
            self._open()
        if os.write(self._descriptor, line) != len(line):
            # The disk is full; half a line would spoil the next one.
            os.ftruncate(self._descriptor, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)

    def _open(self) -> None:
        """Open the first file of the day that no process has written."""
        for number in itertools.count(1):
            name = f"{self.day}.jsonl" if number == 1 else f"{self.day}.{number}.jsonl"
            final_path = self._folder / name
            path = self._folder / (name + _PARTIAL)
            if final_path.exists():
                continue
            with suppress(FileExistsError):
                self._descriptor = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600
                )
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
                if not final_path.exists():
                    self._path = path
                    self._size = 0
                    return
                # The final file's writer has ended since it was looked for.
                path.unlink()
                os.close(self._descriptor)


def log_files(folder: Path, day: date | None = None) -> list[Path]:
    """The log's files in a folder, those of one day or all, by name."""
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    if day is None:
        return paths
    return [path for path in paths if path.name.startswith(day.isoformat())]


def finish_leftovers(folder: Path) -> None:
    """Finish the files of processes that were killed; half a line at the end is cut off."""
    for path in log_files(folder):
        if path.name.endswith(_PARTIAL):
            # Its process, or another one that starts, may finish it at this moment.
            with suppress(FileNotFoundError):
                _finish_leftover(path)


def _finish_leftover(path: Path) -> None:
    if path.stat().st_size == 0:
        # It may be another process's that has not got its lock yet.
        return
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Its process runs.
            return
        whole_size = path.read_bytes().rfind(b"\n") + 1
        file.truncate(whole_size)
        _name_finally(path, whole_size)


def _name_finally(path: Path, size: int) -> None:
    """Give a file its final name; one without a line is removed."""
    if size:
        path.rename(path.with_suffix(""))
    else:
        path.unlink(missing_ok=True)
