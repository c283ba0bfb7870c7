"""The RL stage: verl from the merged SFT model; the best checkpoint on the dev split is
exported."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pydantic import BaseModel

from qinglan.clients.roles import Services, key_salt
from qinglan.config import CHANGEABLE
from qinglan.errors import ConfigError, StageError
from qinglan.recipes import get_recipe
from qinglan.recipes.keys import scoring_key
from qinglan.rows import Row
from qinglan.runs.artifacts import WEIGHTS, WEIGHTS_SHA256, Artifact, StageResult, sha256_of
from qinglan.runs.disk_space import require_disk_space
from qinglan.runs.launcher import Command
from qinglan.runs.run import Run
from qinglan.serving.local_judge import JudgeServer, released_judge, serve_judge
from qinglan.tasks.engine import (
    AlarmFollower,
    Follower,
    LeftOut,
    Metrics,
    first_and_last,
    run_engine,
)
from qinglan.tasks.local_judge import compare_judges
from qinglan.tasks.stage import Outcome, Stage, perform, stage_task
from qinglan.training.alarms import part_mean
from qinglan.training.disk_space import ModelSize, rl_bytes
from qinglan.training.engines import progress, verl
from qinglan.training.engines.export import ADAPTER
from qinglan.training.engines.progress import (
    DEV_HIGH,
    DEV_LOW,
    DEV_VALUE,
    TrainerSettings,
    read_stop,
)
from qinglan.training.reward_service.samples import SampleWatch
from qinglan.training.reward_service.settings import RewardService


@stage_task("rl")
def train_rl(
    run: Run, services: Services, dataset: StageResult, base: StageResult, sft: StageResult
) -> StageResult:
    """RL with verl from the merged SFT model, rewarded as the recipe says."""
    train_file, dev_file = dataset.artifacts["rl_train"], dataset.artifacts["rl_dev"]
    profile = run.profile.scheduled(dataset.artifacts["sft_train"].rows or 0, train_file.rows or 0)
    start = sft if profile.rl.start_from == "sft" else base
    if "model" not in start.artifacts:
        raise ConfigError(
            "rl.start_from = base needs student.base_model to be a local folder, not a hub id"
        )
    model, judge = start.path("model"), released_judge(profile)
    checked = compare_judges(run, services, dataset, judge) if judge else None

    def work(stage: Stage) -> Outcome:
        output = stage.directory / "checkpoints"
        require_disk_space("rl", profile, stage.directory, rl_bytes(profile, ModelSize.of(model)))
        samples_log = stage.directory / "samples.jsonl"

        def make_command(served: JudgeServer | None) -> Command:
            """Written anew for each attempt, but not under a job that is still running."""
            reward_config = _write(
                stage, "reward.json", _reward_service(run, services, samples_log, served)
            )
            trainer_settings = _write(
                stage, "trainer.json", _trainer_settings(stage, dev_file.path)
            )
            return verl.ppo_command(
                profile,
                model=model,
                train_file=train_file.path,
                dev_file=dev_file.path,
                output_dir=output,
                reward_config=reward_config,
                trainer_settings=trainer_settings,
                metrics_path=progress.next_metrics_path(stage.directory),
                run_name=run.id,
            )

        follow = Follower(
            stage, stage.directory / "metrics.*.jsonl", partial(_verl_line, profile.rl.total_steps)
        )
        watch = SampleWatch(samples_log, [row.id for row in _rows_of(dev_file.path)], stage.say)
        alarms = AlarmFollower(stage)
        rows, log, limit = (
            train_file.rows or 0,
            stage.directory / "rl.log",
            profile.rl.max_prompt_length,
        )
        setting, batch = f"rl.max_prompt_length = {limit}", profile.rl.train_batch_size
        left_out = LeftOut(stage, log, rows, verl.left_out, setting, batch)
        watchers: list[Callable[[], None]] = [left_out, follow, watch, alarms]

        def train(served: JudgeServer | None) -> None:
            stage.say("starting Ray and verl's workers, about a minute on a small machine")
            checkpoint = partial(progress.checkpoints, output)
            command = partial(make_command, served)
            called = [*watchers, *([served.check] if served else [])]
            try:
                run_engine(
                    stage, command, name="verl", log=log.name, watchers=called, progress=checkpoint
                )
            except StageError as error:
                if (stopped := read_stop(stage.directory)) and stopped[1] and watch.last_invalid:
                    raise StageError(f"{error}; the last one: {watch.last_invalid}") from None
                raise

        ended = read_stop(stage.directory)
        if (
            ended is None or ended[1]
        ):  # else an earlier attempt ended training on purpose, and failed only later
            with serve_judge(profile, judge, stage.directory / "judge", stage.say) as served:
                train(served)
        for look in watchers:
            look()
        follow.flush()
        if stopped := read_stop(stage.directory):
            stage.say(f"training ended early {stopped[0]}")
        chosen = _choose(stage, output)
        artifacts = {"model": start.artifacts["model"]}
        if chosen.checkpoint:
            exported, adapter = stage.directory / "model", stage.directory / ADAPTER
            command = verl.export_command(
                profile, checkpoint=chosen.checkpoint, base_model=model, output_dir=exported
            )
            run_engine(stage, command, name="verl export", log="export.log")
            artifacts = {"model": Artifact.of(exported)}
            if adapter.is_dir():
                artifacts["adapter"] = Artifact.of(adapter)
        outcome = _rl_outcome(stage, artifacts, left_out, watch, alarms, chosen)
        outcome.details[WEIGHTS_SHA256] = sha256_of(artifacts["model"].path, WEIGHTS)
        outcome.details["findings"] = checked.details["findings"] if checked else []
        return outcome

    depends_on = {
        "train_sha256": train_file.sha256,
        "dev_sha256": dev_file.sha256,
        "model_sha256": start.artifacts["model"].sha256,
        "rl": profile.rl.model_dump(mode="json", exclude=set(CHANGEABLE["rl"])),
        "reward": profile.reward.model_dump(mode="json", exclude=set(CHANGEABLE["reward"])),
        **scoring_key(profile),
        "knowledge_base_sha256": run.knowledge_base_sha256,
        **({"local_judge": judge.identity} if judge else {}),
    }
    return perform(run, "rl", depends_on, work, has_checkpoints=True)


def _write(stage: Stage, name: str, content: BaseModel) -> Path:
    path = stage.directory / name
    path.write_text(content.model_dump_json(indent=1), encoding="utf-8")
    return path


def _reward_service(
    run: Run, services: Services, samples_log: Path, served: JudgeServer | None = None
) -> RewardService:
    profile = run.profile
    recipe, addresses = get_recipe(profile.recipe), services()
    asked: dict[str, Any] = {}
    if "rag" in recipe.grader.services:
        asked |= {
            "rag": profile.rag,
            "rag_url": addresses.rag_url,
            "retrieval_scope": run.retrieval_scope,
        }
    if "judge" in recipe.grader.services:
        asked |= {
            "judge": profile.judge,
            "judge_url": addresses.judge_url,
            "judge_price": profile.prices[profile.judge.model],
            "judge_key_salt": key_salt(profile, "judge"),
        }
    if served:
        asked |= {
            "judge": served.endpoint,
            "judge_url": served.url,
            "judge_price": served.judge.settings.price,
            "judge_key_salt": served.judge.key_salt,
            "judge_recipe": served.judge.released.recipe,
        }
    return RewardService(
        **asked,
        recipe=profile.recipe,
        parts=recipe.grader.score_parts,
        reward=profile.reward,
        tenant=profile.tenant,
        ledger=profile.ledger,
        state=profile.paths.state,
        budget=profile.budget,
        run_id=run.id,
        samples_log=samples_log,
    )


def _trainer_settings(stage: Stage, dev_file: Path) -> TrainerSettings:
    profile = stage.run.profile
    rl, reward, recipe = profile.rl, profile.reward, get_recipe(profile.recipe)
    dev_rows = _rows_of(dev_file)
    dev_metric = recipe.grader.dev_metric(reward, dev_rows)
    return TrainerSettings(
        folder=stage.directory,
        max_invalid_share=reward.max_invalid_share,
        use_labels=reward.use_labels,
        dev_metric=dev_metric,
        dev_rows=frozenset(row.id for row in dev_rows if recipe.grader.can_have(dev_metric, row)),
        primary_metric=recipe.grader.primary_metric,
        patience=rl.patience,
        keep_checkpoints=rl.keep_checkpoints,
        alarms=rl.alarms,
    )


class Chosen(NamedTuple):
    """The model that goes on, and why."""

    step: int
    checkpoint: Path | None
    """None for the model that training started from, the policy at step 0."""
    dev: tuple[float, float, float] | None
    """Its value on the dev split with the 95% interval; None where it was not validated."""


def _choose(stage: Stage, checkpoints: Path) -> Chosen:
    """By the dev split; the model from before stays where no step of training did better."""
    is_last = stage.run.profile.rl.choose == "last"
    last, best = progress.last_checkpoint, progress.best_checkpoint
    step, checkpoint = last(checkpoints) if is_last else best(checkpoints, stage.directory)
    measured = progress.read_metrics(stage.directory).get(step, {})
    dev = (
        (measured[DEV_VALUE], measured[DEV_LOW], measured[DEV_HIGH])
        if DEV_VALUE in measured
        else None
    )
    value = f", dev {dev[0]:.3f} [{dev[1]:.3f}, {dev[2]:.3f}]" if dev else ""
    found = f"exporting step {step}"
    if checkpoint is None:
        found = "no step of training was better on the dev split than the model it started from, which goes on"
    stage.say(f"{found}{value}")
    return Chosen(step, checkpoint, dev)


def _rows_of(rl_file: Path) -> list[Row]:
    """The rows whose questions an RL file asks; StageError where an earlier version wrote it."""
    infos = pq.read_table(rl_file, columns=["extra_info"])["extra_info"].to_pylist()
    if any("row" not in info for info in infos):
        raise StageError(
            f"rl: {rl_file} was written by an earlier version and lacks the rows that samples are "
            "graded by; run `qinglan run refresh` to write it anew, which pays for no known answer"
        )
    return [Row.model_validate_json(info["row"]) for info in infos]


def _rl_outcome(
    stage: Stage,
    artifacts: dict[str, Artifact],
    left_out: LeftOut,
    watch: SampleWatch,
    alarms: AlarmFollower,
    chosen: Chosen,
) -> Outcome:
    steps = progress.read_metrics(stage.directory)

    def curve(key: str) -> list[tuple[int, float]]:
        return [(step, metrics[key]) for step, metrics in steps.items() if key in metrics]

    recipe, has_local_judge = (
        get_recipe(stage.run.profile.recipe),
        bool(stage.run.profile.judge.local),
    )
    reported = {"reward": verl.STEP_METRICS["reward"]} | {
        name: part_mean(name) for name in recipe.grader.score_parts
    }
    curves = {label: curve(key) for label, key in (reported | verl.STEP_METRICS).items()}
    summary: dict[str, Any] = {"steps": max(steps, default=0), "chosen_step": chosen.step}
    for label, points in curves.items():
        summary |= first_and_last(label, points)
    if chosen.dev:
        summary |= dict(zip(("dev_value", "dev_ci_low", "dev_ci_high"), chosen.dev, strict=True))
    summary |= watch.summary
    metrics = {k: float(v) for k, v in summary.items() if isinstance(v, int | float)}
    details = {
        "summary": summary,
        "curve": curves["reward"],
        "curves": {
            label: points for label, points in curves.items() if points and label != "reward"
        },
        "dev_curve": curve(DEV_VALUE),
        "api": {
            "judge.local" if role == "judge" and has_local_judge else role: n
            for role, n in watch.calls.items()
        },
        "alarms": [alarm.model_dump() for alarm in alarms.alarms],
    }
    return Outcome(
        left_out.rows, left_out.rows - left_out.count, left_out.dropped, artifacts, metrics, details
    )


def _verl_line(total: int, entry: Metrics) -> tuple[int, int, str, Metrics]:
    metrics = entry["data"]
    reward = metrics.get(verl.STEP_METRICS["reward"])
    return (
        entry["step"],
        total,
        "steps" if reward is None else f"steps, reward {reward:+.3f}",
        metrics,
    )
