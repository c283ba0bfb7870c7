"""The RL stage: verl from the merged SFT model; the best checkpoint on the dev split is
exported."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
from pydantic import BaseModel

from qinglan.clients.roles import Services, key_salt
from qinglan.config import CHANGEABLE, Profile
from qinglan.errors import ConfigError, StageError
from qinglan.recipes import get_recipe
from qinglan.recipes.keys import scoring_key
from qinglan.rows import Row
from qinglan.runs.artifacts import WEIGHTS, WEIGHTS_SHA256, Artifact, StageResult, sha256_of
from qinglan.runs.disk_space import require_disk_space
from qinglan.runs.launcher import Command, Metrics
from qinglan.runs.run import Run
from qinglan.serving.local_judge import JudgeServer, released_judge, serve_judge
from qinglan.tasks.engine import run_engine
from qinglan.tasks.followers import AlarmFollower, Follower, LeftOut, first_and_last
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
    train_file = dataset.artifacts["rl_train"]
    dev_file = dataset.artifacts["rl_dev"]
    profile = run.profile.scheduled(dataset.artifacts["sft_train"].rows or 0, train_file.rows or 0)
    start = sft if profile.rl.start_from == "sft" else base
    if "model" not in start.artifacts:
        raise ConfigError(
            "rl.start_from = base needs student.base_model to be a local folder, not a hub id"
        )
    judge = released_judge(profile)
    agreement = compare_judges(run, services, dataset, judge) if judge else None

    def work(stage: Stage) -> Outcome:
        model = start.path("model")
        require_disk_space("rl", profile, stage.directory, rl_bytes(profile, ModelSize.of(model)))
        training = _Training(stage, services, profile, model, train_file, dev_file)
        stop = read_stop(stage.directory)
        # An earlier attempt may have ended training on purpose, and failed only later.
        has_trained = stop is not None and not stop.failed
        if not has_trained:
            with serve_judge(profile, judge, stage.directory / "judge", stage.say) as served:
                training.run(served)
        training.look_once_more()
        stop = read_stop(stage.directory)
        if stop:
            stage.say(f"training ended early {stop.reason}")
        chosen = _choose(stage, training.checkpoints)
        artifacts = _export(stage, profile, chosen, start.artifacts["model"])
        outcome = _outcome(stage, artifacts, training, chosen)
        outcome.details[WEIGHTS_SHA256] = sha256_of(artifacts["model"].path, WEIGHTS)
        outcome.details["findings"] = agreement.details["findings"] if agreement else []
        return outcome

    depends_on = {
        "train_sha256": train_file.sha256,
        "dev_sha256": dev_file.sha256,
        "model_sha256": start.artifacts["model"].sha256,
        "rl": profile.rl.model_dump(mode="json", exclude=set(CHANGEABLE["rl"])),
        "reward": profile.reward.model_dump(mode="json", exclude=set(CHANGEABLE["reward"])),
        **scoring_key(profile),
        "knowledge_base_sha256": run.knowledge_base_sha256,
    }
    if judge:
        depends_on["local_judge"] = judge.identity
    return perform(run, "rl", depends_on, work, has_checkpoints=True)


class _Training:
    """verl's training: its command, and everything that follows its files while it runs."""

    def __init__(
        self,
        stage: Stage,
        services: Services,
        profile: Profile,
        model: Path,
        train_file: Artifact,
        dev_file: Artifact,
    ) -> None:
        self._stage = stage
        self._services = services
        self._profile = profile
        self._model = model
        self._train_file = train_file
        self._dev_file = dev_file
        self._log = stage.directory / "rl.log"
        self._samples_log = stage.directory / "samples.jsonl"
        self.checkpoints = stage.directory / "checkpoints"
        read_line = partial(_verl_line, profile.rl.total_steps)
        self._metrics = Follower(stage, stage.directory / "metrics.*.jsonl", read_line)
        dev_row_ids = [row.id for row in _rows_of(dev_file.path)]
        self.samples = SampleWatch(self._samples_log, dev_row_ids, stage.say)
        self.alarms = AlarmFollower(stage)
        self.left_out = LeftOut(
            stage,
            self._log,
            train_file.rows or 0,
            verl.left_out,
            f"rl.max_prompt_length = {profile.rl.max_prompt_length}",
            profile.rl.train_batch_size,
        )

    @property
    def _watchers(self) -> list[Callable[[], None]]:
        return [self.left_out, self._metrics, self.samples, self.alarms]

    def run(self, served: JudgeServer | None) -> None:
        """Train to the end; raises StageError, with a sample's error, where verl gave up."""
        stage = self._stage
        stage.say("starting Ray and verl's workers, about a minute on a small machine")
        watchers = self._watchers
        if served:
            watchers.append(served.check)
        try:
            run_engine(
                stage,
                partial(self._command, served),
                name="verl",
                log=self._log.name,
                watchers=watchers,
                progress=partial(progress.checkpoints, self.checkpoints),
            )
        except StageError as error:
            stop = read_stop(stage.directory)
            if stop and stop.failed and self.samples.last_invalid:
                message = f"{error}; the last one: {self.samples.last_invalid}"
                raise StageError(message) from None
            raise

    def look_once_more(self) -> None:
        """Read what was written since the last look."""
        for watcher in self._watchers:
            watcher()
        self._metrics.flush()

    def _command(self, served: JudgeServer | None) -> Command:
        """The command of an attempt.

        Its files are written anew for each attempt, but not under a job that is still running.
        """
        stage = self._stage
        service = _reward_service(stage.run, self._services, self._samples_log, served)
        return verl.ppo_command(
            self._profile,
            model=self._model,
            train_file=self._train_file.path,
            dev_file=self._dev_file.path,
            output_dir=self.checkpoints,
            reward_config=_write(stage, "reward.json", service),
            trainer_settings=_write(
                stage, "trainer.json", _trainer_settings(stage, self._dev_file.path)
            ),
            metrics_path=progress.next_metrics_path(stage.directory),
            run_name=stage.run.id,
        )


def _write(stage: Stage, name: str, content: BaseModel) -> Path:
    path = stage.directory / name
    path.write_text(content.model_dump_json(indent=1), encoding="utf-8")
    return path


def _reward_service(
    run: Run, services: Services, samples_log: Path, served: JudgeServer | None = None
) -> RewardService:
    """The settings of the reward service; `served` is a judge of our own in the judge's place."""
    profile = run.profile
    grader = get_recipe(profile.recipe).grader
    addresses = services()
    settings: dict[str, Any] = {}
    if grader.asks_rag:
        settings["rag"] = profile.rag
        settings["rag_url"] = addresses.rag_url
        settings["retrieval_scope"] = run.retrieval_scope
    if served:
        settings["judge"] = served.endpoint
        settings["judge_url"] = served.url
        settings["judge_price"] = served.judge.settings.price
        settings["judge_key_salt"] = served.judge.key_salt
        settings["judge_recipe"] = served.judge.released.recipe
    elif grader.asks_judge:
        settings["judge"] = profile.judge
        settings["judge_url"] = addresses.judge_url
        settings["judge_price"] = profile.prices[profile.judge.model]
        settings["judge_key_salt"] = key_salt(profile, "judge")
    return RewardService(
        **settings,
        recipe=profile.recipe,
        parts=grader.score_parts,
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
    grader = get_recipe(profile.recipe).grader
    dev_rows = _rows_of(dev_file)
    dev_metric = grader.dev_metric(profile.reward, dev_rows)
    return TrainerSettings(
        folder=stage.directory,
        max_invalid_share=profile.reward.max_invalid_share,
        use_labels=profile.reward.use_labels,
        dev_metric=dev_metric,
        dev_rows=frozenset(row.id for row in dev_rows if grader.can_have(dev_metric, row)),
        primary_metric=grader.primary_metric,
        patience=profile.rl.patience,
        keep_checkpoints=profile.rl.keep_checkpoints,
        alarms=profile.rl.alarms,
    )


def _rows_of(rl_file: Path) -> list[Row]:
    """The rows whose questions an RL file asks; StageError where an earlier version wrote it."""
    infos = pq.read_table(rl_file, columns=["extra_info"])["extra_info"].to_pylist()
    if any("row" not in info for info in infos):
        raise StageError(
            f"rl: {rl_file} was written by an earlier version and lacks the rows that samples are "
            "graded by; run `qinglan run refresh` to write it anew, which pays for no known answer"
        )
    return [Row.model_validate_json(info["row"]) for info in infos]


class Chosen(NamedTuple):
    """The model that goes on, and why."""

    step: int
    checkpoint: Path | None
    """None for the model that training started from, the policy at step 0."""
    dev: tuple[float, float, float] | None
    """Its value on the dev split with the 95% interval; None where it was not validated."""


def _choose(stage: Stage, checkpoints: Path) -> Chosen:
    """The model by the dev split; the one from before stays where no step did better."""
    checkpoint: Path | None
    if stage.run.profile.rl.choose == "last":
        step, checkpoint = progress.last_checkpoint(checkpoints)
    else:
        step, checkpoint = progress.best_checkpoint(checkpoints, stage.directory)
    metrics = progress.read_metrics(stage.directory).get(step, {})
    dev = None
    dev_words = ""
    if DEV_VALUE in metrics:
        dev = (metrics[DEV_VALUE], metrics[DEV_LOW], metrics[DEV_HIGH])
        dev_words = f", dev {dev[0]:.3f} [{dev[1]:.3f}, {dev[2]:.3f}]"
    words = f"exporting step {step}"
    if checkpoint is None:
        words = (
            "no step of training was better on the dev split than the model it started from, "
            "which goes on"
        )
    stage.say(f"{words}{dev_words}")
    return Chosen(step, checkpoint, dev)


def _export(stage: Stage, profile: Profile, chosen: Chosen, start: Artifact) -> dict[str, Artifact]:
    """The chosen model and, after LoRA, its adapter; the model that training started from where no
    step was better."""
    if chosen.checkpoint is None:
        return {"model": start}
    folder = stage.directory / "model"
    command = verl.export_command(
        profile, checkpoint=chosen.checkpoint, base_model=start.path, output_dir=folder
    )
    run_engine(stage, command, name="verl export", log="export.log")
    artifacts = {"model": Artifact.of(folder)}
    adapter = stage.directory / ADAPTER
    if adapter.is_dir():
        artifacts["adapter"] = Artifact.of(adapter)
    return artifacts


def _outcome(
    stage: Stage, artifacts: dict[str, Artifact], training: _Training, chosen: Chosen
) -> Outcome:
    profile = stage.run.profile
    metrics_by_step = progress.read_metrics(stage.directory)

    def curve(key: str) -> list[tuple[int, float]]:
        return [(step, metrics[key]) for step, metrics in metrics_by_step.items() if key in metrics]

    keys = {"reward": verl.STEP_METRICS["reward"]}
    for part in get_recipe(profile.recipe).grader.score_parts:
        keys[part] = part_mean(part)
    keys |= verl.STEP_METRICS
    curves = {label: curve(key) for label, key in keys.items()}
    summary: dict[str, Any] = {
        "steps": max(metrics_by_step, default=0),
        "chosen_step": chosen.step,
    }
    for label, points in curves.items():
        summary |= first_and_last(label, points)
    if chosen.dev:
        summary["dev_value"], summary["dev_ci_low"], summary["dev_ci_high"] = chosen.dev
    summary |= training.samples.summary
    other_curves = {
        label: points for label, points in curves.items() if points and label != "reward"
    }
    left_out = training.left_out
    return Outcome(
        rows_in=left_out.rows,
        rows_out=left_out.rows - left_out.count,
        dropped=left_out.dropped,
        artifacts=artifacts,
        metrics={name: float(value) for name, value in summary.items()},
        details={
            "summary": summary,
            "curve": curves["reward"],
            "curves": other_curves,
            "dev_curve": curve(DEV_VALUE),
            "api": _calls(training.samples, has_local_judge=bool(profile.judge.local)),
            "alarms": [alarm.model_dump() for alarm in training.alarms.alarms],
        },
    )


def _calls(samples: SampleWatch, *, has_local_judge: bool) -> dict[str, dict[str, int]]:
    """Use of the services by role; a judge of our own has a role of its own."""
    calls = dict(samples.calls)
    if has_local_judge:
        calls["judge.local"] = calls.pop("judge")
    return calls


def _verl_line(total: int, entry: Metrics) -> tuple[int, int, str, Metrics]:
    """Step, total, words and metrics of a line of verl's metrics file."""
    metrics = entry["data"]
    reward = metrics.get(verl.STEP_METRICS["reward"])
    words = "steps" if reward is None else f"steps, reward {reward:+.3f}"
    return entry["step"], total, words, metrics
