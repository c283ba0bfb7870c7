"""The training stages: base_model → sft → rl. Each starts one engine process and follows its metrics."""

import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from qinglan.artifacts import Artifact, StageResult
from qinglan.clients import key_salt, scoring_identity
from qinglan.config import EMBEDDED
from qinglan.dataset import data_source
from qinglan.embedded.base_model import cached_path, is_complete, pretrain_argv
from qinglan.embedded.services import Services
from qinglan.engines import swift, verl
from qinglan.engines.command import Command
from qinglan.engines.launcher import JsonlTail, LineTail, launch
from qinglan.errors import EngineError, StageError
from qinglan.reward import RewardService, SampleWatch
from qinglan.runs import Run
from tasks.stage import Outcome, Stage, perform

Metrics = dict[str, Any]
MAX_LEFT_OUT_SHARE = 0.2
"""An engine that leaves out more of the training rows is stopped: its length limit is not what was meant."""


@task(name="base-model", task_run_name="base-model", cache_policy=NO_CACHE)
def prepare_base_model(run: Run) -> StageResult:
    """The model to start from: the profile's own, or the embedded one, pretrained once per machine."""
    profile = run.profile
    embedded = profile.student.base_model == EMBEDDED
    folder = cached_path(profile.paths, profile.embedded) if embedded else Path(profile.student.base_model)

    def work(stage: Stage) -> Outcome:
        if not embedded:
            return _model_outcome(folder)
        if is_complete(folder):
            stage.say(f"already pretrained: {folder}")
            return _model_outcome(folder)
        metrics_path = stage.directory / "metrics.jsonl"
        metrics_path.unlink(missing_ok=True)
        stage.say("pretraining a tiny Qwen3 from scratch; this happens once per machine")
        command = Command(
            pretrain_argv(
                swift.engine_python(profile), profile.embedded, folder, metrics_path, profile.trainer.threads
            ),
            swift.engine_env(profile, str(folder)),
        )
        follow = _Follower(stage, metrics_path, _pretrain_line)
        launch(command, name="pretraining", log=stage.directory / "pretrain.log", on_poll=follow)
        return _model_outcome(folder, {"curve": follow.curve("loss")})

    return perform(run, "base_model", {"folder": str(folder)}, work)


def _model_outcome(folder: Path, details: dict[str, Any] | None = None) -> Outcome:
    # A hub id is not a folder on this machine; the engines resolve it.
    artifacts = {"model": Artifact.of(folder)} if folder.is_dir() else {}
    return Outcome(artifacts=artifacts, details=(details or {}) | {"model": str(folder)})


@task(name="sft", task_run_name="sft", cache_policy=NO_CACHE)
def train_sft(run: Run, dataset: StageResult, base: StageResult) -> StageResult:
    """LoRA SFT on the selected rewrites with ms-swift, then merge."""
    profile = run.profile
    train_file, dev_file = dataset.artifacts["sft_train"], dataset.artifacts["sft_dev"]
    model: str = base.details["model"]

    def work(stage: Stage) -> Outcome:
        output = stage.directory / "checkpoints"
        resume_from = swift.newest_checkpoint(output)
        if resume_from:
            stage.say(f"continuing from {resume_from.name}")
            swift.rewind_log(output, resume_from)
        elif output.exists():
            shutil.rmtree(output)  # of an attempt that ended before its first checkpoint
        command = swift.sft_command(
            profile,
            model=model,
            train_file=train_file.path,
            dev_file=dev_file.path,
            output_dir=output,
            resume_from=resume_from,
        )
        rows, limit, log = train_file.rows or 0, profile.sft.max_length, stage.directory / "sft.log"
        follow = _Follower(stage, output / swift.LOGGING_FILE, _swift_line)
        left_out = _LeftOut(stage, log, rows, partial(swift.left_out, rows), f"sft.max_length = {limit}")

        def on_poll() -> None:
            left_out()
            follow()

        launch(command, name="ms-swift SFT", log=log, on_poll=on_poll)
        adapter = swift.newest_checkpoint(output)
        if adapter is None:
            raise EngineError(f"ms-swift ended without a checkpoint; log: {log}")
        stage.say("merging the adapter into the base model")
        merged = stage.directory / "merged"
        merge = swift.merge_command(profile, adapter=adapter, output_dir=merged, model=model)
        launch(merge, name="ms-swift merge", log=stage.directory / "merge.log")
        losses = follow.curve("loss")
        summary = {"rows": rows - left_out.count, "steps": follow.last_step, **_ends("loss", losses)}
        return Outcome(
            rows_in=rows,
            rows_out=rows - left_out.count,
            dropped=left_out.dropped,
            artifacts={"adapter": Artifact.of(adapter), "model": Artifact.of(merged)},
            metrics={k: v for k, v in summary.items() if isinstance(v, float)},
            details={"summary": summary, "curve": losses, "eval_curve": follow.curve("eval_loss")},
        )

    depends_on = {
        "train_sha256": train_file.sha256,
        "dev_sha256": dev_file.sha256,
        "model": base.artifacts["model"].sha256 if "model" in base.artifacts else model,
        "sft": profile.sft.model_dump(mode="json"),
        "student": profile.student.model_dump(mode="json", include={"model_type", "template"}),
    }
    return perform(run, "sft", depends_on, work)


@task(name="rl", task_run_name="rl", cache_policy=NO_CACHE)
def train_rl(run: Run, services: Services, dataset: StageResult, sft: StageResult) -> StageResult:
    """PPO with verl from the merged SFT model, rewarded for beating the teacher in retrieval; then export."""
    profile = run.profile
    train_file, dev_file = dataset.artifacts["rl_train"], dataset.artifacts["rl_dev"]

    def work(stage: Stage) -> Outcome:
        output = stage.directory / "checkpoints"
        service = _reward_service(run, services, stage.directory / "samples.jsonl")
        reward_config = stage.directory / "reward.json"
        reward_config.write_text(service.model_dump_json(indent=1), encoding="utf-8")
        metrics_path = verl.next_metrics_path(stage.directory)
        command = verl.ppo_command(
            profile,
            model=sft.path("model"),
            train_file=train_file.path,
            dev_file=dev_file.path,
            output_dir=output,
            reward_config=reward_config,
            metrics_path=metrics_path,
            run_name=run.id,
        )
        follow = _Follower(stage, metrics_path, _verl_line(profile.rl.total_steps))
        watch = SampleWatch(service.samples_log, profile.reward, _row_ids(dev_file.path))
        log, limit = stage.directory / "rl.log", profile.rl.max_prompt_length
        left_out = _LeftOut(stage, log, train_file.rows or 0, verl.left_out, f"rl.max_prompt_length = {limit}")
        stage.say("starting Ray and verl's workers, about a minute on a small machine")

        def on_poll() -> None:
            left_out()
            follow()
            watch()

        launch(command, name="verl PPO", log=log, on_poll=on_poll)
        follow.flush()
        chosen = _choose(stage, output, data_source(profile.recipe))
        exported = stage.directory / "model"
        export = verl.export_command(
            profile, checkpoint=chosen["checkpoint"], base_model=sft.path("model"), output_dir=exported
        )
        launch(export, name="verl export", log=stage.directory / "export.log")
        return _rl_outcome(stage, exported, left_out, watch, chosen)

    depends_on = {
        "train_sha256": train_file.sha256,
        "dev_sha256": dev_file.sha256,
        "model_sha256": sft.artifacts["model"].sha256,
        "rl": profile.rl.model_dump(mode="json"),
        "reward": profile.reward.model_dump(mode="json"),
        **scoring_identity(profile),
        "knowledge_base_sha256": run.knowledge_base_sha256,
    }
    return perform(run, "rl", depends_on, work)


def _reward_service(run: Run, services: Services, samples_log: Path) -> RewardService:
    profile = run.profile
    return RewardService(
        recipe=profile.recipe,
        reward=profile.reward,
        rag=profile.rag,
        rag_url=services.rag_url,
        judge=profile.judge,
        judge_url=services.judge_url,
        judge_price=profile.prices[profile.judge.model],
        judge_key_salt=key_salt(profile, "judge"),
        tenant=profile.tenant,
        ledger=profile.ledger,
        state=profile.paths.state,
        budget=profile.budget,
        run_id=run.id,
        samples_log=samples_log,
    )


def _choose(stage: Stage, checkpoints: Path, source: str) -> dict[str, Any]:
    """The checkpoint that did best on the dev split: by gold top-1 where it is labelled, else by retrieval quality."""
    measured = verl.read_metrics(stage.directory).values()
    gold, quality = verl.dev_metric(source, "gold_top1"), verl.dev_metric(source, "rq")
    metric = gold if any(gold in metrics for metrics in measured) else quality
    step, checkpoint, value = verl.best_checkpoint(checkpoints, stage.directory, metric)
    stage.say(f"exporting step {step}, the best on the dev split: {metric} {value:.3f}")
    return {"checkpoint": checkpoint, "step": step, "metric": metric, "value": value}


def _row_ids(rl_file: Path) -> list[str]:
    infos = pq.read_table(rl_file, columns=["extra_info"])["extra_info"].to_pylist()
    return [info["row_id"] for info in infos]


def _rl_outcome(
    stage: Stage, exported: Path, left_out: "_LeftOut", watch: SampleWatch, chosen: dict[str, Any]
) -> Outcome:
    steps = verl.read_metrics(stage.directory)

    def curve(key: str) -> list[tuple[int, float]]:
        return [(step, metrics[key]) for step, metrics in steps.items() if key in metrics]

    curves = {label: curve(key) for label, key in verl.STEP_METRICS.items()}
    summary: dict[str, Any] = {"steps": max(steps, default=0), "chosen_step": chosen["step"]}
    for label, points in curves.items():
        summary |= _ends(label, points)
    summary |= {"dev_metric": chosen["metric"], "dev_value": chosen["value"]}
    summary |= watch.summary
    return Outcome(
        rows_in=left_out.rows,
        rows_out=left_out.rows - left_out.count,
        dropped=left_out.dropped,
        artifacts={"model": Artifact.of(exported)},
        metrics={k: float(v) for k, v in summary.items() if isinstance(v, int | float)},
        details={
            "summary": summary,
            "curve": curves["reward"],
            "dev_curve": curve(chosen["metric"]),
            "api": watch.calls,
        },
    )


class _Follower:
    """Hands new metrics of a training process to MLflow and to the people who wait."""

    def __init__(
        self, stage: Stage, path: Path, read: Callable[[Metrics], tuple[int, int, str, Metrics] | None]
    ) -> None:
        self._stage, self._read, self._tail = stage, read, JsonlTail(path)
        self._points: dict[int, Metrics] = {}
        self._unsent: dict[int, Metrics] = {}
        self._flushed_at = time.monotonic()

    def __call__(self) -> None:
        """Look for new lines; called while the process runs and once after."""
        for entry in self._tail.new():
            if (found := self._read(entry)) is None:
                continue
            step, total, text, metrics = found
            self._points.setdefault(step, {}).update(metrics)
            self._unsent.setdefault(step, {}).update(metrics)
            if total:
                self._stage.progress(step, total, text)
        if self._unsent and time.monotonic() - self._flushed_at > 5:
            self.flush()

    def flush(self) -> None:
        """Send what MLflow has not seen."""
        self._stage.tracker.log_steps(self._stage.mlflow_run_id, self._unsent.items())
        self._unsent, self._flushed_at = {}, time.monotonic()

    @property
    def last_step(self) -> int:
        """The highest step seen."""
        return max(self._points, default=0)

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Values of one metric by step; where a step was measured twice, the later one counts."""
        self.flush()
        return [(step, float(metrics[key])) for step, metrics in sorted(self._points.items()) if key in metrics]


_SIZE_LINE = re.compile(rb"[Dd]ataset|random samples")


class _LeftOut:
    """The rows that an engine leaves out as too long, by what this attempt writes to its log."""

    def __init__(self, stage: Stage, log: Path, rows: int, count: Callable[[str], int], setting: str) -> None:
        self.rows, self.count = rows, 0
        self._stage, self._lines, self._read, self._setting = stage, LineTail(log, from_end=True), count, setting
        self._sizes = ""

    def __call__(self) -> None:
        """Look for new lines.

        Raises:
            StageError: more than `MAX_LEFT_OUT_SHARE` of the rows are left out.
        """
        sizes = "".join(line.decode(errors="replace") for line in self._lines.new() if _SIZE_LINE.search(line))
        if not sizes:
            return
        self._sizes += sizes
        if (count := self._read(self._sizes)) == self.count:
            return
        self.count = count
        what = f"{count:,} of {self.rows:,} training rows are longer than {self._setting} tokens"
        if count > MAX_LEFT_OUT_SHARE * self.rows:
            raise StageError(f"{self._stage.name}: {what}, more than {MAX_LEFT_OUT_SHARE:.0%}; raise it")
        self._stage.say(f"{what} and left out")

    @property
    def dropped(self) -> dict[str, int]:
        """As a stage's outcome wants it."""
        return {"prompt_too_long": self.count} if self.count else {}


def _ends(name: str, points: list[tuple[int, float]]) -> dict[str, float]:
    """First and last value of a curve, each averaged over a tenth of it against noise."""
    values = [value for _, value in points]
    if not values:
        return {}
    width = max(1, len(values) // 10)
    return {f"{name}_first": sum(values[:width]) / width, f"{name}_last": sum(values[-width:]) / width}


def _pretrain_line(entry: Metrics) -> tuple[int, int, str, Metrics] | None:
    return entry["step"], entry["max_steps"], f"steps, loss {entry['loss']:.3f}", {"loss": entry["loss"]}


def _swift_line(entry: Metrics) -> tuple[int, int, str, Metrics] | None:
    if (logged := swift.logged_step(entry)) is None:
        return None
    step, total = logged
    metrics = {k: v for k, v in entry.items() if isinstance(v, int | float)}
    text = f"steps, loss {entry['loss']:.3f}" if "loss" in entry else "steps"
    return step, total, text, metrics


def _verl_line(total: int) -> Callable[[Metrics], tuple[int, int, str, Metrics] | None]:
    def read(entry: Metrics) -> tuple[int, int, str, Metrics] | None:
        metrics = entry["data"]
        reward = metrics.get(verl.STEP_METRICS["reward"])
        return entry["step"], total, "steps" if reward is None else f"steps, reward {reward:+.3f}", metrics

    return read
