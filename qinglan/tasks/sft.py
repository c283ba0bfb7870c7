"""The sft stage: ms-swift trains an adapter on the selected rows and merges it, or trains all
parameters."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.runs.artifacts import WEIGHTS, WEIGHTS_SHA256, Artifact, StageResult, sha256_of
from qinglan.runs.disk_space import require_disk_space
from qinglan.runs.launcher import Command, Metrics
from qinglan.runs.run import Run
from qinglan.tasks.engine import run_engine
from qinglan.tasks.followers import Follower, LeftOut, first_and_last
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task
from qinglan.training.disk_space import ModelSize, sft_bytes
from qinglan.training.engines import swift


def require_enough_rows(run: Run, dataset: StageResult) -> None:
    """Check that RL's rows fill a batch, before the first hour of training.

    Raises:
        ConfigError: `rl.train_batch_size` is larger than the number of RL training rows.
    """
    rows = dataset.artifacts["rl_train"].rows or 0
    batch = run.profile.rl.train_batch_size
    if rows < batch:
        raise ConfigError(
            f"rl.train_batch_size ({batch}) is more than the {rows} RL training rows; "
            "lower it, or add questions"
        )


@stage_task("sft")
def train_sft(run: Run, dataset: StageResult, base: StageResult) -> StageResult:
    """SFT on the selected rewrites with ms-swift; an adapter is merged."""
    train_file = dataset.artifacts["sft_train"]
    dev_file = dataset.artifacts["sft_dev"]
    rows = train_file.rows or 0
    # Numbers of steps may depend on the number of rows.
    profile = run.profile.scheduled(rows, dataset.artifacts["rl_train"].rows or 0)
    model: str = base.details["model"]

    def work(stage: Stage) -> Outcome:
        require_disk_space("sft", profile, stage.directory, sft_bytes(profile, ModelSize.of(model)))
        checkpoints = _checkpoints(stage)

        def next_command() -> Command:
            resume_from = _prepare_resuming(stage)
            return swift.sft_command(
                profile,
                model=model,
                train_file=train_file.path,
                dev_file=dev_file.path,
                output_dir=checkpoints,
                resume_from=resume_from,
            )

        log = stage.directory / "sft.log"
        limit = f"sft.max_length = {profile.sft.max_length}"
        left_out = LeftOut(stage, log, rows, partial(swift.left_out, rows), limit)
        follower = Follower(stage, checkpoints / swift.LOGGING_FILE, _swift_line)
        run_engine(
            stage,
            next_command,
            name="ms-swift SFT",
            log=log.name,
            watchers=[left_out, follower],
            progress=partial(swift.newest_checkpoint, checkpoints),
        )
        artifacts = _export_best(stage, profile, model)
        return _outcome(artifacts, left_out, follower)

    depends_on = {
        "train_sha256": train_file.sha256,
        "dev_sha256": dev_file.sha256,
        "model": _model_key(base, profile),
        "sft": profile.sft.model_dump(mode="json"),
        "student": profile.student.model_dump(mode="json", include={"model_type", "template"}),
    }
    return perform(run, "sft", depends_on, work, has_checkpoints=True)


def _model_key(base: StageResult, profile: Profile) -> Any:
    """The model that training starts from: its digest or, of one on a hub, name and revision."""
    if "model" in base.artifacts:
        return base.artifacts["model"].sha256
    return [base.details["model"], profile.student.revision]


def _checkpoints(stage: Stage) -> Path:
    return stage.directory / "checkpoints"


def _prepare_resuming(stage: Stage) -> Path | None:
    """The checkpoint that the next attempt goes on from; None where it starts anew."""
    checkpoints = _checkpoints(stage)
    resume_from = swift.newest_checkpoint(checkpoints)
    if resume_from:
        stage.say(f"continuing from {resume_from.name}")
        swift.rewind_log(checkpoints, resume_from)
    elif checkpoints.exists():
        # An attempt left it that ended before its first checkpoint.
        shutil.rmtree(checkpoints)
    return resume_from


def _export_best(stage: Stage, profile: Profile, model: str) -> dict[str, Artifact]:
    """The best checkpoint as a model folder of its own, and the adapter where it was merged."""
    best = swift.best_checkpoint(_checkpoints(stage))
    merged = stage.directory / "merged"
    # ms-swift would leave the folder of an interrupted merge as it is.
    shutil.rmtree(merged, ignore_errors=True)
    if profile.sft.tuner_type == "full":
        stage.say(f"taking {best.name}, the best on the dev split")
        swift.copy_model(best, merged)
        return {"model": Artifact.of(merged)}
    stage.say(f"merging {best.name}, the best on the dev split, into the base model")
    merge = swift.merge_command(profile, adapter=best, output_dir=merged, model=model)
    run_engine(stage, merge, name="ms-swift merge", log="merge.log")
    return {"adapter": Artifact.of(best), "model": Artifact.of(merged)}


def _outcome(artifacts: dict[str, Artifact], left_out: LeftOut, follower: Follower) -> Outcome:
    losses = follower.curve("loss")
    trained_rows = left_out.rows - left_out.count
    summary = {
        "rows": trained_rows,
        "steps": follower.last_step,
        **first_and_last("loss", losses),
    }
    return Outcome(
        rows_in=left_out.rows,
        rows_out=trained_rows,
        dropped=left_out.dropped,
        artifacts=artifacts,
        metrics={name: value for name, value in summary.items() if isinstance(value, float)},
        details={
            "summary": summary,
            "curve": losses,
            "eval_curve": follower.curve("eval_loss"),
            WEIGHTS_SHA256: sha256_of(artifacts["model"].path, WEIGHTS),
        },
    )


def _swift_line(entry: Metrics) -> tuple[int, int, str, Metrics] | None:
    """A line of ms-swift's log as a logged step; None for the summary at the end."""
    step_and_total = swift.logged_step(entry)
    if step_and_total is None:
        return None
    step, total = step_and_total
    metrics = {name: value for name, value in entry.items() if isinstance(value, int | float)}
    text = "steps"
    if "loss" in entry:
        text = f"steps, loss {entry['loss']:.3f}"
    return step, total, text, metrics
