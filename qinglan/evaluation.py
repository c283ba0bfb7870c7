"""Evaluate: the same questions through every arm, and paired comparisons between arms.

An arm is a way to get a query: the original question, the teacher, a student model. A row on which an arm failed
has no value there; it is counted and left out of that arm's means and comparisons, never scored 0.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from qinglan.chat import cost_usd
from qinglan.clients import Clients
from qinglan.config import Evaluate, Price, Tenant
from qinglan.errors import CallError, StageError
from qinglan.recipes import Recipe
from qinglan.report import Arm, ArmName, Example, ExampleArm, Shared
from qinglan.rows import Retrieved, Row, normalise
from qinglan.statistics import ArmScores, Comparison, compare, mean_ci

PAIRS: tuple[tuple[ArmName, ArmName], ...] = (
    ("rl", "teacher"),
    ("sft", "teacher"),
    ("rl", "sft"),
    ("teacher", "original"),
    ("sft", "base"),
)
COMPARED_METRICS = ("top1", "mrr10", "mean_top1_score", "quality")


class ArmRow(BaseModel):
    """One question through one arm."""

    model_config = ConfigDict(frozen=True)

    row_id: str
    text: str | None = None
    """The query sent to the RAG; None where the arm gave none."""
    reason: str | None = None
    retrieved: Retrieved | None = None
    judge_score: float | None = None
    latency_ms: float | None = None
    """Time to get the rewrite, retrieval excluded; None where it was not measured."""
    cost_usd: float | None = None


class Evaluation(BaseModel):
    """What the evaluate stage hands to the report."""

    arms: dict[ArmName, Arm]
    comparisons: list[Comparison]
    examples: list[Example]
    shared: list[Shared]


def teacher_rows(rows: Iterable[Row]) -> list[ArmRow]:
    """The teacher's arm, from what distillation and validation found."""
    return [
        ArmRow(
            row_id=row.id,
            text=row.rewrite,
            reason=None if row.rewrite_retrieved else row.reason,
            retrieved=row.rewrite_retrieved,
            judge_score=row.judge_score,
            latency_ms=row.rewrite_latency_ms,
            cost_usd=row.rewrite_cost_usd,
        )
        for row in rows
    ]


def original_rows(rows: Iterable[Row]) -> list[ArmRow]:
    """The question as it was typed; it costs nothing and takes no time."""
    return [
        ArmRow(
            row_id=row.id,
            text=row.query,
            reason=None if row.original_retrieved else row.reason,
            retrieved=row.original_retrieved,
            latency_ms=0.0,
            cost_usd=0.0,
        )
        for row in rows
    ]


def student_rows(answers: Iterable[str], price: Price | None) -> list[ArmRow]:
    """A student's arm, from the JSON lines that its generation wrote."""
    return [_student_row(json.loads(answer), price) for answer in answers]


def _student_row(answer: dict[str, Any], price: Price | None) -> ArmRow:
    text = " ".join(answer["text"].split())
    return ArmRow(
        row_id=answer["id"],
        text=text or None,
        reason=None if text else "empty_rewrite",
        latency_ms=answer.get("latency_ms"),
        cost_usd=cost_usd(price, answer["prompt_tokens"], answer["completion_tokens"]) if price else None,
    )


def not_retrieved(arm: Iterable[ArmRow]) -> list[ArmRow]:
    """The same texts, to be retrieved again: what an earlier run found does not compare with a service of today."""
    return [entry.model_copy(update={"retrieved": None}) for entry in arm]


async def retrieve_and_judge(
    arm: Sequence[ArmRow],
    rows: Sequence[Row],
    recipe: Recipe,
    clients: Clients,
    tenant: Tenant,
    max_failed_share: float = 0.05,
) -> list[ArmRow]:
    """Fill in what is missing: retrieval with each text, and the judge's score of it.

    Raises:
        StageError: too many calls failed for a fair comparison; nothing of it is kept.
    """
    by_id = {row.id: row for row in rows}
    done = list(
        await asyncio.gather(*(_complete(entry, by_id[entry.row_id], recipe, clients, tenant) for entry in arm))
    )
    failed = [entry.reason for entry in done if entry.text is not None and entry.reason]
    if len(failed) > max_failed_share * len(done):
        reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(failed).most_common())
        raise StageError(
            f"evaluate: calls failed for {len(failed)} of {len(done)} questions ({reasons}), more than "
            f"evaluate.max_failed_share = {max_failed_share:.0%} allows; mend the service and run again"
        )
    return done


def summarise(arm: Sequence[ArmRow], rows: Sequence[Row], config: Evaluate) -> Arm:
    """Means of one arm, with the interval of top-1 from a bootstrap over groups."""
    scores = arm_scores("arm", arm, rows).scores
    top1 = mean_ci(scores["top1"], groups_of(rows), config.bootstrap_resamples, config.seed)
    latencies = [entry.latency_ms for entry in arm if entry.latency_ms is not None]
    costs = [entry.cost_usd for entry in arm if entry.cost_usd is not None]
    return Arm(
        n=len(arm),
        top1=top1.mean,
        top1_ci95=top1.ci95,
        mrr10=_mean(scores["mrr10"]),
        mean_top1_score=_mean(scores["mean_top1_score"]),
        quality=_mean(scores["quality"]),
        latency_p50_ms=float(np.percentile(latencies, 50)) if latencies else None,
        latency_p95_ms=float(np.percentile(latencies, 95)) if latencies else None,
        cost_per_1000_usd=1000 * sum(costs) / len(costs) if costs else None,
        failed=sum(entry.retrieved is None for entry in arm),
    )


def arm_scores(name: str, arm: Sequence[ArmRow], rows: Sequence[Row]) -> ArmScores:
    """Per metric and row id; None where there is no value."""
    gold = {row.id: row.gold_id for row in rows}

    def each(value: Callable[[ArmRow, Retrieved], float | None]) -> dict[str, float | None]:
        return {entry.row_id: value(entry, entry.retrieved) if entry.retrieved else None for entry in arm}

    def rank(entry: ArmRow, found: Retrieved) -> int | None:
        return found.rank(gold[entry.row_id]) if gold[entry.row_id] else None

    return ArmScores(
        arm=name,
        scores={
            "top1": each(lambda entry, found: None if (r := rank(entry, found)) is None else float(r == 1)),
            "mrr10": each(lambda entry, found: None if (r := rank(entry, found)) is None else _reciprocal(r)),
            "mean_top1_score": each(lambda _, found: found.top1_score),
            "quality": each(lambda entry, _: entry.judge_score),
        },
    )


def compare_arms(arms: Mapping[ArmName, Sequence[ArmRow]], rows: Sequence[Row], config: Evaluate) -> list[Comparison]:
    """All pairs of `PAIRS` that are there, on every metric that has values."""
    scores = {name: arm_scores(name, arm, rows) for name, arm in arms.items()}
    run = partial(compare, groups=groups_of(rows), resamples=config.bootstrap_resamples, seed=config.seed)
    found = [run(scores[a], scores[b], m) for a, b in PAIRS if a in arms and b in arms for m in COMPARED_METRICS]
    return [comparison for comparison in found if comparison.n]


def groups_of(rows: Iterable[Row]) -> dict[str, str]:
    """Rows that ask for the same document are one group; an unlabelled row is its own."""
    return {row.id: row.gold_id or row.id for row in rows}


def examples(arms: Mapping[ArmName, Sequence[ArmRow]], rows: Sequence[Row], count: int = 10) -> list[Example]:
    """Questions spread over groups: the first of every k-th group, in the order of row ids."""
    first_of_group = {row.gold_id or row.id: row for row in sorted(rows, key=lambda r: r.id, reverse=True)}
    spread = sorted(first_of_group.values(), key=lambda row: row.id)
    chosen = spread[:: max(1, len(spread) // count)][:count]
    by_arm = {name: {entry.row_id: entry for entry in arm} for name, arm in arms.items()}
    return [
        Example(
            query=row.query,
            profile=row.profile,
            history=row.history,
            gold_id=row.gold_id,
            gold_title=_title_of(row.gold_id, (entries[row.id] for entries in by_arm.values() if row.id in entries)),
            arms={
                name: ExampleArm(text=entry.text, reason=entry.reason, retrieved=_first_places(entry.retrieved))
                for name, entries in by_arm.items()
                if (entry := entries.get(row.id))
            },
        )
        for row in chosen
    ]


def shared_between(train: Sequence[Row], test: Sequence[Row]) -> list[Shared]:
    """What the test split has in common with training rows, so that nobody has to guess."""

    def overlap(what: str, key: Callable[[Row], str | None], note: str = "") -> Shared:
        seen = {key(row) for row in train} - {None}
        asked = {key(row) for row in test} - {None}
        return Shared(what=what, test=len(asked), in_train=len(asked & seen), note=note)

    return [
        overlap("row ids", lambda row: row.id),
        overlap("questions with context, normalised", lambda row: normalise(row.query + row.history + row.profile)),
        overlap(
            "bare questions, normalised",
            lambda row: normalise(row.query),
            "the same words can mean another thing after another history",
        ),
        overlap("gold documents", lambda row: row.gold_id),
    ]


async def _complete(entry: ArmRow, row: Row, recipe: Recipe, clients: Clients, tenant: Tenant) -> ArmRow:
    if entry.text is None:
        return entry
    try:
        retrieved = entry.retrieved or await clients.rag.retrieve(row.query, entry.text)
    except CallError as error:
        return entry.model_copy(update={"reason": error.reason})
    entry = entry.model_copy(update={"retrieved": retrieved, "reason": None})
    if entry.judge_score is not None:
        return entry
    question = recipe.user_text(row.query, row.profile, row.history)
    messages = recipe.judge_messages(question, entry.text or "", tenant)
    try:
        score = (await clients.judge.ask(messages, recipe.parse_judge, recipe.JUDGE_SCHEMA)).value
    except CallError as error:  # the arm did its part: what it retrieved counts
        return entry.model_copy(update={"reason": error.reason})
    return entry.model_copy(update={"judge_score": score})


def _title_of(document_id: str | None, entries: Iterable[ArmRow]) -> str | None:
    """A document's title, if any arm found it."""
    for entry in entries:
        if entry.retrieved and 0 < (rank := entry.retrieved.rank(document_id)) <= len(entry.retrieved.titles):
            return entry.retrieved.titles[rank - 1]
    return None


def _first_places(retrieved: Retrieved | None, places: int = 3) -> Retrieved | None:
    if retrieved is None:
        return None
    return Retrieved(ids=retrieved.ids[:places], scores=retrieved.scores[:places], titles=retrieved.titles[:places])


def _reciprocal(rank: int) -> float:
    return 1 / rank if 0 < rank <= 10 else 0.0


def _mean(values: Mapping[str, float | None]) -> float | None:
    present = [value for value in values.values() if value is not None]
    return sum(present) / len(present) if present else None
