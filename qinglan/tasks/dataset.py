"""The dataset stage: splits the selected rows and writes the training files."""

from pathlib import Path

from prefect.logging import get_run_logger

from qinglan.data.dataset import BuiltDataset, build
from qinglan.data.sources.files import digest_of
from qinglan.data.versions import pinned_splits
from qinglan.evaluation.red_team import cases_of, row_of
from qinglan.recipes import recipe_key
from qinglan.recipes.keys import scoring_digest
from qinglan.runs.artifacts import StageResult, hash_of
from qinglan.runs.run import Run
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task


@stage_task("dataset")
def build_dataset(run: Run, selected: StageResult) -> StageResult:
    """Split by near-duplicate group and write the training files.

    What was a test row last night is one tonight.
    """
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
        for warning in built.warnings:
            get_run_logger().warning("dataset: %s", warning)
        counts = _row_counts(built)
        stage.say(", ".join(f"{name} {count:.0f}" for name, count in counts.items()))
        return Outcome(
            rows_in=built.before.ok,
            rows_out=built.after.ok,
            dropped=built.after.dropped_since(built.before),
            artifacts=built.artifacts,
            metrics=counts | _augmented_counts(built),
            details={
                "scored_with": scoring_digest(run),
                "inputs": inputs,
                "pins": pins,
                "splits": built.splits,
                "warnings": list(built.warnings),
                "augmented": built.augmented,
            },
        )

    return perform(run, "dataset", depends_on | {"pins": pins}, work)


def _row_counts(built: BuiltDataset) -> dict[str, float]:
    """Rows by split, and rows of each training file."""
    counts = {f"rows_{split}": float(count) for split, count in built.splits.items()}
    for name, artifact in built.artifacts.items():
        if name != "rows":
            counts[f"{name}_rows"] = float(artifact.rows or 0)
    return counts


def _augmented_counts(built: BuiltDataset) -> dict[str, float]:
    """Noisy copies by file and kind of noise."""
    counts: dict[str, float] = {}
    for kind, copies in built.augmented.items():
        for file, count in copies.items():
            counts[f"augmented_{file}/{kind}"] = float(count)
    return counts
