"""The RL stage: verl from the merged SFT model, then the export of the best checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from qinglan.artifacts import Artifact, StageResult
from qinglan.clients import key_salt, scoring_identity
from qinglan.dataset import data_source
from qinglan.embedded.services import Services
from qinglan.engines import verl
from qinglan.reward.samples import SampleWatch
from qinglan.reward.service import RewardService
from qinglan.runs import Run
from tasks.engine import Follower, LeftOut, Metrics, first_and_last, run_engine
from tasks.stage import Outcome, Stage, perform


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
        follow = Follower(stage, metrics_path, _verl_line(profile.rl.total_steps))
        watch = SampleWatch(service.samples_log, profile.reward, _row_ids(dev_file.path))
        log, limit = stage.directory / "rl.log", profile.rl.max_prompt_length
        left_out = LeftOut(stage, log, train_file.rows or 0, verl.left_out, f"rl.max_prompt_length = {limit}")
        stage.say("starting Ray and verl's workers, about a minute on a small machine")

        def on_poll() -> None:
            left_out()
            follow()
            watch()

        run_engine(stage, command, name="verl PPO", log=log.name, on_poll=on_poll)
        follow.flush()
        chosen = _choose(stage, output, data_source(profile.recipe))
        exported = stage.directory / "model"
        export = verl.export_command(
            profile, checkpoint=chosen["checkpoint"], base_model=sft.path("model"), output_dir=exported
        )
        run_engine(stage, export, name="verl export", log="export.log")
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


def _rl_outcome(stage: Stage, exported: Path, left_out: LeftOut, watch: SampleWatch, chosen: dict[str, Any]) -> Outcome:
    steps = verl.read_metrics(stage.directory)

    def curve(key: str) -> list[tuple[int, float]]:
        return [(step, metrics[key]) for step, metrics in steps.items() if key in metrics]

    curves = {label: curve(key) for label, key in verl.STEP_METRICS.items()}
    summary: dict[str, Any] = {"steps": max(steps, default=0), "chosen_step": chosen["step"]}
    for label, points in curves.items():
        summary |= first_and_last(label, points)
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


def _verl_line(total: int) -> Callable[[Metrics], tuple[int, int, str, Metrics] | None]:
    def read(entry: Metrics) -> tuple[int, int, str, Metrics] | None:
        metrics = entry["data"]
        reward = metrics.get(verl.STEP_METRICS["reward"])
        return entry["step"], total, "steps" if reward is None else f"steps, reward {reward:+.3f}", metrics

    return read
