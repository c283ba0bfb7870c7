"""Logs live questions as a workbook for the next night: after consent and redaction, into one file
a day.

A thread writes; where it can't keep up, lines are lost and counted, and no answer ever waits. A
day's lines go to `<day>.jsonl.partial`, which gets its final name when its day or its process ends,
so that others read whole files only; the next process finishes what a killed one left, whose lock
is free. A second file of a day is `<day>.2.jsonl`.
"""

import fcntl
import itertools
import json
import logging
import os
import queue
import re
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qinglan.config import Profile
from qinglan.data.forgotten import Tombstones
from qinglan.data.sources.records import InputColumns, input_field
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe, identifying
from qinglan.rows import Row, normalise, row_id
from qinglan.serving.request_handler import ServedAnswer, describe_without_text

CONSENT_HEADER = "x-log-consent"
MOST_A_DAY = 1_000_000
"""Questions in a day's files; their ids are kept in memory, some 100 MB at most."""
Outcome = Literal["written", "duplicate", "day_full", "quota_full"]

_PARTIAL = ".partial"
_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})(\.\d+)?\.jsonl(\.partial)?")
_IDENTITY = re.compile(rb'"row_id": "([0-9a-f]{16})"(?:, "origin": "([^"]*)")?')
_SIGNS = r" \-‐-―\u00a0\u200b-\u200d\u2060\u3000\ufeff"
_GAP = rf"[{_SIGNS}]?"
_MOBILE_GAP = rf"[{_SIGNS}\s·•・._/]{{0,2}}"
_MOBILE = (
    rf"(?<!\d)(?:(?:\+|00)?86{_MOBILE_GAP})?(?:\(1[3-9]\d\)|1[3-9]\d){_MOBILE_GAP}"
    rf"(?:\d{{4}}{_MOBILE_GAP}\d{{4}}|\d{{3}}{_MOBILE_GAP}\d{{5}})(?!\d)"
)
_MOST_REDACTED_CHARS = 4_000
"""Characters of a text that are looked at: a longer question is not logged, of a longer answer only
the beginning."""
_MOST_WAITING = 10_000
_TICK_S = 0.5
_LOG = logging.getLogger(__name__)


class RequestLogWriter:
    """The log of one router. `close` it, or the day's file keeps its `.partial` until the next
    start."""

    def __init__(
        self,
        folder: Path,
        profile: Profile,
        today: Callable[[], date] = date.today,
        *,
        must_work: bool = True,
    ) -> None:
        """Raises `ConfigError` where the folder can't be used; unless it `must_work`, each line
        tries it again."""
        self._profile, self._folder, self._today = profile, folder, today
        self._serve, self._config = profile.serve, profile.serve.request_log
        self._inputs = get_recipe(profile.recipe).INPUTS
        self._forgotten = Tombstones.read(profile.paths.state)
        self._columns = InputColumns.of(profile.data, self._inputs).names
        self._day: DayFile | None = None
        self._waiting: queue.Queue[tuple[ServedAnswer, Row, str] | None] = queue.Queue(
            _MOST_WAITING
        )
        self.outcomes: Counter[str] = Counter()
        """Lines by what became of them: one of `Outcome`, `forgotten`, `unusable`, `queue_full` or
        `failed`."""
        self.is_failing = False
        try:
            self._prepare()
        except OSError as error:
            problem = f"serve.request_log.folder: {folder}: can't be used: {error.strerror}"
            if must_work:
                raise ConfigError(problem) from error
            self.is_failing = True
            _LOG.error("%s; lines are lost until that ends", problem)
        self._thread = threading.Thread(target=self._work, name="request-log", daemon=True)
        self._thread.start()

    def may_keep(self, client: str, consent: str | None) -> bool:
        allowed = self._serve.consent_of(client)
        return allowed == "all" or (
            allowed == "header" and (consent or "").strip().lower() == "yes"
        )

    def put(self, served: ServedAnswer, question: Row, client: str = "") -> None:
        """Have it written, if reading would not refuse it; returns at once. `client` is empty where
        none has a key."""
        data = self._profile.data
        context = sum(map(len, (question.profile, question.history, *question.inputs.values())))
        longest = _MOST_REDACTED_CHARS if self._config.redact else sys.maxsize
        is_too_long = len(question.query) > data.max_query_chars or context > min(
            data.max_context_chars, longest
        )
        if is_too_long or not normalise(question.query):
            self.outcomes["unusable"] += 1
            return
        try:
            self._waiting.put_nowait((served, question, client))
        except queue.Full:
            self.outcomes["queue_full"] += 1

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                entry = self._waiting.get(timeout=_TICK_S)
            except queue.Empty:
                self._attempt(self._todays_file)
                continue
            if entry is None:
                break
            if self._attempt(partial(self._write, *entry)):
                self.is_failing = False
            else:
                self.outcomes["failed"] += 1
        self._attempt(self._finish)

    def _attempt(self, step: Callable[[], object]) -> bool:
        try:
            step()
        except Exception as error:  # noqa: BLE001 (a full disk costs lines, not the thread)
            if not self.is_failing:
                why = error.strerror if isinstance(error, OSError) else describe_without_text(error)
                _LOG.error(
                    "serve.request_log.folder: %s: %s; lines are lost until that ends",
                    self._folder,
                    why,
                )
            self.is_failing = True
            return False
        return True

    def _prepare(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        finish_leftovers(self._folder)

    def _todays_file(self) -> "DayFile":
        today = self._today()
        if self._day is None or self._day.day != today:
            self._finish()
            self._prepare()
            oldest = (today - timedelta(days=self._config.keep_days)).isoformat()
            for path in _files(self._folder):
                if path.name < oldest:
                    path.unlink(missing_ok=True)
            self._day = DayFile(self._folder, today)
        return self._day

    def _finish(self) -> None:
        if self._day:
            self._day.finish()
        self._day = None

    def _write(self, served: ServedAnswer, question: Row, client: str) -> None:
        clean = redact if self._config.redact else str
        texts = {name: clean(getattr(question, name)) for name in ("query", "profile", "history")}
        inputs = {name: clean(text) for name, text in question.inputs.items()}
        cells = texts | {input_field(name): text for name, text in inputs.items()}
        # By the redacted text: two questions that differ in a phone number only are one.
        identity = row_id(question.tenant, **texts, inputs=identifying(inputs, self._inputs))
        if self._forgotten.cover(question) or self._forgotten.has_row(identity):
            self.outcomes["forgotten"] += 1
            return
        record: dict[str, Any] = {self._columns[field]: text for field, text in cells.items()}
        record["qinglan"] = {  # beside the workbook's columns
            "row_id": identity,
            "origin": client,
            "at": datetime.fromtimestamp(served.at, UTC).isoformat(timespec="seconds"),
            **{name: getattr(served, name) for name in ("role", "version", "source", "reason")},
            "answer": clean(served.answer) if served.answer else None,
        }
        key = self._serve.clients.get(client)
        self.outcomes[
            self._todays_file().add(identity, record, client, key.logged_per_day if key else None)
        ] += 1


class DayFile:
    """What one process writes on one day. Every question once, also those in the day's earlier
    files."""

    def __init__(self, folder: Path, day: date) -> None:
        self._folder, self.day = folder, day
        self._seen: set[int] = set()
        self._by_origin: Counter[str] = Counter()
        for path in _files(folder, day):
            with path.open("rb") as stream:
                for match in filter(None, map(_IDENTITY.search, stream)):  # others' lines have none
                    self._seen.add(int(match[1], 16))
                    self._by_origin[(match[2] or b"").decode()] += 1
        self._path: Path | None = None
        self._file, self._size = -1, 0

    def add(
        self, identity: str, record: dict[str, Any], origin: str = "", quota: int | None = None
    ) -> Outcome:
        """Write a record that holds this id, unless the day has that question already, or its quota
        of this origin.

        Raises `OSError` where it can't; the file is as it was before.
        """
        number = int(identity, 16)
        if number in self._seen:
            return "duplicate"
        if len(self._seen) >= MOST_A_DAY:
            return "day_full"
        if quota is not None and self._by_origin[origin] >= quota:
            return "quota_full"
        self._append(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._seen.add(number)
        self._by_origin[origin] += 1
        return "written"

    def finish(self) -> None:
        path, self._path = self._path, None
        if path:
            try:
                with suppress(FileNotFoundError):  # somebody has removed or moved it
                    _name_finally(path, self._size)
            finally:
                os.close(self._file)

    def _append(self, line: bytes) -> None:
        if self._path and not os.fstat(self._file).st_nlink:  # somebody has removed it
            self.finish()
        if self._path is None:
            self._open()
        if os.write(self._file, line) != len(
            line
        ):  # the disk is full: half a line would spoil the next one
            os.ftruncate(self._file, self._size)
            raise OSError(28, os.strerror(28))
        self._size += len(line)

    def _open(self) -> None:
        for number in itertools.count(1):
            final = self._folder / (
                f"{self.day}.jsonl" if number == 1 else f"{self.day}.{number}.jsonl"
            )
            path = final.with_name(final.name + _PARTIAL)
            if final.exists():
                continue
            with suppress(FileExistsError):
                self._file = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600
                )
                fcntl.flock(self._file, fcntl.LOCK_EX)
                if not final.exists():
                    self._path, self._size = path, 0
                    return
                path.unlink()  # its writer ended between the two checks
                os.close(self._file)


def finish_leftovers(folder: Path) -> None:
    """Finish the files of processes that were killed; half a line at the end is cut off."""
    for path in _files(folder):
        with suppress(
            FileNotFoundError
        ):  # its process, or another one that starts, has just finished it
            # An empty one may be another process's that has not got its lock yet.
            if not path.name.endswith(_PARTIAL) or not path.stat().st_size:
                continue
            with path.open("r+b") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    continue
                whole = path.read_bytes().rfind(b"\n") + 1
                file.truncate(whole)
                _name_finally(path, whole)


def _name_finally(path: Path, size: int) -> None:
    """Give a file its final name; one without a line is removed."""
    if size:
        path.rename(path.with_suffix(""))
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path, day: date | None = None) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return [path for path in found if day is None or path.name.startswith(day.isoformat())]


def _is_identity(text: str) -> bool:
    """GB 11643: a day of birth, and a check digit by ISO 7064."""
    number = "".join(c for c in text.upper() if c.isdigit() or c == "X")
    try:
        date(int(number[6:10]), int(number[10:12]), int(number[12:14]))
    except ValueError:
        return False
    total = sum(
        pow(2, 17 - place, 11) * "0123456789X".index(sign) for place, sign in enumerate(number)
    )
    return number[6:8] in ("18", "19", "20") and total % 11 == 1


def _is_bank_card(text: str) -> bool:
    """The Luhn check, which every card number passes and nine of ten others don't."""
    digits = enumerate(reversed([int(c) for c in text if c.isdigit()]))
    return sum(sum(divmod(digit * (1 + place % 2), 10)) for place, digit in digits) % 10 == 0


class _Kind(NamedTuple):
    placeholder: str
    pattern: re.Pattern[str]
    is_one: Callable[[str], bool] = lambda _: True


_KINDS = (
    _Kind(
        "[邮箱]",
        re.compile(r"[A-Za-z0-9._%+\-]{1,64}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z0-9\-]{2,63}"),
    ),
    _Kind(
        "[身份证号]",
        re.compile(rf"(?<!\d)[1-9](?:{_GAP}\d){{16}}{_GAP}[\dXx](?![\dA-Za-z])"),
        _is_identity,
    ),
    _Kind(
        "[银行卡号]",
        re.compile(
            rf"(?<!\d)(?:[3-69]\d{{12,18}}|[3-69]\d{{3}}(?:{_GAP}\d{{4}}){{2,3}}(?:{_GAP}\d{{1,4}})?)(?!\d)"
        ),
        _is_bank_card,
    ),
    _Kind("[手机号]", re.compile(_MOBILE)),
    _Kind(
        "[座机号]",
        re.compile(
            rf"(?<!\d)(?:(?:\+|00)86{_GAP}\(?0?|\(?0)(?:10|2\d|[3-9]\d\d)\)?{_GAP}\d{{3,4}}{_GAP}\d{{4}}(?!\d)"
        ),
    ),
)
"""In this order: a card number may look like other numbers in part."""


def redact(text: str) -> str:
    """Replace personal numbers by placeholders; the question around them stays.

    Full-width digits and separators inside numbers are recognised. Names and addresses are not.
    """
    text = text[:_MOST_REDACTED_CHARS]
    for kind in _KINDS:
        # Full-width signs and foreign digits as ASCII, one for one, so that places in both texts
        # are the same.
        plain = text if text.isascii() else "".join(map(_plain_sign, text))
        if "@" not in plain:
            if sum(map(str.isdigit, plain)) < 10:
                return text  # no number of a person has fewer
            if kind.placeholder == "[邮箱]":
                continue
        parts, end = [], 0
        for match in kind.pattern.finditer(plain):
            if kind.is_one(match.group()):
                parts += [text[end : match.start()], kind.placeholder]
                end = match.end()
        text = "".join([*parts, text[end:]])
    return text


def _plain_sign(sign: str) -> str:
    if "\uff01" <= sign <= "\uff5e":
        return chr(ord(sign) - 0xFEE0)
    digit = unicodedata.decimal(sign, None) if not sign.isascii() else None
    return sign if digit is None else str(digit)
