"""A day's questions in one file that others may read once it is whole.

Lines go to `<day>.jsonl.partial`, which gets its final name when its day or its process ends; the next process
finishes what a killed one left, whose lock is free. A second file of a day is `<day>.2.jsonl`.
"""

import fcntl
import json
import os
import re
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, Literal

ID = "row_id"
MOST_A_DAY = 1_000_000
"""Questions in a day's files; their ids are kept in memory, some 100 MB at most."""
Outcome = Literal["written", "duplicate", "day_full"]

_PARTIAL = ".partial"
_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})(\.\d+)?\.jsonl(\.partial)?")


class DayFile:
    """What one process writes on one day. Every question once, also those in the day's earlier files."""

    def __init__(self, folder: Path, day: date) -> None:
        self._folder, self.day = folder, day
        self._seen: set[int] = set()
        for path in _files(folder, day):
            with path.open("rb") as stream:
                found = (re.search(rb'"row_id": "([0-9a-f]{16})"', line) for line in stream)  # others' lines have none
                self._seen.update(int(match.group(1), 16) for match in found if match)
        self._path: Path | None = None
        self._file, self._size = -1, 0

    def add(self, row_id: str, record: dict[str, Any], details: str) -> Outcome:
        """Write a record, with the id under its key `details`, unless the day has that question already.

        Raises `OSError` where it can't; the file is as it was before.
        """
        number = int(row_id, 16)
        if number in self._seen:
            return "duplicate"
        if len(self._seen) >= MOST_A_DAY:
            return "day_full"
        record = record | {details: {ID: row_id, **record[details]}}
        self._append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._seen.add(number)
        return "written"

    def finish(self) -> None:
        if self._path is None:
            return
        if self._size:
            self._path.rename(self._path.with_suffix(""))
        else:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._path = None

    def _append(self, line: bytes) -> None:
        if self._path is None:
            self._open()
        if os.write(self._file, line) != len(line):  # the disk is full: half a line would spoil the next one
            os.ftruncate(self._file, self._size)
            raise OSError(28, os.strerror(28))
        self._size += len(line)

    def _open(self) -> None:
        number = 1
        while True:
            name = f"{self.day}.jsonl" if number == 1 else f"{self.day}.{number}.jsonl"
            path = self._folder / (name + _PARTIAL)
            number += 1
            if (self._folder / name).exists():
                continue
            with suppress(FileExistsError):
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if (self._folder / name).exists():  # its writer ended between the two checks
                    path.unlink()
                    os.close(self._file)
                    continue
                self._path, self._size = path, 0
                return


def finish_leftovers(folder: Path) -> None:
    """Finish the files of processes that were killed; half a line at the end is cut off."""
    leftovers = [path for path in _files(folder) if path.name.endswith(_PARTIAL)]
    for path in leftovers:
        with suppress(FileNotFoundError):  # its process, or another one that starts, has just finished it
            _finish_leftover(path)


def _finish_leftover(path: Path) -> None:
    # An empty one may be another process's that has not got its lock yet.
    if not path.stat().st_size:
        return
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        whole = path.read_bytes().rfind(b"\n") + 1
        file.truncate(whole)
        if whole:
            path.rename(path.with_suffix(""))
        else:
            path.unlink()


def remove_older(folder: Path, than: date) -> None:
    for path in _files(folder):
        if path.name < than.isoformat():
            path.unlink(missing_ok=True)


def _files(folder: Path, day: date | None = None) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return [path for path in found if day is None or path.name.startswith(day.isoformat())]
