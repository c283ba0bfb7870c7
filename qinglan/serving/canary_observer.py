"""Observes a canary from inside the router: counts results by question, and compares two models.

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
from qinglan.clients.roles import Clients
from qinglan.config import Canary, Profile, Tenant
from qinglan.errors import ConfigError, ModelError, RetrievalError
from qinglan.grading.grade import Grade
from qinglan.grading.grader import Grader
from qinglan.recipes import get_recipe
from qinglan.rows import Row, hash_fraction
from qinglan.runs.artifacts import write_json
from qinglan.runs.schema_version import dump_record, find_record
from qinglan.serving.canary import ArmCounts, CanaryCounts, Judgement, judge
from qinglan.serving.request_handler import ModelClient, ServedAnswer, describe_without_text
from qinglan.serving.routes import ModelRole, Routes, RouteTable

STATE_FILE = "canary.json"
VERDICT_FILE = "verdict.json"
AT_ONCE = 4
"""Comparisons that run at the same time."""
WAITING = 32
"""Comparisons that wait; beyond that they are left out."""
_MODEL_WITHIN_S = 10.0
_RAG_RETRIES = 1
_LOG = logging.getLogger(__name__)


class CanaryState(BaseModel, extra="forbid"):
    """A canary so far: written at every check, and read again by a router that was restarted."""

    champion: str
    challenger: str
    share: float
    started: float
    """Unix time; it is moved on by the time without a router, which does not count."""
    looked: float = 0.0
    """Unix time of the last check."""
    counts: CanaryCounts = CanaryCounts()
    judgement: Judgement = Judgement(outcome="keep", reason="not checked yet")
    left_out: int = 0
    """Sampled questions that were not compared because enough others were."""
    failed: int = 0
    """Comparisons without a result: a model or the RAG did not answer."""

    @property
    def pair(self) -> tuple[str, str, float]:
        """Champion, challenger and share, which tell this canary from any other.

        With another one of them, counting starts anew.
        """
        return self.champion, self.challenger, self.share

    def counts_of(self, role: ModelRole) -> ArmCounts:
        return self.counts.challenger if role == "challenger" else self.counts.champion

    def version_of(self, role: ModelRole) -> str:
        return self.challenger if role == "challenger" else self.champion


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
        arms = f"version {self.challenger} against {self.champion}"
        judgement = self.judgement
        return f"{arms}, {self.requests:,} requests: {judgement.outcome}, {judgement.reason}"


@dataclass(frozen=True)
class _Comparison:
    """A question that one of the models has answered, and is to be put to the other."""

    question: Row
    served: ServedAnswer
    routes: Routes
    """The routes in force when it was answered."""
    state: CanaryState
    """The canary that it counts for."""


class CanaryObserver:
    """Watches the canaries of one router; it belongs to the router's event loop."""

    def __init__(
        self,
        config: Canary,
        folder: Path,
        rag: Callable[[], RagClient] | None,
        grader: Grader,
        tenant: Tenant,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare a watch, which `run` begins.

        Args:
            rag: called in the event loop, once; None where answers are not for a search, so that
                none are compared.
            grader: the recipe's, which grades what both models answered.
        """
        self._config = config
        self._folder = folder
        self._rag = rag
        self._grader = grader
        self._tenant = tenant
        self._clock = clock
        self._waiting: asyncio.Queue[_Comparison] = asyncio.Queue(WAITING)
        self._table: RouteTable | None = None
        self._verdict: CanaryVerdict | None = None
        """A verdict that could not be written yet."""
        self._failure = ""
        """Why canaries can't be observed any more, if so."""
        self._is_filed = False
        """True once the state of the running canary is on file."""
        self.state: CanaryState | None = None
        """The running canary; None while there is none."""

    def on_served(self, served: ServedAnswer, question: Row) -> None:
        """Count an answer, and have it compared if it is in the sample."""
        if self._table is None:
            return
        routes = self._table.routes
        state = self._follow(routes)
        if state is None or served.role == "none":
            return
        if served.version != state.version_of(served.role):
            # The model that it is of was in service when it was asked, and is not any more.
            return
        is_first = state.counts_of(served.role).add(
            served.row_id, fallback=served.source != "model", latency_ms=served.latency_ms
        )
        # The sample is a fixed one of the questions, whichever model they are for.
        is_sampled = hash_fraction(f"compare\x1f{served.row_id}") < self._config.compare_share
        if is_first and is_sampled and self._rag and served.answer is not None:
            try:
                self._waiting.put_nowait(_Comparison(question, served, routes, state))
            except asyncio.QueueFull:
                state.left_out += 1

    async def run(self, table: RouteTable, models: ModelClient) -> None:
        """Compare and check, until cancelled.

        If that fails, every canary is rolled back, as nothing else would end it.
        """
        self._table = table
        try:
            await self._observe(table, models)
        except Exception as error:  # noqa: BLE001 (reported, and ends canaries)
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            _LOG.error("canaries are not observed any more: %s", describe_without_text(cause))
            # Only the message of a `ConfigError` is known to hold nothing that a user asked.
            reason = str(cause) if isinstance(cause, ConfigError) else type(cause).__name__
            self._failure = f"the router can't observe it: {reason}"
            await self._check_forever(table)

    def check(self, table: RouteTable) -> None:
        """Judge the running canary, and end it in the router if its time is over."""
        if self._verdict and self._write(VERDICT_FILE, self._verdict):
            self._verdict = None
        # Until the site has acted upon the last verdict, the routes may name that challenger.
        is_pending = self._verdict is not None or (self._folder / VERDICT_FILE).exists()
        if table.dropped_reason and not is_pending:
            table.allow_challenger()
        if self._is_filed and not (self._folder / STATE_FILE).exists():
            # The canary was started anew: the same versions, and none of the old counts.
            self.state = None
        state = self._follow(table.routes)
        if state is None:
            self._is_filed = False
            return
        now = self._clock()
        state.looked = now
        if self._failure:
            state.judgement = Judgement(outcome="roll_back", reason=self._failure)
        else:
            state.judgement = judge(state.counts, self._config, now - state.started)
        if state.judgement.outcome != "keep":
            self._end(state, table)
        self._is_filed = self._write(STATE_FILE, state) and self.state is not None

    def _end(self, state: CanaryState, table: RouteTable) -> None:
        verdict = CanaryVerdict(
            challenger=state.challenger,
            champion=state.champion,
            judgement=state.judgement,
            at=state.looked,
            requests=state.counts.challenger.latency.n,
        )
        # The router acts before the site does: the challenger gets no further request.
        table.drop_challenger(f"canary: {verdict.summary}")
        is_written = self._write(VERDICT_FILE, verdict)
        self._verdict = None if is_written else verdict
        self.state = None

    async def _observe(self, table: RouteTable, models: ModelClient) -> None:
        rag = self._rag() if self._rag else None
        try:
            async with asyncio.TaskGroup() as group:
                if rag:
                    for _ in range(AT_ONCE):
                        group.create_task(self._compare_all(models, rag))
                group.create_task(self._check_forever(table))
        finally:
            if rag:
                await rag.close()

    async def _check_forever(self, table: RouteTable) -> None:
        while True:
            self.check(table)
            await asyncio.sleep(self._config.check_every_s)

    def _write(self, name: str, record: BaseModel) -> bool:
        """Tell whether the file could be written; if not, the next check tries again."""
        try:
            write_json(self._folder / name, dump_record(record))
        except OSError as error:
            _LOG.error("%s: can't be written: %s", self._folder / name, error)
            return False
        return True

    def _follow(self, routes: Routes) -> CanaryState | None:
        """The canary that these routes are; it is begun or ended where they have changed."""
        if not (routes.champion and routes.challenger and routes.share > 0):
            self.state = None
            return None
        pair = (routes.champion.version, routes.challenger.version, routes.share)
        if self.state is None or self.state.pair != pair:
            self.state = self._begin(*pair)
        return self.state

    def _begin(self, champion: str, challenger: str, share: float) -> CanaryState:
        """The state of a canary; a router that was restarted goes on with the one on file."""
        now = self._clock()
        state = CanaryState(champion=champion, challenger=challenger, share=share, started=now)
        saved = read_state(self._folder)
        if saved is None or saved.pair != state.pair or saved.judgement.outcome != "keep":
            return state
        if saved.looked:
            # The time between does not count.
            saved.started += max(0.0, now - saved.looked)
        return saved

    async def _compare_all(self, models: ModelClient, rag: RagClient) -> None:
        while True:
            comparison = await self._waiting.get()
            state = comparison.state
            if state is not self.state:
                # Its canary is over.
                continue
            try:
                state.counts.retrieval.add(await self._difference(comparison, models, rag))
            except (ModelError, RetrievalError) as error:
                state.failed += 1
                _LOG.info("not compared: %s", error.reason)
            except Exception as error:  # noqa: BLE001 (of this question alone)
                state.failed += 1
                _LOG.error("not compared: %s", describe_without_text(error))

    async def _difference(
        self, comparison: _Comparison, models: ModelClient, rag: RagClient
    ) -> float:
        """The challenger's score of its best passage less the champion's.

        Raises:
            ModelError, RetrievalError: the other model or the RAG did not answer.
        """
        champion = comparison.routes.champion
        challenger = comparison.routes.challenger
        served = comparison.served
        assert champion and challenger and served.answer is not None
        is_of_challenger = served.role == "challenger"
        other_model = champion if is_of_challenger else challenger
        other_answer = await models.answer(other_model, comparison.question, _MODEL_WITHIN_S)
        if other_answer.text == served.answer:
            return 0.0
        texts = [served.answer, other_answer.text]
        services = Clients(rag=rag)
        grades = await self._grader.grade(comparison.question, texts, services, self._tenant)
        score = _top1_score(grades[served.answer])
        other_score = _top1_score(grades[other_answer.text])
        difference = other_score - score
        return -difference if is_of_challenger else difference


def _top1_score(grade: Grade) -> float:
    """The score of the best passage; raises RetrievalError where the RAG did not answer."""
    grade.raise_failure()
    assert grade.retrieved is not None, "only rewrites are compared"
    return grade.retrieved.top1_score


def read_state(folder: Path) -> CanaryState | None:
    return find_record(CanaryState, folder / STATE_FILE)


def read_verdict(folder: Path) -> CanaryVerdict | None:
    return find_record(CanaryVerdict, folder / VERDICT_FILE)


def canary_observer_of(profile: Profile, folder: Path) -> CanaryObserver:
    # httpx2 would log two lines for each comparison, for ever.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    grader = get_recipe(profile.recipe).grader
    rag = None
    if grader.asks_rag:
        # A comparison is not worth a long wait.
        settings = profile.rag.model_copy(update={"max_retries": _RAG_RETRIES})
        rag = partial(RagClient, settings, settings.url, profile.tenant.id)
    return CanaryObserver(profile.serve.canary, folder, rag, grader, profile.tenant)
