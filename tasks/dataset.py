"""The dataset stage: splits the selected rows and writes the training files."""

from pathlib import Path

from prefect.logging import get_run_logger

from qinglan.data.dataset import build
from qinglan.data.sources.files import digest_of
from qinglan.data.versions import pinned_splits
from qinglan.evaluation.red_team import cases_of, row_of
from qinglan.recipes import recipe_key
from qinglan.recipes.scoring.keys import scoring_digest
from qinglan.runs.artifacts import StageResult, hash_of
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task

CODE = (
    __name__, "recipe.training_rows", "qinglan.data.dataset", "qinglan.data.sources", "qinglan.data.workbook",
    "qinglan.noise", "qinglan.recipes.scoring.service", "qinglan.rows",
)  # fmt: skip


@stage_task("dataset")
def build_dataset(run: Run, selected: StageResult) -> StageResult:
    """Split by near-duplicate group and write the training files; what was a test row last night is
    one tonight."""
    profile = run.profile
    red_team = [row_of(case, profile.tenant) for case in cases_of(profile)]
    depends_on = {
        "rows_sha256": selected.artifacts["rows"].sha256,
        "dataset": profile.dataset.model_dump(mode="json"),
        "red_team": hash_of([[row.query, row.profile, row.history] for row in red_team]),
        "max_query_chars": profile.data.max_query_chars,
        "evaluation_sha256": [
            digest_of(Path(workbook)) for workbook in profile.dataset.decontaminate_against
        ],
        "tenant": profile.tenant.model_dump(mode="json"),
        "recipe": recipe_key(profile.recipe),
        "scored_with": scoring_digest(run),
    }
    inputs = hash_of(depends_on)
    pins, splits = pinned_splits(profile, inputs)

    def work(stage: Stage) -> Outcome:
        built = build(selected.path("rows"), stage.directory, profile, splits, red_team)
        outcome = Outcome(
            built.before.ok,
            built.after.ok,
            built.after.dropped_since(built.before),
            built.artifacts,
        )
        outcome.metrics = {f"rows_{split}": float(n) for split, n in built.splits.items()}
        outcome.metrics |= {
            f"{name}_rows": float(a.rows or 0)
            for name, a in built.artifacts.items()
            if name != "rows"
        }
        stage.say(", ".join(f"{name} {value:.0f}" for name, value in outcome.metrics.items()))
        outcome.metrics |= {
            f"augmented_{what}/{kind}": float(n)
            for kind, found in built.augmented.items()
            for what, n in found.items()
        }
        for warning in built.warnings:
            get_run_logger().warning("dataset: %s", warning)
        outcome.details = {
            "scored_with": scoring_digest(run),
            "inputs": inputs,
            "pins": pins,
            "splits": built.splits,
        }
        outcome.details |= {"warnings": list(built.warnings), "augmented": built.augmented}
        return outcome

    return perform(run, "dataset", depends_on | {"pins": pins}, work, code=CODE)
