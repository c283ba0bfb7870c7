"""Distillation as actors on a Ray cluster: a script for the trainer's environment.

    python -m qinglan.training.engines.distill_ray job.json

Each actor asks with an equal part of the teacher's limits. They share the ledger, so what a lost actor had paid for
is not bought again when its batch is given to another. Progress goes line by line into the job's `progress` file; the
rows come back in their order. API keys are read from the environment of the nodes, never sent.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from qinglan.clients.roles import Clients, Services, open_clients
from qinglan.clients.row_batches import Batch, BatchIncompleteError, Losses, Work, cut, in_order
from qinglan.config import Endpoint, Profile
from qinglan.errors import QinglanError
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.distillation import distiller
from qinglan.rows import Row
from qinglan.runs.artifacts import JsonlWriter, read_jsonl, write_json
from qinglan.runs.command import Command
from qinglan.runs.run import Run
from qinglan.training.engines.swift import engine_python

_BATCHES_PER_ACTOR = 4
_RESTARTS = 10
_LAST_ANSWERS_S = 120.0
_ACTOR_CPUS = 0.5  # they wait for the network nearly all the time


class DistillJob(BaseModel):
    """What the script needs to know; written as JSON. Holds no secret."""

    model_config = ConfigDict(frozen=True)

    run: Run
    services: Services
    source: Path
    """`Row`s as JSON lines."""
    usable_rows: int
    output: Path
    progress: Path
    retry_delays_s: list[float]

    def command(self, path: Path) -> Command:
        """Write the job to a file, and what to run with it."""
        write_json(path, self.model_dump(mode="json"))
        return Command([engine_python(self.run.profile), "-m", "qinglan.training.engines.distill_ray", str(path)])


def parts_of(profile: Profile) -> int:
    """How many actors share the limits: no more than there is of the smallest one."""
    teacher = profile.teacher
    limits = (teacher.concurrency, teacher.requests_per_minute, teacher.tokens_per_minute)
    return min(profile.distill.ray.tasks, *(limit for limit in limits if limit))


def share_of(endpoint: Endpoint, parts: int) -> Endpoint:
    """An equal part of an endpoint's limits."""
    limits = ("concurrency", "requests_per_minute", "tokens_per_minute")
    given = {name: value for name in limits if (value := getattr(endpoint, name))}
    return endpoint.model_copy(update={name: max(1, value // parts) for name, value in given.items()})


class Asker:
    """One actor: asks for batches of rows, several at a time."""

    def __init__(self, job: DistillJob) -> None:
        profile = job.run.profile
        teacher = share_of(profile.teacher, parts_of(profile))
        self._run = job.run.model_copy(update={"profile": profile.model_copy(update={"teacher": teacher})})
        self._recipe = get_recipe(profile.recipe)
        self._job, self._open, self._ready = job, AsyncExitStack(), asyncio.Lock()
        self._clients: Clients | None = None

    async def ask(self, index: int, lines: list[str]) -> tuple[list[str], str | None]:
        """Finished rows as JSON, and the first failure in words."""
        batch = Batch(index, [Row.model_validate_json(line) for line in lines])
        work = await self._work()
        for pause_s in self._job.retry_delays_s:
            try:
                done = await batch.run(work, last_attempt=False)
                return [row.model_dump_json() for row in done], batch.first_failure()
            except BatchIncompleteError:
                await asyncio.sleep(pause_s)
        done = await batch.run(work, last_attempt=True)
        return [row.model_dump_json() for row in done], batch.first_failure()

    async def close(self) -> dict[str, dict[str, int]]:
        """End the clients; what they counted, by role."""
        counts = self._clients.call_counts() if self._clients else {}
        await self._open.aclose()
        return counts

    async def _work(self) -> Work:
        async with self._ready:
            if self._clients is None:
                opened = open_clients(self._run, self._job.services, self._recipe.DISTILL_ROLES)
                self._clients = await self._open.enter_async_context(opened)
        return distiller(self._recipe, self._clients, self._run.profile.tenant)


def main() -> int:
    """Run the job whose file is named; 2 for an error that the progress file then names."""
    job = DistillJob.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with job.progress.open("a", encoding="utf-8", buffering=1) as progress:
        try:
            for entry in _run(job):
                progress.write(json.dumps(entry) + "\n")
        except QinglanError as error:
            progress.write(json.dumps({"error": str(error)}, ensure_ascii=False) + "\n")
            return 2
    return 0


def _run(job: DistillJob) -> Iterator[dict[str, Any]]:
    import ray

    settings = job.run.profile.distill.ray
    ray.init(address=settings.address or "local", include_dashboard=False, log_to_driver=False)
    actor = ray.remote(num_cpus=_ACTOR_CPUS, max_restarts=_RESTARTS, max_task_retries=_RESTARTS, max_concurrency=64)(
        Asker
    )
    actors = [actor.remote(job) for _ in range(parts_of(job.run.profile))]
    loop = asyncio.new_event_loop()
    try:
        steps = _distill(job, actors)
        while (entry := loop.run_until_complete(anext(steps, None))) is not None:
            yield entry
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        ray.shutdown()


async def _distill(job: DistillJob, actors: list[Any]) -> Any:
    from ray.exceptions import RayTaskError

    profile: Profile = job.run.profile
    losses = Losses("distill", job.usable_rows, profile.distill.max_failed_share)

    async def work(batch: Batch) -> tuple[list[str], str | None]:
        asker = actors[batch.index % len(actors)]
        lines = [row.model_dump_json() for row in batch.rows]
        try:
            done: tuple[list[str], str | None] = await asker.ask.remote(batch.index, lines)
        except RayTaskError as error:  # its text is a traceback; the cause is the error that we know
            raise error.cause from None
        return done

    batches = cut(read_jsonl(job.source, Row), profile.distill.batch_rows)
    with JsonlWriter(job.output) as writer:
        try:
            async with aclosing(in_order(batches, work, at_once=_BATCHES_PER_ACTOR * len(actors))) as stream:
                async for batch, (lines, failure) in stream:
                    rows = [Row.model_validate_json(line) for line in lines]
                    losses.add(batch.rows, rows, failure)
                    for row in rows:
                        writer.write(row)
                    yield {"done": writer.rows}
        finally:  # also after an error: answers under way are paid for
            closing = asyncio.gather(*(asker.close.remote() for asker in actors), return_exceptions=True)
            closed = await asyncio.wait_for(closing, _LAST_ANSWERS_S)
        counts = [each for each in closed if isinstance(each, dict)]
        cached = sum(each.get("teacher", {}).get("cached", 0) for each in counts)
        yield {"done": writer.rows, "api": {"teacher": {"cached": cached}}}


if __name__ == "__main__":
    sys.exit(main())
