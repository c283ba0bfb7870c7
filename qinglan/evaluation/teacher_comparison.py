"""Teachers side by side: the calls to each, and the figures of their answers.

`purchase` says which to buy. Every teacher is asked the same questions with the same prompt, and
its texts are graded as the main teacher's are. A question that a teacher left without a text counts
against it as such, under `answered`, and nowhere as a low score.
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
from qinglan.evaluation.arms import ORIGINAL, TEACHER, Arms, original_rows, teacher_rows
from qinglan.evaluation.figures import compared, examples, scores_of, summarise
from qinglan.evaluation.measuring import for_each_question
from qinglan.evaluation.models import ArmFigures, Evaluation
from qinglan.evaluation.reasons import Reason
from qinglan.grading.failures import require_few_failures
from qinglan.ledger import Ledger
from qinglan.recipes import Metric, Recipe
from qinglan.recipes.requests import teacher_requests
from qinglan.rows import ArmName, ArmRow, Row, groups_of, hash_fraction
from qinglan.runs.run import Run
from qinglan.statistics import ArmScores, Comparison, holm_corrected, ratio_ci

ANSWERED = Metric("answered", "share of questions answered", "有回答的问题比例")
"""Share of the questions for which a teacher gave a usable text."""
_QUESTION_FIELDS = {
    "id",
    "tenant",
    "query",
    "profile",
    "history",
    "gold_id",
    "intent",
    "inputs",
    "pool",
    "split",
    "group",
    "source",
}
"""Fields of a row; the others are what the main teacher made of it, which is another arm."""


class ComparedTeacher(NamedTuple):
    """One teacher, and the run as it would be with this teacher in the place of the main one."""

    arm: ArmName
    run: Run
    services: Services

    def stage(self, name: str) -> str:
        """The name of a stage for this teacher."""
        return stage_of_teacher(name, self.arm)


def stage_of_teacher(stage: str, arm: ArmName) -> str:
    """The name of a stage for one teacher: its own for the main one."""
    return stage if arm == TEACHER else f"{stage}-{arm}"


def teachers_of(run: Run, services: Services) -> list[ComparedTeacher]:
    """The main teacher, then its rivals."""
    teachers = [ComparedTeacher(TEACHER, _asking(run, run.profile.teacher), services)]
    for name, endpoint in run.profile.compare.teachers.items():
        rival_services = partial(_addresses_of_rival, services, name)
        teachers.append(ComparedTeacher(name, _asking(run, endpoint), rival_services))
    return teachers


def _asking(run: Run, teacher: Endpoint) -> Run:
    """The run with this teacher."""
    # Asked live, so that its latency is known; that it fails often is a finding.
    distill = run.profile.distill.model_copy(update={"mode": "live", "max_failed_share": 1.0})
    profile = run.profile.model_copy(update={"teacher": teacher, "distill": distill})
    return run.model_copy(update={"profile": profile})


def _addresses_of_rival(services: Services, name: ArmName) -> Addresses:
    """The addresses with the rival's in the place of the main teacher's."""
    addresses = services()
    return replace(addresses, teacher_url=addresses.rival_urls[name])


async def ask_teacher(
    rows: Sequence[Row], recipe: Recipe, clients: Clients, tenant: Tenant, max_failed_share: float
) -> list[ArmRow]:
    """A further teacher's arm, not retrieved with yet.

    What the teacher refuses or leaves empty is a finding about it.

    Raises:
        StageError: its service failed too often to say anything about it.
    """
    outages = list[str]()

    async def ask(row: Row) -> Row:
        try:
            return await recipe.distill(row, clients, tenant)
        except CallError as error:
            # A refusal says something about the teacher, an outage nothing.
            if error.transient:
                outages.append(error.reason)
            return row.failed(error.reason)

    answered = await for_each_question(map(_question_of, rows), ask)
    require_few_failures(outages, len(rows), max_failed_share)
    return teacher_rows(answered.values())


def _question_of(row: Row) -> Row:
    """The row without what the main teacher made of it."""
    return Row(**{name: getattr(row, name) for name in _QUESTION_FIELDS})


def draw(rows: Iterable[Row], count: int) -> list[Row]:
    """Usable rows by a hash of their ids.

    They are the same ones every night, and those of a smaller sample are among them.
    """
    usable = (row for row in rows if row.status == "ok")
    return heapq.nsmallest(count, usable, key=lambda row: hash_fraction(f"compare {row.id}"))


def cost_of_unusable(profile: Profile, rows: Iterable[Row], ledger: Ledger) -> dict[str, float]:
    """Dollars by row id for the teacher's answers that were of no use: refused, cut off, empty."""
    request_of = teacher_requests(profile)
    hashes = {}
    for row in rows:
        if row.answer is None:
            request = request_of(row)
            if request:
                hashes[row.id] = request.request_hash
    calls = ledger.get_many(hashes.values())
    costs = {}
    for row_id, request_hash in hashes.items():
        if request_hash in calls:
            costs[row_id] = calls[request_hash].cost_usd
    return costs


def arms_of(
    answers: Mapping[ArmName, Sequence[Row]],
    unusable_cost: Mapping[ArmName, Mapping[str, float]],
    recipe: Recipe,
) -> dict[ArmName, list[ArmRow]]:
    """Every teacher, and the original question where it is an arm, over the same rows.

    Args:
        answers: by arm, the validated rows, the main teacher's among them.
        unusable_cost: by arm, what `cost_of_unusable` found.
    """
    arms = {}
    if recipe.grader.question_is_arm:
        arms[ORIGINAL] = _original_arm(answers)
    for name, rows in answers.items():
        costs = unusable_cost.get(name, {})
        arms[name] = [_priced(entry, costs) for entry in teacher_rows(rows)]
    return arms


def _priced(entry: ArmRow, unusable_cost: Mapping[str, float]) -> ArmRow:
    """The entry with its cost, also where its answer was of no use."""
    if entry.cost_usd is not None:
        return entry
    return entry.with_cost(unusable_cost.get(entry.row_id))


def _original_arm(answers: Mapping[ArmName, Sequence[Row]]) -> list[ArmRow]:
    """The original question, over the main teacher's rows."""
    # What it found is the same for every teacher, but a row that failed has not recorded it.
    retrieved = {}
    for rows in answers.values():
        for row in rows:
            if row.original_retrieved:
                retrieved[row.id] = row.original_retrieved
    questions = []
    for row in answers[TEACHER]:
        questions.append(row.with_retrieved(retrieved.get(row.id), row.answer_retrieved))
    return original_rows(questions)


def evaluate_teachers(
    arms: Arms,
    rows: Sequence[Row],
    config: Evaluate,
    recipe: Recipe,
    loads: Mapping[ArmName, Reason] | None = None,
) -> Evaluation:
    """Figures of all arms, and every rival against the main teacher on every metric with values.

    Args:
        loads: by arm, what else was asked while its latency was measured.
    """
    loads = loads or {}
    figures = {}
    for name, arm in arms.items():
        summary = summarise(arm, rows, config, recipe, loads.get(name))
        figures[name] = _with_cost_of_usable(summary, arm, config)
    return Evaluation(
        metrics=[*recipe.grader.metrics, ANSWERED],
        arms=figures,
        comparisons=_comparisons(arms, rows, config, recipe),
        examples=examples(arms, rows, recipe),
    )


def _with_cost_of_usable(
    figures: ArmFigures, entries: Sequence[ArmRow], config: Evaluate
) -> ArmFigures:
    """The figures with dollars per 1,000 usable texts: answers of no use were paid for as well."""
    costs = [entry.cost_usd for entry in entries if entry.cost_usd is not None]
    usable = sum(entry.text is not None for entry in entries)
    if not costs or not usable:
        return figures.with_cost(None, None)
    pairs = []
    for entry in entries:
        is_usable = entry.text is not None
        pairs.append((1000 * (entry.cost_usd or 0.0), float(is_usable)))
    interval = ratio_ci(pairs, config.bootstrap_resamples, config.seed)
    return figures.with_cost(1000 * sum(costs) / usable, interval)


def _comparisons(
    arms: Arms, rows: Sequence[Row], config: Evaluate, recipe: Recipe
) -> list[Comparison]:
    groups = groups_of(rows)
    scores = {}
    for name, arm in arms.items():
        metrics_and_answered = {**scores_of(arm, rows, recipe), ANSWERED.name: _answered(arm)}
        scores[name] = ArmScores(arm=name, scores=metrics_and_answered)
    teachers = [name for name in arms if name != ORIGINAL]
    rivals = [name for name in teachers if name != TEACHER]
    metrics = [metric for metric in recipe.grader.metrics if metric.compared and metric.interval]

    def against(b: ArmName, names: Sequence[ArmName], metric: Metric) -> list[Comparison]:
        """These arms against one, corrected for their number."""
        comparisons = [compared(scores[a], scores[b], metric, groups, config) for a in names]
        return holm_corrected([comparison for comparison in comparisons if comparison.n])

    comparisons = []
    for metric in metrics:
        comparisons += against(TEACHER, rivals, metric)
    for comparison in against(TEACHER, rivals, ANSWERED):
        # Teachers that answered the same questions differ in nothing there.
        if comparison.wins or comparison.losses:
            comparisons.append(comparison)
    # Stable, so that a rival's metrics stay in their order.
    comparisons.sort(key=lambda comparison: rivals.index(comparison.a))
    if ORIGINAL in scores:
        # Every teacher against the original question, on the first metric that there is: no gain
        # is worth no money.
        for metric in metrics:
            gains = against(ORIGINAL, teachers, metric)
            if gains:
                return comparisons + gains
    return comparisons


def _answered(arm: Sequence[ArmRow]) -> dict[str, float | None]:
    """1 for each row with a usable text, otherwise 0; None where the budget left the row out."""
    answered: dict[str, float | None] = {}
    for entry in arm:
        is_left_out = entry.reason == OVER_BUDGET
        answered[entry.row_id] = None if is_left_out else entry.text is not None
    return answered
