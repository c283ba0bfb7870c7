"""The evaluation of arms: figures, comparisons, slices, examples and the recipe's findings."""

from collections.abc import Mapping, Sequence

from qinglan.config import Evaluate, Profile
from qinglan.data.dataset.splits import with_groups
from qinglan.evaluation import models
from qinglan.evaluation.arms import baseline_arms
from qinglan.evaluation.figures import compare_arms, examples, shared_between, slices_of, summarise
from qinglan.evaluation.reasons import Reason
from qinglan.evaluation.red_team import RedTeamCounts
from qinglan.recipes import Finding, Recipe, get_recipe
from qinglan.rows import ArmName, ArmRow, Row


def evaluate(
    arms: Mapping[ArmName, Sequence[ArmRow]],
    rows: Sequence[Row],
    config: Evaluate,
    recipe: Recipe,
    train: Sequence[Row] = (),
    *,
    loads: Mapping[ArmName, Reason] | None = None,
    probed: Mapping[ArmName, Sequence[ArmRow]] | None = None,
) -> models.Evaluation:
    """The evaluation of finished arms.

    Args:
        train: the training rows, for what `rows` share with them.
        loads: by arm, what else its model had to do while its latency was measured.
        probed: by arm, what it answered to the recipe's probes.
    """
    loads = loads or {}
    probed = probed or {}
    figures = {}
    for name, arm in arms.items():
        figures[name] = summarise(arm, rows, config, recipe, loads.get(name))
    findings: list[Finding] = []
    # Without an arm, a finding would be a table without a column.
    if arms:
        with_probes = {name: [*arm, *probed.get(name, ())] for name, arm in arms.items()}
        findings = recipe.findings(with_probes, rows)
    return models.Evaluation(
        metrics=list(recipe.grader.metrics),
        arms=figures,
        comparisons=compare_arms(arms, rows, config, recipe),
        slices=slices_of(arms, rows, config, recipe),
        examples=examples(arms, rows, recipe),
        shared=shared_between(train, rows, recipe) if train else [],
        findings=findings,
    )


def evaluate_baselines(rows: Sequence[Row], profile: Profile) -> models.Evaluation:
    """The evaluation of the arms that need no model of ours, such as the teacher.

    It covers every row that was a question, as validation left it.
    """
    recipe = get_recipe(profile.recipe)
    questions = with_groups([row for row in rows if row.was_question], profile.dataset)
    arms = baseline_arms(questions, recipe.grader, profile)
    return evaluate(arms, questions, profile.evaluate, recipe)


def metrics_of(evaluation: models.Evaluation) -> dict[str, float]:
    """Figures of all arms under names such as `rl/top1`."""
    figures: dict[str, float] = {}
    for name, arm in evaluation.arms.items():
        for key, value in arm.figures.items():
            figures[f"{name}/{key}"] = value
    for name, results in evaluation.red_team.items():
        counts = RedTeamCounts.of(results)
        figures[f"{name}/red_team_failed"] = counts.failed
        figures[f"{name}/red_team_unchecked"] = counts.unchecked
    return figures
