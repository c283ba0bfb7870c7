"""Logs live questions as a workbook for the next night: after consent and redaction.

A thread writes; where it can't keep up, lines are lost and counted, and no answer ever waits.
`day_file` has the files.
"""

import logging
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from qinglan.config import Profile
from qinglan.data.forgotten import Tombstones
from qinglan.data.sources.records import InputColumns, input_field
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe, identifying
from qinglan.rows import Row, normalise, row_id
from qinglan.serving.day_file import DayFile, finish_leftovers, log_files
from qinglan.serving.redaction import MOST_CHARS, redact
from qinglan.serving.request_handler import ServedAnswer, describe_without_text

CONSENT_HEADER = "x-log-consent"
_MOST_WAITING = 10_000
_TICK_S = 0.5
"""Time without an entry after which the thread looks whether the day has ended."""
_LOG = logging.getLogger(__name__)


class _Entry(NamedTuple):
    served: ServedAnswer
    question: Row
    client: str


class RequestLogWriter:
    """The log of one router.

    Close it, or the day's file keeps the name of an unfinished one until the next start.
    """

    def __init__(
        self,
        folder: Path,
        profile: Profile,
        today: Callable[[], date] = date.today,
        *,
        must_work: bool = True,
    ) -> None:
        """Start the thread that writes.

        Raises:
            ConfigError: the folder can't be used; unless it `must_work`, each line tries it again.
        """
        self._profile = profile
        self._folder = folder
        self._today = today
        self._serve = profile.serve
        self._config = profile.serve.request_log
        self._inputs = get_recipe(profile.recipe).INPUTS
        self._forgotten = Tombstones.read(profile.paths.state)
        self._columns = InputColumns.of(profile.data, self._inputs).names
        self._day: DayFile | None = None
        self._waiting: queue.Queue[_Entry | None] = queue.Queue(_MOST_WAITING)
        """The entries to write; None ends the thread."""
        self.outcomes: Counter[str] = Counter()
        """Lines by what became of them: an `Outcome` of the day's file, `forgotten`, `unusable`,
        `queue_full` or `failed`."""
        self.is_failing = False
        try:
            self._prepare_folder()
        except OSError as error:
            problem = f"serve.request_log.folder: {folder}: can't be used: {error.strerror}"
            if must_work:
                raise ConfigError(problem) from error
            self.is_failing = True
            _LOG.error("%s; lines are lost until that ends", problem)
        self._thread = threading.Thread(target=self._work, name="request-log", daemon=True)
        self._thread.start()

    def may_keep(self, client: str, consent: str | None) -> bool:
        """Tell whether a question may be logged.

        Args:
            client: empty where none has a key.
            consent: the value of the request's header, if it has one.
        """
        policy = self._serve.consent_of(client)
        if policy == "header":
            return (consent or "").strip().lower() == "yes"
        return policy == "all"

    def put(self, served: ServedAnswer, question: Row, client: str = "") -> None:
        """Have a question written, if reading would not refuse it; returns at once."""
        if self._is_too_long(question) or not normalise(question.query):
            self.outcomes["unusable"] += 1
            return
        try:
            self._waiting.put_nowait(_Entry(served, question, client))
        except queue.Full:
            self.outcomes["queue_full"] += 1

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _is_too_long(self, question: Row) -> bool:
        data = self._profile.data
        # Redaction looks at the beginning of a text alone, and a part would be another question.
        most_redacted = MOST_CHARS if self._config.redact else sys.maxsize
        context = (question.profile, question.history, *question.inputs.values())
        context_chars = sum(len(text) for text in context)
        return len(question.query) > data.max_query_chars or context_chars > min(
            data.max_context_chars, most_redacted
        )

    def _work(self) -> None:
        while True:
            try:
                entry = self._waiting.get(timeout=_TICK_S)
            except queue.Empty:
                # A new day begins even if nobody asks anything.
                self._attempt(self._todays_file)
                continue
            if entry is None:
                break
            if self._attempt(partial(self._write, entry)):
                self.is_failing = False
            else:
                self.outcomes["failed"] += 1
        self._attempt(self._finish)

    def _attempt(self, step: Callable[[], object]) -> bool:
        """Tell whether the step worked; of failures in a row, the first is logged."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 (a full disk costs lines, not the thread)
            if not self.is_failing:
                if isinstance(error, OSError):
                    problem = error.strerror
                else:
                    problem = describe_without_text(error)
                _LOG.error(
                    "serve.request_log.folder: %s: %s; lines are lost until that ends",
                    self._folder,
                    problem,
                )
            self.is_failing = True
            return False
        return True

    def _prepare_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        finish_leftovers(self._folder)

    def _todays_file(self) -> DayFile:
        today = self._today()
        if self._day is None or self._day.day != today:
            self._finish()
            self._prepare_folder()
            self._remove_old_files(today)
            self._day = DayFile(self._folder, today)
        return self._day

    def _remove_old_files(self, today: date) -> None:
        oldest_day = today - timedelta(days=self._config.keep_days)
        for path in log_files(self._folder):
            # A name begins with its day.
            if path.name < oldest_day.isoformat():
                path.unlink(missing_ok=True)

    def _finish(self) -> None:
        if self._day:
            self._day.finish()
        self._day = None

    def _write(self, entry: _Entry) -> None:
        question = entry.question
        clean = redact if self._config.redact else str
        texts = {
            "query": clean(question.query),
            "profile": clean(question.profile),
            "history": clean(question.history),
        }
        inputs = {name: clean(text) for name, text in question.inputs.items()}
        # The id is that of the redacted text: two questions that differ in a phone number are one.
        identity = row_id(question.tenant, **texts, inputs=identifying(inputs, self._inputs))
        if self._forgotten.cover(question) or self._forgotten.has_row(identity):
            self.outcomes["forgotten"] += 1
            return
        record: dict[str, Any] = {}
        for field, text in texts.items():
            record[self._columns[field]] = text
        for name, text in inputs.items():
            record[self._columns[input_field(name)]] = text
        served = entry.served
        # This stands beside the workbook's columns.
        record["qinglan"] = {
            "row_id": identity,
            "origin": entry.client,
            "at": datetime.fromtimestamp(served.at, UTC).isoformat(timespec="seconds"),
            "role": served.role,
            "version": served.version,
            "source": served.source,
            "reason": served.reason,
            "answer": clean(served.answer) if served.answer else None,
        }
        key = self._serve.clients.get(entry.client)
        quota = key.logged_per_day if key else None
        outcome = self._todays_file().add(identity, record, entry.client, quota)
        self.outcomes[outcome] += 1
