"""Observes a canary from inside the router: counts each model's results, by question, and compares
the two models.

A fixed sample of the questions is put to the other model as well, and both rewrites to the RAG,
after the answer was sent. What can't be compared is left out and counted, never a score of 0. The
site acts on the verdict.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from qinglan.clients.rag import RagClient
from qinglan.config import Canary, Profile
from qinglan.errors import ConfigError, ModelError, RetrievalError
from qinglan.recipes import get_recipe
from qinglan.rows import Row, hash_fraction
from qinglan.runs.artifacts import write_json
from qinglan.runs.schema_version import dump_record, find_record
from qinglan.serving.canary import CanaryCounts, Judgement, judge
from qinglan.serving.request_handler import ModelClient, ServedAnswer, describe_without_text
from qinglan.serving.routes import Routes, RouteTable

STATE_FILE, VERDICT_FILE = "canary.json", "verdict.json"
AT_ONCE, WAITING = 4, 32
"""Comparisons that run, and that wait; beyond that they are left out."""
_MODEL_WITHIN_S = 10.0
_RAG_RETRIES = 1
_LOG = logging.getLogger(__name__)


class CanaryState(BaseModel, extra="forbid"):
    """A canary so far: written at every check, and read again by a router that was restarted."""

    champion: str
    challenger: str
    share: float
    started: float
    """Unix time; time without a router is not counted, so it may be later than that."""
    looked: float = 0.0
    counts: CanaryCounts = CanaryCounts()
    judgement: Judgement = Judgement(outcome="keep", reason="not checked yet")
    left_out: int = 0
    """Sampled questions that were not compared because enough others were."""
    failed: int = 0
    """Comparisons without a result: a model or the RAG did not answer."""

    @property
    def pair(self) -> tuple[str, str, float]:
        """What makes it this canary: with another champion, challenger or share, counting starts
        anew."""
        return self.champion, self.challenger, self.share


class CanaryVerdict(BaseModel, frozen=True, extra="forbid"):
    challenger: str
    champion: str
    judgement: Judgement
    at: float
    requests: int

    @property
    def summary(self) -> str:
        return f"{self.judgement.outcome}: {self.judgement.reason}"

    @property
    def description(self) -> str:
        arms, judgement = f"version {self.challenger} against {self.champion}", self.judgement
        return f"{arms}, {self.requests:,} requests: {judgement.outcome}, {judgement.reason}"


@dataclass(frozen=True)
class _Question:
    row: Row
    served: ServedAnswer
    routes: Routes
    state: CanaryState


class CanaryObserver:
    def __init__(
        self,
        config: Canary,
        folder: Path,
        rag: Callable[[], RagClient] | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`rag` is called in the event loop, once; None where answers are not for a search, so none
        are compared."""
        self._config, self._folder, self._rag, self._clock = config, folder, rag, clock
        self._waiting: asyncio.Queue[_Question] = asyncio.Queue(WAITING)
        self._table: RouteTable | None = None
        self._verdict: CanaryVerdict | None = None
        self._failure = ""
        self._is_filed = False
        self.state: CanaryState | None = None
        """None while there is no canary."""

    def on_served(self, served: ServedAnswer, question: Row) -> None:
        if self._table is None:
            return
        routes = self._table.routes
        state = self._follow(routes)
        if state is None or served.role == "none":
            return
        if served.version != (state.challenger if served.role == "challenger" else state.champion):
            return  # of a model that was in service when it was asked
        arm = state.counts.challenger if served.role == "challenger" else state.counts.champion
        is_first = arm.add(
            served.row_id, fallback=served.source != "model", latency_ms=served.latency_ms
        )
        # A fixed sample of the questions, whichever model they are for.
        is_sampled = hash_fraction(f"compare\x1f{served.row_id}") < self._config.compare_share
        if is_first and is_sampled and self._rag and served.answer is not None:
            try:
                self._waiting.put_nowait(_Question(question, served, routes, state))
            except asyncio.QueueFull:
                state.left_out += 1

    async def run(self, table: RouteTable, models: ModelClient) -> None:
        """Compare and check, until cancelled. If that fails, every canary ends: nothing else would
        end it."""
        self._table = table
        try:
            await self._observe(table, models)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is reported, and ends canaries)
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            _LOG.error("canaries are not observed any more: %s", describe_without_text(cause))
            why = str(cause) if isinstance(cause, ConfigError) else type(cause).__name__
            self._failure = f"the router can't observe it: {why}"
            await self._check_forever(table)

    def check(self, table: RouteTable) -> None:
        if self._verdict and self._write(VERDICT_FILE, self._verdict):
            self._verdict = None
        # Until the site has acted upon the last verdict, the routes may name that challenger.
        is_pending = self._verdict is not None or (self._folder / VERDICT_FILE).exists()
        if table.dropped_reason and not is_pending:
            table.allow_challenger()
        if self._is_filed and not (self._folder / STATE_FILE).exists():
            self.state = (
                None  # the canary was started anew: the same versions, and none of the old counts
            )
        if (state := self._follow(table.routes)) is None:
            self._is_filed = False
            return
        now = self._clock()
        state.looked, state.judgement = now, judge(state.counts, self._config, now - state.started)
        if self._failure:
            state.judgement = Judgement(outcome="roll_back", reason=self._failure)
        if state.judgement.outcome != "keep":
            about = state.model_dump(include={"challenger", "champion", "judgement"})
            verdict = CanaryVerdict(**about, at=now, requests=state.counts.challenger.latency.n)
            table.drop_challenger(f"canary: {verdict.summary}")
            self._verdict = None if self._write(VERDICT_FILE, verdict) else verdict
            self.state = None
        self._is_filed = self._write(STATE_FILE, state) and self.state is not None

    async def _observe(self, table: RouteTable, models: ModelClient) -> None:
        rag = self._rag() if self._rag else None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    if rag:
                        group.create_task(self._compare_all(models, rag))
                group.create_task(self._check_forever(table))
        finally:
            if rag:
                await rag.close()

    async def _check_forever(self, table: RouteTable) -> None:
        while True:
            self.check(table)
            await asyncio.sleep(self._config.check_every_s)

    def _write(self, name: str, value: BaseModel) -> bool:
        try:
            write_json(self._folder / name, dump_record(value))
        except OSError as error:  # the next check tries again, and the router goes on
            _LOG.error("%s: can't be written: %s", self._folder / name, error)
            return False
        return True

    def _follow(self, routes: Routes) -> CanaryState | None:
        if not (routes.champion and routes.challenger and routes.share > 0):
            self.state = None
            return None
        pair = (routes.champion.version, routes.challenger.version, routes.share)
        if self.state is None or self.state.pair != pair:
            now, saved = self._clock(), read_state(self._folder)
            if saved and saved.pair == pair and saved.judgement.outcome == "keep":
                # The same canary, from before the router was restarted; the time between is left
                # out.
                saved.started += max(0.0, now - saved.looked) if saved.looked else 0.0
                self.state = saved
            else:
                self.state = CanaryState(
                    champion=pair[0], challenger=pair[1], share=pair[2], started=now
                )
        return self.state

    async def _compare_all(self, models: ModelClient, rag: RagClient) -> None:
        while True:
            question = await self._waiting.get()
            if question.state is not self.state:
                continue
            try:
                question.state.counts.retrieval.add(await _difference(question, models, rag))
            except (ModelError, RetrievalError) as error:
                question.state.failed += 1
                _LOG.info("not compared: %s", error.reason)
            except Exception as error:  # noqa: BLE001 (of this question alone)
                question.state.failed += 1
                _LOG.error("not compared: %s", describe_without_text(error))


async def _difference(question: _Question, models: ModelClient, rag: RagClient) -> float:
    """The challenger's score of its best passage less the champion's."""
    champion, challenger = question.routes.champion, question.routes.challenger
    assert champion and challenger and question.served.answer is not None
    other = champion if question.served.role == "challenger" else challenger
    second, _ = await models.answer(other, question.row, _MODEL_WITHIN_S)
    if second == question.served.answer:
        return 0.0
    retrieve = partial(rag.retrieve, question.row.query, max_retries=_RAG_RETRIES)
    found = [await retrieve(rewrite) for rewrite in (question.served.answer, second)]
    difference = found[1].top1_score - found[0].top1_score
    return difference if other is challenger else -difference


def read_state(folder: Path) -> CanaryState | None:
    return find_record(CanaryState, folder / STATE_FILE)


def read_verdict(folder: Path) -> CanaryVerdict | None:
    return find_record(CanaryVerdict, folder / VERDICT_FILE)


def canary_observer_of(profile: Profile, folder: Path) -> CanaryObserver:
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else two lines a comparison, for ever
    is_compared = "rag" in get_recipe(profile.recipe).grader.services
    rag = (
        partial(RagClient, profile.rag, profile.rag.url, profile.tenant.id) if is_compared else None
    )
    return CanaryObserver(profile.serve.canary, folder, rag)
