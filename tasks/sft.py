"""The sft stage: ms-swift trains an adapter on the selected rows and merges it, or trains all
parameters."""

import shutil
from functools import partial

from qinglan.errors import ConfigError
from qinglan.runs.artifacts import WEIGHTS, WEIGHTS_SHA256, Artifact, StageResult, sha256_of
from qinglan.runs.disk_space import require_disk_space
from qinglan.runs.launcher import Command
from qinglan.runs.run import Run
from qinglan.tasks.engine import Follower, LeftOut, Metrics, first_and_last, run_engine
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task
from qinglan.training.disk_space import ModelSize, sft_bytes
from qinglan.training.engines import swift


def require_enough_rows(run: Run, dataset: StageResult) -> None:
    """Before the first hour of training: ConfigError where RL's batch is larger than its rows."""
    rows, batch = dataset.artifacts["rl_train"].rows or 0, run.profile.rl.train_batch_size
    if rows < batch:
        problem = f"rl.train_batch_size ({batch}) is more than the {rows} RL training rows"
        raise ConfigError(f"{problem}; lower it, or add questions")


@stage_task("sft")
def train_sft(run: Run, dataset: StageResult, base: StageResult) -> StageResult:
    """SFT on the selected rewrites with ms-swift; an adapter is merged."""
    train_file, dev_file = dataset.artifacts["sft_train"], dataset.artifacts["sft_dev"]
    profile = run.profile.scheduled(train_file.rows or 0, dataset.artifacts["rl_train"].rows or 0)
    model: str = base.details["model"]

    def work(stage: Stage) -> Outcome:
        output = stage.directory / "checkpoints"
        require_disk_space("sft", profile, stage.directory, sft_bytes(profile, ModelSize.of(model)))

        def command() -> Command:
            resume_from = swift.newest_checkpoint(output)
            if resume_from:
                stage.say(f"continuing from {resume_from.name}")
                swift.rewind_log(output, resume_from)
            elif output.exists():
                shutil.rmtree(output)  # of an attempt that ended before its first checkpoint
            return swift.sft_command(
                profile,
                model=model,
                train_file=train_file.path,
                dev_file=dev_file.path,
                output_dir=output,
                resume_from=resume_from,
            )

        rows, limit, log = train_file.rows or 0, profile.sft.max_length, stage.directory / "sft.log"
        follow = Follower(stage, output / swift.LOGGING_FILE, _swift_line)
        left_out = LeftOut(
            stage, log, rows, partial(swift.left_out, rows), f"sft.max_length = {limit}"
        )
        checkpoint = partial(swift.newest_checkpoint, output)
        run_engine(
            stage,
            command,
            name="ms-swift SFT",
            log=log.name,
            watchers=[left_out, follow],
            progress=checkpoint,
        )
        best, merged, artifacts = (
            swift.best_checkpoint(output),
            stage.directory / "merged",
            dict[str, Artifact](),
        )
        shutil.rmtree(
            merged, ignore_errors=True
        )  # of a merge that was interrupted: ms-swift would leave it as it is
        if profile.sft.tuner_type == "full":
            stage.say(f"taking {best.name}, the best on the dev split")
            swift.copy_model(best, merged)
        else:
            stage.say(f"merging {best.name}, the best on the dev split, into the base model")
            merge = swift.merge_command(profile, adapter=best, output_dir=merged, model=model)
            run_engine(stage, merge, name="ms-swift merge", log="merge.log")
            artifacts["adapter"] = Artifact.of(best)
        artifacts["model"] = Artifact.of(merged)
        losses, kept = follow.curve("loss"), rows - left_out.count
        summary = {"rows": kept, "steps": follow.last_step, **first_and_last("loss", losses)}
        metrics = {k: v for k, v in summary.items() if isinstance(v, float)}
        details = {"summary": summary, "curve": losses, "eval_curve": follow.curve("eval_loss")}
        details[WEIGHTS_SHA256] = sha256_of(merged, WEIGHTS)
        return Outcome(rows, kept, left_out.dropped, artifacts, metrics, details)

    depends_on = {
        "train_sha256": train_file.sha256,
        "dev_sha256": dev_file.sha256,
        "model": base.artifacts["model"].sha256
        if "model" in base.artifacts
        else [model, profile.student.revision],
        "sft": profile.sft.model_dump(mode="json"),
        "student": profile.student.model_dump(mode="json", include={"model_type", "template"}),
    }
    return perform(run, "sft", depends_on, work, has_checkpoints=True)


def _swift_line(entry: Metrics) -> tuple[int, int, str, Metrics] | None:
    if (logged := swift.logged_step(entry)) is None:
        return None
    step, total = logged
    metrics = {k: v for k, v in entry.items() if isinstance(v, int | float)}
    text = f"steps, loss {entry['loss']:.3f}" if "loss" in entry else "steps"
    return step, total, text, metrics
