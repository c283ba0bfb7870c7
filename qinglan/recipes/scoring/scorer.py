"""What all scorers share: judge, outages, ledger, log. A failed call leaves a sample without a score."""

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from qinglan.clients.chat import Account, Answer, ChatClient
from qinglan.clients.openai_protocol import JsonSchema
from qinglan.errors import ConfigError, LedgerError, QinglanError
from qinglan.ledger import Ledger, ledger_url
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes import Message, Recipe
from qinglan.recipes.scoring.outages import OutageWait
from qinglan.recipes.scoring.samples import invalid, open_log, write_sample
from qinglan.recipes.scoring.service import RewardService
from qinglan.rows import hash_fraction

_SPECIAL_TOKEN = re.compile(r"<\|[^|]*\|>")
Service = Literal["rag", "judge"]


def judge_asked(question: str, text: str, share: float) -> bool:
    """Is this sample in the judged share? Decided by its content, so that reruns agree."""
    return hash_fraction(f"{question}\x1f{text}") < share


@dataclass
class Sample:
    """One sample on its way, and what it took."""

    row_id: str | None
    text: str
    begin_s: float = field(default_factory=time.perf_counter)
    judge_asked: int = 0
    """How many questions the judge was asked about it."""
    judged: list[Answer[float]] = field(default_factory=list)
    failed_by: Literal["rag", "judge", "ledger"] | None = None

    def used(self) -> dict[str, float | None]:
        """Calls and time; None for what is not known."""
        cached = sum(answer.cached for answer in self.judged)
        return {
            "judge_asked": self.judge_asked,
            "judge_cached": cached if self.judged else None,
            "judge_cost_usd": sum(answer.cost_usd for answer in self.judged if not answer.cached),
            "latency_ms": 1000 * (time.perf_counter() - self.begin_s),
        }

    def entry(self) -> dict[str, Any]:
        known: dict[str, Any] = {"row_id": self.row_id, "text": self.text}
        known |= {name: value for name, value in self.used().items() if value is not None}
        return known | ({"failed_by": self.failed_by} if self.failed_by else {})

    @contextmanager
    def calling(self, service: Service) -> Iterator[None]:
        """What fails in here is that service's failure."""
        try:
            yield
        except Exception as error:
            self.failed_by = "ledger" if isinstance(error, LedgerError) else service
            raise


S = TypeVar("S", bound=Sample)


class Scorer(ABC, Generic[S]):
    """Scores samples in one process; belongs to one event loop."""

    _recipe: Recipe
    _sample_class: type[Any] = Sample

    def __init__(self, service: RewardService) -> None:
        self._service = service
        self._outage_waits: list[OutageWait] = []
        with ExitStack() as opening:
            self._log = opening.enter_context(open_log(service.samples_log))
            self._ledger = Ledger(ledger_url(service.ledger, service.state))
            opening.callback(self._ledger.close)
            self._queue = LedgerQueue(self._ledger, service.run_id, service.budget)
            self._judge = self._open_judge()
            self._judge_wait = self._outage_wait("judge")
            self._open()
            self._opened = opening.pop_all()

    def _open_judge(self) -> ChatClient | None:
        service = self._service
        if service.judge is None:
            return None
        if service.judge_price is None:
            raise ConfigError(f"prices has no entry for judge.model {service.judge.model!r}")
        role = "judge.local" if service.judge_recipe else "judge"
        account = Account(service.run_id, service.tenant.id, role, service.judge.model, service.judge_price)
        return ChatClient(service.judge, service.judge_url, account, self._queue, key_salt=service.judge_key_salt)

    def _open(self) -> None:
        """Open what else is needed."""

    def _outage_wait(self, service: Service) -> OutageWait:
        max_outage_s = self._service.reward.max_outage_s
        self._outage_waits.append(OutageWait(service, max_outage_s, lambda entry: write_sample(self._log, entry)))
        return self._outage_waits[-1]

    async def close(self) -> None:
        for wait in self._outage_waits:
            await wait.close()
        if self._judge:
            await self._judge.close()
        await self._queue.close()
        self._opened.close()

    async def score(self, extra_info: dict[str, Any], text: str) -> dict[str, float]:
        """Score one sample and log it (see `RewardService.outcome`); `extra_info` is the training file's.

        A sample whose calls failed has no score, and the log says why. Only a bug raises.
        """
        sample: S = self._sample_class(extra_info.get("row_id"), self._recipe.clean(_SPECIAL_TOKEN.sub("", text)))
        try:
            scored = await self._score(extra_info, sample)
        except Exception as error:  # of a bug verl says nothing: it drops the sample
            write_sample(self._log, sample.entry() | invalid(error))
            if isinstance(error, QinglanError):
                return self._service.outcome(None, sample.used())
            raise
        known = {name: value for name, value in scored.items() if not math.isnan(value)}
        write_sample(self._log, sample.entry() | known)
        return self._service.outcome(scored, sample.used())

    @abstractmethod
    async def _score(self, extra_info: dict[str, Any], sample: S) -> dict[str, float]:
        """`score` and what it is made of; NaN for what is not known."""

    async def _ask(
        self, messages: list[Message], sample: Sample, parse: Callable[[str], float], schema: JsonSchema | None = None
    ) -> float:
        """The judge's score, 0–5; waits while the judge is down."""
        assert self._judge is not None, "a recipe that asks a judge has one"
        ask = partial(self._judge.ask, messages, parse, schema)
        sample.judge_asked += 1
        with sample.calling("judge"):
            answer = await self._judge_wait.call(ask, answered=lambda answer: not answer.cached)
        sample.judged.append(answer)
        return answer.value
