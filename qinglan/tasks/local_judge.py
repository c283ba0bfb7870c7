"""The local_judge stage: how far a judge of our own agrees with the judge, before RL asks it."""

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
    """Ask both judges about the passages that dev questions find.

    Raises:
        StageError: they agree too little, or too many calls failed.
    """
    profile = run.profile
    settings = judge.settings

    def work(stage: Stage) -> Outcome:
        rows = choose_rows(read_jsonl(dataset.path("rows"), Row), settings.agreement_rows)
        with serve_judge(profile, judge, stage.directory, stage.say) as served:
            assert served is not None
            passages = _compare(stage, services, served, rows)
        artifacts = {"pairs": write_jsonl(stage.directory / "pairs.jsonl", passages)}
        require_answers(passages, profile.evaluate.max_failed_share)
        agreement = measure_agreement(passages, profile.reward.min_relevance)
        stage.say(f"{judge.name} and {profile.judge.model}: {describe_agreement(agreement)}")
        return Outcome(
            rows_in=len(rows),
            rows_out=len(rows),
            artifacts=artifacts,
            metrics={name: float(value) for name, value in agreement if value is not None},
            details={
                "findings": [agreement_finding(agreement).model_dump(mode="json")],
                "agreement": agreement.model_dump(mode="json"),
            },
            try_again=count_retryable(passages),
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
    # Also for a result that is reused: how much they must agree is no part of the key.
    agreement = JudgeAgreement.model_validate(result.details["agreement"])
    require_agreement(agreement, settings, get_run_logger().warning)
    return result


@in_event_loop
async def _compare(
    stage: Stage, services: Services, served: JudgeServer, rows: list[Row]
) -> list[JudgedPassage]:
    """Ask both judges about what the rows' questions and rewrites find."""
    run = stage.run
    profile = run.profile
    recipe = get_recipe(profile.recipe)
    # No other grader has a local judge.
    grader = cast(RetrievalGrader, recipe.grader)
    rag = RagClient(
        profile.rag,
        services().rag_url,
        profile.tenant.id,
        with_passage=True,
        traced=stage.traced,
    )
    try:
        async with (
            open_clients(run, services, ["judge"], stage.traced) as clients,
            open_judge(run, served) as local,
        ):
            verdicts = verdict_recipe(served.judge.released.recipe)
            comparison = JudgeComparison(
                profile, recipe, grader, verdicts, local, clients.judge, rag
            )
            compare = partial(comparison.compare, rows)
            retries = profile.evaluate.retries
            return await ask_again("compare judges", compare, clients, local, rag, retries=retries)
    finally:
        await rag.close()
