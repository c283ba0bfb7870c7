"""From a question to an answer in time: the model's where there is one, else why there is none."""

import logging
import time
from collections.abc import Callable

from qinglan.config import Serve
from qinglan.errors import ModelError
from qinglan.rows import Row, normalise
from qinglan.serving.circuit import Circuit
from qinglan.serving.models import Models
from qinglan.serving.records import Served, ServedRole
from qinglan.serving.route_table import RouteTable
from qinglan.serving.routes import Backend
from qinglan.serving.trace import where

_RESERVE_S = 0.02
"""Of the deadline, a tenth at most: for what is left to do once a model is given up."""
_MOST_CIRCUITS = 16
UNFIT = ("query_too_long", "context_too_long", "empty_query")
"""Reasons that lie in the question."""
_LOG = logging.getLogger(__name__)


class Rewriter:
    """Asks whose turn it is. Belongs to one event loop."""

    def __init__(
        self, config: Serve, table: RouteTable, models: Models, lag_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`lag_s`: how long a request may have waited before it was seen."""
        self._config, self._table, self._models, self._lag_s = config, table, models, lag_s
        deadline_s = config.deadline_ms / 1000
        self._patience_s = deadline_s - min(_RESERVE_S, deadline_s / 10)
        self._circuits: dict[Backend, Circuit] = {}
        self.in_flight = 0
        """Requests that wait for a model."""

    async def answer(self, question: Row, arrived: float) -> Served:
        """The answer, before the deadline; no failure of a model comes through.

        Args:
            arrived: when the request was first seen, by `time.perf_counter`.
        """
        give_up = arrived - self._lag_s() + self._patience_s
        role: ServedRole = "none"
        version, answer = "", None
        reason = self._unfit(question, give_up)
        if not reason:
            turn = self._table.pick(question.id)
            if turn is None:
                reason = "no_model"
            else:
                role, version = turn[0], turn[1].version
                try:
                    answer = await self._ask(turn[1], question, give_up)
                except ModelError as error:
                    reason = error.reason
                except Exception as error:  # noqa: BLE001 (whatever it is, whoever asked needs an answer)
                    _LOG.error("answered without the model: %s", where(error))
                    reason = "internal_error"
        return Served(
            at=time.time(),
            role=role,
            version=version,
            source=self._models.source_without(question) if answer is None else "model",
            reason=reason,
            latency_ms=1000 * (time.perf_counter() - arrived),
            row_id=question.id,
            answer=answer,
        )

    def is_open(self, backend: Backend) -> bool:
        """Is this backend left alone for now?"""
        return backend in self._circuits and self._circuits[backend].is_open

    def _unfit(self, question: Row, give_up: float) -> str:
        """Why no model should be asked this; nothing as a rule."""
        if self.in_flight >= self._config.max_in_flight or give_up <= time.perf_counter():
            return "overloaded"
        if len(question.query) > self._config.max_query_chars:
            return "query_too_long"
        context = (question.profile, question.history, *question.inputs.values())
        if sum(map(len, context)) > self._config.max_context_chars:
            return "context_too_long"
        return "" if normalise(question.query) else "empty_query"

    async def _ask(self, backend: Backend, question: Row, give_up: float) -> str:
        circuit = self._circuit(backend)
        if not circuit.admits():
            raise ModelError(f"{backend.url}: failed too often of late", "circuit_open")
        self.in_flight += 1
        try:
            answer = await self._models.answer(backend, question, give_up - time.perf_counter())
            circuit.succeeded()
        except ModelError as error:
            (circuit.failed if error.transient else circuit.succeeded)()
            raise
        finally:
            circuit.ended()
            self.in_flight -= 1
        return answer

    def _circuit(self, backend: Backend) -> Circuit:
        if backend not in self._circuits:
            while len(self._circuits) >= _MOST_CIRCUITS:
                del self._circuits[next(iter(self._circuits))]
            self._circuits[backend] = Circuit()
        return self._circuits[backend]
