"""The page at the router's address: one question to the teacher, the champion and the challenger,
side by side.

Each arm is a request with a time limit of its own, so none delays another. None of it reaches the
request log, the canary or the metrics. The teacher is asked through the ledger, as a run of its own
a day that the budget counts.
"""

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from qinglan.clients.rag import RagClient
from qinglan.clients.roles import Addresses, Clients, open_clients
from qinglan.config import EMBEDDED, Profile
from qinglan.data.versions import INDEX, find_rows, latest_version, read_index
from qinglan.errors import (
    BudgetError,
    CallError,
    ModelError,
    QinglanError,
    RetrievalError,
    TeacherError,
)
from qinglan.evaluation.reasons import words
from qinglan.recipes import get_recipe, identifying
from qinglan.rows import BottomK, Retrieved, Row, documents_of
from qinglan.runs.run import Run
from qinglan.serving.request_handler import ModelClient, describe_without_text
from qinglan.serving.routes import RouteTable

PAGE = Path(__file__).with_name("try_page.html")
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
EXAMPLES = 8
AT_ONCE = 8
"""Arms that may be asked together; more are refused, as the models have users to serve."""
MODEL_WITHIN_S, TEACHER_WITHIN_S, RAG_WITHIN_S = 10.0, 60.0, 20.0
_CLOSE_WITHIN_S = 5.0
_LOG = logging.getLogger(__name__)


class TryPage:
    """Belongs to one event loop; close it."""

    def __init__(self, profile: Profile, table: RouteTable, models: ModelClient) -> None:
        self._profile, self._table, self._models = profile, table, models
        self._recipe, self._places = get_recipe(profile.recipe), asyncio.Semaphore(AT_ONCE)
        self._stack, self._of_today, self._opening = (
            AsyncExitStack(),
            AsyncExitStack(),
            asyncio.Lock(),
        )
        self._teachers: Clients | None = None
        self._today: date | None = None
        self._rag: RagClient | None = None
        """Both from the first question on: a missing key, or a ledger that can't be opened, must
        not end the router."""
        self._searches = self._recipe.grader.retrieves and profile.rag.url != EMBEDDED
        self._examples_version, self._examples = "", list[dict[str, Any]]()

    @property
    def arms(self) -> list[str]:
        profile, roles = self._profile, self._recipe.DISTILL_ROLES
        asked = [getattr(profile, role) for role in roles]
        is_real = "teacher" in roles and all(each and each.base_url != EMBEDDED for each in asked)
        has_teacher = profile.serve.try_page == "with_teacher" and is_real
        challenger = ["challenger"] if self._table.routes.challenger else []
        return (
            ["original"] * self._recipe.grader.retrieves
            + ["teacher"] * has_teacher
            + ["champion", *challenger]
        )

    async def settings(self) -> dict[str, Any]:
        """What the page needs to know, with examples from the test split of the latest dataset
        version."""
        asked = [each for each in self._recipe.INPUTS if each.is_asked]
        return {
            "model": self._profile.model_name,
            "arms": self.arms,
            "searches": self._searches,
            "deadline_ms": self._profile.serve.deadline_ms,
            "inputs": [{"name": each.name, "label": each.column} for each in asked],
            "examples": await asyncio.to_thread(self._find_examples),
        }

    async def ask(self, arm: str, question: Row, unfit: str = "") -> dict[str, Any]:
        """An arm's text, the time that it took, and the passages that it finds; what fails is a
        reason in words.

        `unfit`: why no model may be asked this question.
        """
        answer: dict[str, Any] = {
            "arm": arm,
            "version": None,
            "text": None,
            "ms": None,
            "passages": None,
        }
        reason = ""
        try:
            if unfit:
                raise ModelError("no model may be asked this", unfit)
            if self._places.locked():
                raise ModelError("too many are asked", "overloaded")
            async with self._places:
                await self._fill_in(answer, question)
        except CallError as error:
            reason = error.reason
        except BudgetError:
            reason = "over_budget"
        except Exception as error:  # noqa: BLE001 (the other arms go on)
            said = error if isinstance(error, QinglanError) else describe_without_text(error)
            _LOG.error("%s on the page to try: %s", arm, said)
            reason = "see_log"
        return answer | {
            "reason": words(reason, "serving_reasons", "row_reasons")._asdict() if reason else None
        }

    async def close(self) -> None:
        """Answers of the teacher that are under way get a moment, as they are paid for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await self._of_today.aclose()
                await self._stack.aclose()

    async def _fill_in(self, answer: dict[str, Any], question: Row) -> None:
        start, arm, took_ms = time.perf_counter(), answer["arm"], None
        if arm == "original":
            text, took_ms = question.query, 0.0
        elif arm == "teacher":
            text, took_ms = await self._ask_teacher(question)
        else:
            routes = self._table.routes
            if (backend := routes.challenger if arm == "challenger" else routes.champion) is None:
                raise ModelError(f"no {arm} is in service", "no_model")
            answer["version"] = backend.version
            within_s = max(MODEL_WITHIN_S, self._profile.serve.deadline_ms / 1000)
            text, _ = await self._models.answer(backend, question, within_s)
        answer["text"] = text
        answer["ms"] = 1000 * (time.perf_counter() - start) if took_ms is None else took_ms
        if self._searches:
            found = await self._retrieve(question.query, None if arm == "original" else text)
            passages = zip(found.ids, found.titles, found.scores, strict=True)
            answer["passages"] = [
                {"id": id_, "title": title, "score": score} for id_, title, score in passages
            ]

    async def _ask_teacher(self, question: Row) -> tuple[str, float | None]:
        """Its text, and the time that it took when it was asked: the ledger may have known the
        answer."""
        try:
            async with asyncio.timeout(TEACHER_WITHIN_S):
                row = await self._recipe.distill(
                    question, await self._open_teachers(), self._profile.tenant
                )
        except TimeoutError:
            raise TeacherError("no answer in time", "teacher_timeout") from None
        assert row.answer is not None
        return row.answer, row.answer_latency_ms

    async def _retrieve(self, query: str, rewrite: str | None) -> Retrieved:
        if self._rag is None:
            self._rag = RagClient(self._profile.rag, self._profile.rag.url, self._profile.tenant.id)
            self._stack.push_async_callback(self._rag.close)
        try:
            async with asyncio.timeout(RAG_WITHIN_S):
                return await self._rag.retrieve(query, rewrite, max_retries=0)
        except TimeoutError:
            raise RetrievalError("no answer in time", "rag_unavailable") from None

    async def _open_teachers(self) -> Clients:
        async with self._opening:
            if self._teachers is None or self._today != date.today():
                self._teachers = None  # should opening fail, the next question tries it again
                await self._of_today.aclose()
                await asyncio.to_thread(
                    import_module, "qinglan.clients.transport"
                )  # it takes most of a second
                profile, self._today = self._profile, date.today()
                run = Run(
                    id=f"try-{self._today}",
                    flow="try",
                    profile=profile,
                    directory=profile.paths.state,
                )
                answerer_url = profile.answerer.base_url if profile.answerer else ""
                urls = Addresses(
                    profile.teacher.base_url, profile.judge.base_url, "", answerer_url=answerer_url
                )
                opened = open_clients(run, lambda: urls, self._recipe.DISTILL_ROLES)
                self._teachers = await self._of_today.enter_async_context(opened)
            return self._teachers

    def _find_examples(self) -> list[dict[str, Any]]:
        try:
            version = latest_version(self._profile)
            if version and version.id != self._examples_version:
                drawn: BottomK[str] = BottomK(EXAMPLES)
                for entry in read_index(version.directory / INDEX):
                    if entry.split == "test":
                        drawn.add(entry.id, entry.id)
                self._examples = [
                    {
                        "question": row.query,
                        "profile": row.profile,
                        "history": row.history,
                        "inputs": identifying(row.inputs, self._recipe.INPUTS),
                        "gold_ids": [row.gold_id, *documents_of(row.gold_id)],
                    }
                    for row in find_rows(version, drawn.items()).values()
                ]
                self._examples_version = version.id
        except (QinglanError, OSError, ValueError) as error:
            _LOG.error("no examples for the page to try: %s", error)
        return self._examples
