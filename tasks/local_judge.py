"""Before RL asks a judge of our own: how far it agrees with the judge, on dev rows."""

from functools import partial
from typing import cast

from prefect.logging import get_run_logger

from qinglan.clients.rag import RagClient
from qinglan.clients.roles import Services, open_clients
from qinglan.grading.by_retrieval import RetrievalGrader
from qinglan.recipes import get_recipe
from qinglan.recipes.keys import scoring_key
from qinglan.recipes.passage_judge import verdict_recipe
from qinglan.rows import Row
from qinglan.runs.artifacts import StageResult, read_jsonl, write_jsonl
from qinglan.runs.processes import in_event_loop
from qinglan.runs.run import Run
from qinglan.serving.local_judge import JudgeServer, ReleasedJudge, open_judge, serve_judge
from qinglan.tasks.batches import ask_again
from qinglan.tasks.stage import Outcome, Stage, perform
from qinglan.training.judge_agreement import (
    JudgeAgreement,
    JudgeComparison,
    JudgedPassage,
    agreement_finding,
    choose_rows,
    count_retryable,
    describe_agreement,
    measure_agreement,
    require_agreement,
    require_answers,
)


def compare_judges(
    run: Run, services: Services, dataset: StageResult, judge: ReleasedJudge
) -> StageResult:
    """Ask both about what dev questions find; StageError where they agree too little, or too many
    calls failed."""
    profile, settings = run.profile, judge.settings

    def work(stage: Stage) -> Outcome:
        rows = choose_rows(read_jsonl(dataset.path("rows"), Row), settings.agreement_rows)
        with serve_judge(profile, judge, stage.directory, stage.say) as served:
            assert served is not None
            pairs = _compare(stage, services, served, rows)
        artifacts = {"pairs": write_jsonl(stage.directory / "pairs.jsonl", pairs)}
        require_answers(pairs, profile.evaluate.max_failed_share)
        found = measure_agreement(pairs, profile.reward.min_relevance)
        stage.say(f"{judge.name} and {profile.judge.model}: {describe_agreement(found)}")
        details = {
            "findings": [agreement_finding(found).model_dump(mode="json")],
            "agreement": found.model_dump(mode="json"),
        }
        metrics = {name: float(value) for name, value in found if value is not None}
        return Outcome(
            len(rows), len(rows), {}, artifacts, metrics, details, count_retryable(pairs)
        )

    depends_on = {
        "rows_sha256": dataset.artifacts["rows"].sha256,
        "local_judge": judge.identity,
        "agreement_rows": settings.agreement_rows,
        "min_relevance": profile.reward.min_relevance,
        **scoring_key(profile),
        "knowledge_base": run.knowledge_base_key,
    }
    result = perform(run, "local_judge", depends_on, work)
    require_agreement(
        JudgeAgreement.model_validate(result.details["agreement"]),
        settings,
        get_run_logger().warning,
    )
    return result


@in_event_loop
async def _compare(
    stage: Stage, services: Services, served: JudgeServer, rows: list[Row]
) -> list[JudgedPassage]:
    run, profile, traced = stage.run, stage.run.profile, stage.traced
    recipe = get_recipe(profile.recipe)
    # No other grader has a local judge.
    grader = cast(RetrievalGrader, recipe.grader)
    rag = RagClient(
        profile.rag, services().rag_url, profile.tenant.id, with_passage=True, traced=traced
    )
    try:
        async with (
            open_clients(run, services, ["judge"], traced) as clients,
            open_judge(run, served) as local,
        ):
            verdicts = verdict_recipe(served.judge.released.recipe)
            compare = partial(
                JudgeComparison(
                    profile, recipe, grader, verdicts, local, clients.judge, rag
                ).compare,
                rows,
            )
            return await ask_again(
                "compare judges", compare, clients, local, rag, retries=profile.evaluate.retries
            )
    finally:
        await rag.close()
