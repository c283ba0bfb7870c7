"""The validate stage: grades what the teacher answered."""

import asyncio
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from qinglan.clients.roles import Services, endpoint_of
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.grading import grading_of
from qinglan.recipes.scoring.identity import scoring_identity
from qinglan.runs.artifacts import StageResult, sha256_of
from qinglan.runs.run import Run
from qinglan.tasks.batches import ask_services
from qinglan.tasks.stage import Outcome, Stage, perform


@task(name="validate", task_run_name="{name}", cache_policy=NO_CACHE)
def validate_rows(
    run: Run, services: Services, distilled: StageResult, knowledge_base: Path | None, name: str = "validate"
) -> StageResult:
    """Grade what the teacher answered, as the recipe's kind does: by RAG, rules and judge."""
    profile = run.profile
    grading, judges = grading_of(get_recipe(profile.recipe)), profile.validation.judge_baseline
    roles = grading.validation_roles(profile)

    def work(stage: Stage) -> Outcome:
        findings = grading.findings()
        outcome = asyncio.run(
            ask_services(
                stage,
                services,
                distilled,
                kind="validate",
                settings=profile.validation,
                roles=roles,
                concurrency=max(
                    (profile.rag if role == "rag" else endpoint_of(profile, role)).concurrency for role in roles
                ),
                make_work=lambda clients: grading.validator(clients, profile.tenant, judge="judge" in roles),
                watch=findings.add,
            )
        )
        findings.check()
        outcome.metrics = findings.metrics()
        outcome.details["histograms"] = findings.histograms()
        stage.say(", ".join(f"{name} {value:.3f}" for name, value in findings.shown().items()))
        return outcome

    depends_on: dict[str, Any] = {
        "rows_sha256": distilled.artifacts["rows"].sha256,
        **scoring_identity(profile),
        "judge_baseline": judges,
    }
    if "rag" in roles:  # a live service's knowledge base changes unseen, so its answers are reused within one run only
        depends_on["knowledge_base"] = sha256_of(knowledge_base) if knowledge_base else run.id
    return perform(run, name, depends_on, work)
