"""The compare stage: compares what the teachers made of the same questions."""

from collections.abc import Mapping, Sequence

from qinglan.clients.roles import Services, site_ledger
from qinglan.config import CHANGEABLE, Profile
from qinglan.data.dataset.splits import with_groups
from qinglan.evaluation.arms import TEACHER
from qinglan.evaluation.evaluating import metrics_of
from qinglan.evaluation.purchase import advise
from qinglan.evaluation.reasons import reason
from qinglan.evaluation.teacher_comparison import (
    ComparedTeacher,
    arms_of,
    cost_of_unusable,
    evaluate_teachers,
    teachers_of,
)
from qinglan.recipes import get_recipe, recipe_key
from qinglan.rows import ArmName, Row
from qinglan.runs.artifacts import StageResult, json_artifact, read_jsonl, write_jsonl
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task


@stage_task("compare")
def compare_teachers(
    run: Run, services: Services, validated: Mapping[ArmName, StageResult]
) -> StageResult:
    """The teachers' figures, their paired differences, and which one to buy.

    Args:
        validated: by arm, what validation found of the teacher's answers.
    """
    profile = run.profile
    recipe = get_recipe(profile.recipe)

    def work(stage: Stage) -> Outcome:
        answers = {
            arm: list(read_jsonl(result.path("rows"), Row)) for arm, result in validated.items()
        }
        teachers = teachers_of(run, services)
        arms = arms_of(answers, _costs_of_unusable(profile, teachers, answers), recipe)
        rows = with_groups(answers[TEACHER], profile.dataset)
        # What else each teacher had to do while its latency was measured.
        loads = {
            teacher.arm: reason("live_at_once", questions=teacher.run.profile.teacher.concurrency)
            for teacher in teachers
        }
        evaluation = evaluate_teachers(arms, rows, profile.evaluate, recipe, loads)
        artifacts = {
            f"arm_{arm}": write_jsonl(stage.directory / f"arm_{arm}.jsonl", entries)
            for arm, entries in arms.items()
        }
        artifacts["evaluation"] = json_artifact(
            stage.directory / "evaluation.json", evaluation.model_dump(mode="json")
        )
        purchase = advise(profile, evaluation, arms)
        return Outcome(
            rows_in=len(rows),
            rows_out=len(rows),
            artifacts=artifacts,
            metrics=metrics_of(evaluation),
            details={"purchase": purchase.model_dump(mode="json") if purchase else None},
        )

    # Of the services that answered, the models are enough: the rows have what they answered.
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


def _costs_of_unusable(
    profile: Profile,
    teachers: Sequence[ComparedTeacher],
    answers: Mapping[ArmName, Sequence[Row]],
) -> dict[ArmName, dict[str, float]]:
    """Dollars for answers that were of no use, by arm and row id."""
    with site_ledger(profile) as ledger:
        return {
            teacher.arm: cost_of_unusable(teacher.run.profile, answers[teacher.arm], ledger)
            for teacher in teachers
        }
