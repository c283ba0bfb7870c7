"""Logs live questions as a workbook for the next night: after consent and redaction, into one file a day.

A thread writes; where it can't keep up, lines are lost and counted, and no answer ever waits.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from qinglan.config import Profile
from qinglan.data.sources.records import InputColumns, input_field
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe, identifying
from qinglan.rows import Row, normalise, row_id
from qinglan.serving.day_file import DayFile, finish_leftovers, remove_older
from qinglan.serving.redaction import redact
from qinglan.serving.request_handler import ServedAnswer, describe_without_text

CONSENT_HEADER = "x-log-consent"
DETAILS = "qinglan"
"""The key beside the workbook's columns: time, version, source, reason, the model's answer."""

_MOST_WAITING = 10_000
_TICK_S = 0.5
_LOG = logging.getLogger(__name__)


class RequestLogWriter:
    """The log of one router. `close` it, or the day's file keeps its `.partial` until the next start."""

    def __init__(
        self, folder: Path, profile: Profile, today: Callable[[], date] = date.today, *, must_work: bool = True
    ) -> None:
        """Raises `ConfigError` where the folder can't be used; unless it `must_work`, each line tries it again."""
        self._profile, self._folder, self._today = profile, folder, today
        self._config, self._inputs = profile.serve.request_log, get_recipe(profile.recipe).INPUTS
        self._columns = InputColumns.of(profile.data, self._inputs).names
        self._day: DayFile | None = None
        self._waiting: queue.Queue[tuple[ServedAnswer, Row] | None] = queue.Queue(_MOST_WAITING)
        self.outcomes: Counter[str] = Counter()
        """Lines by what became of them: `written`, `duplicate`, `unusable`, `queue_full`, `day_full`, `failed`."""
        self.is_failing = False
        self._prepared = False
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

    def may_keep(self, consent: str | None) -> bool:
        if self._config.consent == "header":
            return (consent or "").strip().lower() == "yes"
        return self._config.consent == "all"

    def put(self, served: ServedAnswer, question: Row) -> None:
        """Have it written, if reading would not refuse it; returns at once."""
        data = self._profile.data
        context = sum(map(len, (question.profile, question.history, *question.inputs.values())))
        is_too_long = len(question.query) > data.max_query_chars or context > data.max_context_chars
        if is_too_long or not normalise(question.query):
            self.outcomes["unusable"] += 1
            return
        try:
            self._waiting.put_nowait((served, question))
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
            if self._attempt(lambda entry=entry: self._write(*entry)):  # type: ignore[misc]
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
                _LOG.error("serve.request_log.folder: %s: %s; lines are lost until that ends", self._folder, why)
            self.is_failing = True
            return False
        return True

    def _prepare(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        finish_leftovers(self._folder)
        self._prepared = True

    def _todays_file(self) -> DayFile:
        if not self._prepared:
            self._prepare()
        today = self._today()
        if self._day is None or self._day.day != today:
            self._finish()
            remove_older(self._folder, today - timedelta(days=self._config.keep_days))
            self._day = DayFile(self._folder, today)
        return self._day

    def _finish(self) -> None:
        if self._day:
            self._day.finish()
        self._day = None

    def _write(self, served: ServedAnswer, question: Row) -> None:
        clean = redact if self._config.redact else str
        texts = {name: clean(getattr(question, name)) for name in ("query", "profile", "history")}
        inputs = {name: clean(text) for name, text in question.inputs.items()}
        cells = texts | {input_field(name): text for name, text in inputs.items()}
        record: dict[str, Any] = {self._columns[field]: text for field, text in cells.items()}
        record[DETAILS] = {
            "at": datetime.fromtimestamp(served.at, UTC).isoformat(timespec="seconds"),
            "role": served.role,
            "version": served.version,
            "source": served.source,
            "reason": served.reason,
            "answer": clean(served.answer) if served.answer else None,
        }
        # By the redacted text: two questions that differ in a phone number only are one.
        identity = row_id(question.tenant, **texts, inputs=identifying(inputs, self._inputs))
        self.outcomes[self._todays_file().add(identity, record, DETAILS)] += 1
