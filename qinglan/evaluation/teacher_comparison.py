"""Teachers side by side: who is asked what, and the figures of their answers. `purchase` says which
to buy.

Every teacher is asked the same questions with the same prompt, and its texts are graded as the main
teacher's are. A question that a teacher left without a text counts against it as such, under
`answered`, and nowhere as a low score.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from qinglan.clients.roles import Addresses, Clients, Services
from qinglan.clients.row_batches import OVER_BUDGET
from qinglan.config import Endpoint, Evaluate, Profile, Tenant
from qinglan.errors import CallError
from qinglan.evaluation.arms import Arms, original_rows, teacher_rows
from qinglan.evaluation.figures import compared, examples, scores_of, summarise
from qinglan.evaluation.measuring import for_each_question
from qinglan.evaluation.models import ArmFigures, Evaluation
from qinglan.evaluation.reasons import Reason
from qinglan.grading.failures import require_few_failures
from qinglan.ledger import Ledger
from qinglan.recipes import Metric, Recipe
from qinglan.recipes.requests import teacher_requests
from qinglan.rows import ArmRow, Row, groups_of, hash_fraction
from qinglan.runs.run import Run
from qinglan.statistics import ArmScores, Comparison, holm_corrected, ratio_ci

MAIN = "teacher"
"""The arm of the profile's own teacher."""
ORIGINAL = "original"
ANSWERED = Metric("answered", "share of questions answered", "有回答的问题比例")
"""Share of the questions for which a teacher gave a usable text."""
_OF_THE_QUESTION = {
    *("id", "tenant", "query", "profile", "history", "gold_id", "intent"),
    *("inputs", "pool", "split", "group", "source"),
}
"""Fields of a row; the others are what the main teacher made of it, which is another arm."""


class ComparedTeacher(NamedTuple):
    """One teacher, and the run as it would be with this teacher in the place of the main one."""

    arm: str
    run: Run
    services: Services

    def stage(self, name: str) -> str:
        """What a stage is called for this teacher."""
        return name if self.arm == MAIN else f"{name}-{self.arm}"


def teachers_of(run: Run, services: Services) -> list[ComparedTeacher]:
    """The main teacher, then its rivals."""
    profile = run.profile

    def asking(teacher: Endpoint) -> Run:
        # Asked live, so that its latency is known; that it fails often is a finding.
        distill = profile.distill.model_copy(update={"mode": "live", "max_failed_share": 1.0})
        return run.model_copy(
            update={"profile": profile.model_copy(update={"teacher": teacher, "distill": distill})}
        )

    def addresses_of(rival: str) -> Addresses:
        addresses = services()
        return replace(addresses, teacher_url=addresses.rival_urls[rival])

    teachers = profile.compare.teachers.items()
    rivals = [
        ComparedTeacher(name, asking(teacher), partial(addresses_of, name))
        for name, teacher in teachers
    ]
    return [ComparedTeacher(MAIN, asking(profile.teacher), services), *rivals]


async def ask_teacher(
    rows: Sequence[Row], recipe: Recipe, clients: Clients, tenant: Tenant, max_failed_share: float
) -> list[ArmRow]:
    """A further teacher's arm, not retrieved with yet. What it refuses or leaves empty is a finding
    about it; StageError where its service failed too often to say anything about it."""
    lost = list[str]()

    async def attempt(row: Row) -> Row:
        try:
            return await recipe.distill(row, clients, tenant)
        except CallError as error:
            if error.transient:
                lost.append(error.reason)
            return row.failed(error.reason)

    questions = (Row(**{name: getattr(row, name) for name in _OF_THE_QUESTION}) for row in rows)
    answered = await for_each_question(questions, attempt)
    require_few_failures(lost, len(rows), max_failed_share)
    return teacher_rows(answered.values())


def draw(rows: Iterable[Row], count: int) -> list[Row]:
    """Usable rows by a hash of their ids: the same ones every night, and those of a smaller sample
    among them."""
    usable = (row for row in rows if row.status == "ok")
    return heapq.nsmallest(count, usable, key=lambda row: hash_fraction(f"compare {row.id}"))


def cost_of_unusable(profile: Profile, rows: Iterable[Row], ledger: Ledger) -> dict[str, float]:
    """Dollars by row id for answers of this profile's teacher that were of no use: refused, cut
    off, empty."""
    asked = teacher_requests(profile)
    unanswered = ((row, asked(row)) for row in rows if row.answer is None)
    requests = {row.id: request.request_hash for row, request in unanswered if request}
    calls = ledger.get_many(requests.values())
    return {row: calls[request].cost_usd for row, request in requests.items() if request in calls}


def arms_of(
    answers: Mapping[str, Sequence[Row]],
    unusable_cost: Mapping[str, Mapping[str, float]],
    recipe: Recipe,
) -> dict[str, list[ArmRow]]:
    """Every teacher, and the original question where it can be retrieved with, over the same rows.

    Args:
        answers: by arm, the validated rows, the main teacher's among them.
        unusable_cost: by arm, what `cost_of_unusable` found.
    """
    arms = {}
    if recipe.grader.retrieves:
        # What the original question found is the same for every teacher; one that failed has not
        # recorded it.
        known = {
            row.id: row.original_retrieved
            for rows in answers.values()
            for row in rows
            if row.original_retrieved
        }
        questions = (
            row.model_copy(update={"original_retrieved": known.get(row.id)})
            for row in answers[MAIN]
        )
        arms[ORIGINAL] = original_rows(questions)
    for name, rows in answers.items():
        wasted = unusable_cost.get(name, {})
        arms[name] = [
            entry
            if entry.cost_usd is not None
            else entry.model_copy(update={"cost_usd": wasted.get(entry.row_id)})
            for entry in teacher_rows(rows)
        ]
    return arms


def evaluate_teachers(
    arms: Arms,
    rows: Sequence[Row],
    config: Evaluate,
    recipe: Recipe,
    loads: Mapping[str, Reason] | None = None,
) -> Evaluation:
    """Figures of all arms, and every rival against the main teacher on every metric that has
    values.

    `loads`: by arm, what else was asked while its latency was measured.
    """
    loads = loads or {}
    return Evaluation(
        metrics=[*recipe.grader.metrics, ANSWERED],
        arms={
            name: _with_cost(summarise(arm, rows, config, recipe, loads.get(name)), arm, config)
            for name, arm in arms.items()
        },
        comparisons=_comparisons(arms, rows, config, recipe),
        examples=examples(arms, rows, recipe),
    )


def _with_cost(arm: ArmFigures, entries: Sequence[ArmRow], config: Evaluate) -> ArmFigures:
    """Dollars per 1,000 usable texts: answers that are none were paid for as well."""
    costs = [entry.cost_usd for entry in entries if entry.cost_usd is not None]
    usable = sum(entry.text is not None for entry in entries)
    if not costs or not usable:
        return arm.model_copy(update={"cost_per_1000_usd": None, "cost_ci95": None})
    pairs = [(1000 * (entry.cost_usd or 0.0), float(entry.text is not None)) for entry in entries]
    interval = ratio_ci(pairs, config.bootstrap_resamples, config.seed)
    return arm.model_copy(
        update={"cost_per_1000_usd": 1000 * sum(costs) / usable, "cost_ci95": interval}
    )


def _comparisons(
    arms: Arms, rows: Sequence[Row], config: Evaluate, recipe: Recipe
) -> list[Comparison]:
    groups, scores = groups_of(rows), {}
    for name, arm in arms.items():
        answered = {
            entry.row_id: None if entry.reason == OVER_BUDGET else entry.text is not None
            for entry in arm
        }
        scores[name] = ArmScores(
            arm=name, scores={**scores_of(arm, rows, recipe), ANSWERED.name: answered}
        )
    teachers = [name for name in arms if name != ORIGINAL]
    rivals = [name for name in teachers if name != MAIN]
    metrics = [metric for metric in recipe.grader.metrics if metric.compared and metric.interval]
    corrected = []
    for metric in (*metrics, ANSWERED):
        pairs = [compared(scores[rival], scores[MAIN], metric, groups, config) for rival in rivals]
        corrected += [
            c
            for c in holm_corrected([c for c in pairs if c.n])
            if metric != ANSWERED or c.wins or c.losses
        ]
    corrected.sort(key=lambda comparison: rivals.index(comparison.a))
    # Every teacher against the original question, on the first metric that there is: no gain is
    # worth no money.
    for metric in metrics if ORIGINAL in scores else ():
        gains = [
            compared(scores[name], scores[ORIGINAL], metric, groups, config) for name in teachers
        ]
        if present := [c for c in gains if c.n]:
            return [*corrected, *holm_corrected(present)]
    return corrected
