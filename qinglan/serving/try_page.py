"""The page at the router's address: one question to all arms, side by side.

Each arm is a request with a time limit of its own, so none delays another. None of it reaches the
request log, the canary or the metrics. The teacher is asked through the ledger, as a run of its own
a day that the budget counts.
"""

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

from qinglan.clients.rag import RagClient
from qinglan.clients.roles import Addresses, Clients, open_clients
from qinglan.config import EMBEDDED, Profile
from qinglan.data.versions import INDEX, Version, find_rows, latest_version, read_index
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
from qinglan.serving.routes import ModelRole, RouteTable

PAGE = Path(__file__).with_name("try_page.html")
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
}
EXAMPLES = 8
AT_ONCE = 8
"""Arms that may be asked together; more are refused, as the models have users to serve."""
MODEL_WITHIN_S = 10.0
TEACHER_WITHIN_S = 60.0
RAG_WITHIN_S = 20.0
_CLOSE_WITHIN_S = 5.0
_LOG = logging.getLogger(__name__)


@dataclass
class _ArmAnswer:
    """The page's answer for one arm; what is not known yet, or failed, is None."""

    arm: str
    version: str | None = None
    text: str | None = None
    ms: float | None = None
    passages: list[dict[str, Any]] | None = None
    reason: dict[str, str] | None = None
    """Words in both languages for what failed."""


class TryPage:
    """Asks the arms of one router; belongs to one event loop, and must be closed."""

    def __init__(self, profile: Profile, table: RouteTable, models: ModelClient) -> None:
        self._profile = profile
        self._table = table
        self._models = models
        self._recipe = get_recipe(profile.recipe)
        self._searches = self._recipe.grader.asks_rag and profile.rag.url != EMBEDDED
        self._places = asyncio.Semaphore(AT_ONCE)
        # Teachers and RAG are opened with the first question: a missing key, or a ledger that can't
        # be opened, must not end the router.
        self._teachers = _Teachers(profile)
        self._rag: RagClient | None = None
        self._examples_version = ""
        self._examples: list[dict[str, Any]] = []

    @property
    def arms(self) -> list[str]:
        arms: list[str] = []
        if self._recipe.grader.question_is_arm:
            arms.append("original")
        if self._has_teacher():
            arms.append("teacher")
        arms.append("champion")
        if self._table.routes.challenger:
            arms.append("challenger")
        return arms

    def _has_teacher(self) -> bool:
        """Tell whether there is a teacher that may be asked, with all that its recipe needs."""
        roles = self._recipe.DISTILL_ROLES
        if self._profile.serve.try_page != "with_teacher" or "teacher" not in roles:
            return False
        endpoints = [getattr(self._profile, role) for role in roles]
        return all(endpoint and endpoint.base_url != EMBEDDED for endpoint in endpoints)

    async def settings(self) -> dict[str, Any]:
        """The page's settings, with examples from the test split of the latest dataset version."""
        inputs: list[dict[str, str]] = []
        for recipe_input in self._recipe.INPUTS:
            if recipe_input.is_asked:
                inputs.append({"name": recipe_input.name, "label": recipe_input.column})
        return {
            "model": self._profile.model_name,
            "arms": self.arms,
            "searches": self._searches,
            "deadline_ms": self._profile.serve.deadline_ms,
            "inputs": inputs,
            "examples": await asyncio.to_thread(self._find_examples),
        }

    async def ask(self, arm: str, question: Row, unfit: str = "") -> dict[str, Any]:
        """An arm's text, the time that it took, and the passages that it finds.

        Whatever fails is a reason in words.

        Args:
            unfit: why no model may be asked this question; empty where one may.
        """
        answer = _ArmAnswer(arm)
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
            problem = error if isinstance(error, QinglanError) else describe_without_text(error)
            _LOG.error("%s on the page to try: %s", arm, problem)
            reason = "see_log"
        if reason:
            answer.reason = words(reason, "serving_reasons", "row_reasons")._asdict()
        return asdict(answer)

    async def close(self) -> None:
        """Close the clients; the teacher's answers under way get a moment, as they are paid for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_WITHIN_S):
                await self._teachers.close()
                if self._rag:
                    await self._rag.close()

    async def _fill_in(self, answer: _ArmAnswer, question: Row) -> None:
        """Ask the arm; what is known when a later step fails stays in the answer."""
        started_s = time.perf_counter()
        measured_ms: float | None = None
        if answer.arm == "original":
            text = question.query
            measured_ms = 0.0
        elif answer.arm == "teacher":
            text, measured_ms = await self._ask_teacher(question)
        else:
            text = await self._ask_model(answer, question)
        took_ms = 1000 * (time.perf_counter() - started_s)
        answer.text = text
        answer.ms = took_ms if measured_ms is None else measured_ms
        if self._searches:
            rewrite = None if answer.arm == "original" else text
            answer.passages = _passages(await self._retrieve(question.query, rewrite))

    async def _ask_model(self, answer: _ArmAnswer, question: Row) -> str:
        role: ModelRole = "challenger" if answer.arm == "challenger" else "champion"
        backend = self._table.routes.backend(role)
        if backend is None:
            raise ModelError(f"no {answer.arm} is in service", "no_model")
        answer.version = backend.version
        within_s = max(MODEL_WITHIN_S, self._profile.serve.deadline_ms / 1000)
        model_answer = await self._models.answer(backend, question, within_s)
        return model_answer.text

    async def _ask_teacher(self, question: Row) -> tuple[str, float | None]:
        """The teacher's text, and the milliseconds that it took when it was asked.

        That may be earlier, as the ledger keeps its answers.
        """
        try:
            async with asyncio.timeout(TEACHER_WITHIN_S):
                clients = await self._teachers.open()
                row = await self._recipe.distill(question, clients, self._profile.tenant)
        except TimeoutError:
            raise TeacherError("no answer in time", "teacher_timeout") from None
        assert row.answer is not None
        return row.answer, row.answer_latency_ms

    async def _retrieve(self, query: str, rewrite: str | None) -> Retrieved:
        if self._rag is None:
            self._rag = RagClient(self._profile.rag, self._profile.rag.url, self._profile.tenant.id)
        try:
            async with asyncio.timeout(RAG_WITHIN_S):
                return await self._rag.retrieve(query, rewrite, max_retries=0)
        except TimeoutError:
            raise RetrievalError("no answer in time", "rag_unavailable") from None

    def _find_examples(self) -> list[dict[str, Any]]:
        """The examples of the latest dataset version; those before it where it can't be read."""
        try:
            version = latest_version(self._profile)
            if version and version.id != self._examples_version:
                self._examples = self._draw_examples(version)
                self._examples_version = version.id
        except (QinglanError, OSError, ValueError) as error:
            _LOG.error("no examples for the page to try: %s", error)
        return self._examples

    def _draw_examples(self, version: Version) -> list[dict[str, Any]]:
        sample: BottomK[str] = BottomK(EXAMPLES)
        for entry in read_index(version.directory / INDEX):
            if entry.split == "test":
                sample.add(entry.id, entry.id)
        examples: list[dict[str, Any]] = []
        for row in find_rows(version, sample.items()).values():
            example = {
                "question": row.query,
                "profile": row.profile,
                "history": row.history,
                "inputs": identifying(row.inputs, self._recipe.INPUTS),
                "gold_ids": [row.gold_id, *documents_of(row.gold_id)],
            }
            examples.append(example)
        return examples


def _passages(retrieved: Retrieved) -> list[dict[str, Any]]:
    passages: list[dict[str, Any]] = []
    for id_, title, score in zip(retrieved.ids, retrieved.titles, retrieved.scores, strict=True):
        passages.append({"id": id_, "title": title, "score": score})
    return passages


class _Teachers:
    """The clients of whoever answers in the teacher's place.

    They are opened anew each day, as the budget counts a day's questions as a run.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._clients: Clients | None = None
        self._day: date | None = None

    async def open(self) -> Clients:
        async with self._opening:
            today = date.today()
            if self._clients is None or self._day != today:
                # Should opening fail, the next question tries it again.
                self._clients = None
                await self._stack.aclose()
                # It is imported in a thread, as that takes most of a second.
                await asyncio.to_thread(import_module, "qinglan.clients.transport")
                self._day = today
                self._clients = await self._stack.enter_async_context(self._open_clients(today))
            return self._clients

    async def close(self) -> None:
        await self._stack.aclose()

    def _open_clients(self, today: date) -> AbstractAsyncContextManager[Clients]:
        profile = self._profile
        run = Run(id=f"try-{today}", flow="try", profile=profile, directory=profile.paths.state)
        addresses = Addresses(
            teacher_url=profile.teacher.base_url,
            judge_url=profile.judge.base_url,
            rag_url="",
            answerer_url=profile.answerer.base_url if profile.answerer else "",
        )
        roles = get_recipe(profile.recipe).DISTILL_ROLES
        return open_clients(run, lambda: addresses, roles)
