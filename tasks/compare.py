"""The compare stage: compares what the teachers made of the same questions."""

from collections.abc import Mapping

from qinglan.clients.roles import Services, site_ledger
from qinglan.config import CHANGEABLE
from qinglan.data.dataset.splits import with_groups
from qinglan.evaluation.evaluating import metrics_of
from qinglan.evaluation.purchase import advise
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.teacher_comparison import (
    MAIN,
    arms_of,
    cost_of_unusable,
    evaluate_teachers,
    teachers_of,
)
from qinglan.recipes import get_recipe, recipe_key
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, json_artifact, read_jsonl, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task


@stage_task("compare")
def compare_teachers(
    run: Run, services: Services, validated: Mapping[str, StageResult]
) -> StageResult:
    """The teachers' figures, paired differences, and which one to buy, by what validation found of
    each arm."""
    profile, recipe = run.profile, get_recipe(run.profile.recipe)

    def work(stage: Stage) -> Outcome:
        answers = {
            arm: list(read_jsonl(result.path("rows"), Row)) for arm, result in validated.items()
        }
        teachers = teachers_of(run, services)
        with site_ledger(profile) as ledger:
            unusable = {
                each.arm: cost_of_unusable(each.run.profile, answers[each.arm], ledger)
                for each in teachers
            }
        loads = {
            each.arm: reason("live_at_once", questions=each.run.profile.teacher.concurrency)
            for each in teachers
        }
        arms, rows = arms_of(answers, unusable, recipe), with_groups(answers[MAIN], profile.dataset)
        evaluation = evaluate_teachers(arms, rows, profile.evaluate, recipe, loads)
        artifacts = {
            f"arm_{arm}": write_jsonl(stage.directory / f"arm_{arm}.jsonl", arms[arm])
            for arm in arms
        }
        artifacts["evaluation"] = json_artifact(
            stage.directory / "evaluation.json", evaluation.model_dump(mode="json")
        )
        purchase = advise(profile, evaluation, arms)
        details = {"purchase": purchase.model_dump(mode="json") if purchase else None}
        return Outcome(len(rows), len(rows), {}, artifacts, metrics_of(evaluation), details)

    depends_on = {
        "rows_sha256": {arm: result.artifacts["rows"].sha256 for arm, result in validated.items()},
        "compare": profile.compare.model_dump(mode="json"),
        "near_duplicate_jaccard": profile.dataset.near_duplicate_jaccard,
        "teacher": profile.teacher.model,
        "judge": profile.judge.model,
        "evaluate": profile.evaluate.model_dump(mode="json", exclude=CHANGEABLE["evaluate"]),
        "recipe": recipe_key(profile.recipe),
    }
    return perform(run, "compare", depends_on, work)
