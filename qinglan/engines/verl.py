"""verl's command lines for PPO and GRPO, and for exporting a checkpoint. Pure: nothing is started or imported here.

The profile's names are verl's, except for these:

- `grad_clip` is `optim.clip_grad` for actor and critic (`actor.grad_clip` exists in verl and is ignored).
- `value_coefficient` is the weight of the squared value error. verl's critic is a model of its own with its own
  AdamW and a fixed weight of 0.5. AdamW does not feel the scale of a loss, but gradient clipping does: a critic with
  weight v that is clipped at c moves exactly as verl's clipped at 0.5·c/v, which is what is passed.
- `kl_loss_coefficient` > 0 loads a reference model, the SFT model that training starts from.

On the CPU every process holds fp32 weights and samples with them, so the rollout's log-probabilities are the old
policy's: verl's bypass mode saves a forward pass. Not with LoRA, whose merged weights travel in bf16, nor on a GPU.

The prompt is rendered without `enable_thinking`, so Qwen3 gets no empty `<think>` block: ms-swift's template
`qwen3_nothinking` trains without one as well.
"""

import json
import re
from pathlib import Path
from typing import Any

from qinglan.config import Profile
from qinglan.engines.command import QUIET_ENV, Command
from qinglan.engines.swift import engine_env, engine_python
from qinglan.errors import ArtifactError

TRAINER = "qinglan_sync"
"""`trainer.v1.trainer_mode` of our trainer on GPUs; `cpu_sync` is its counterpart on the CPU."""
REWARD_FUNCTION = "pkg://qinglan.reward.function"

STEP_METRICS = {
    "reward": "critic/score/mean",
    "gold_top1": "reward_extra/gold_top1/mean",
    "judge": "reward_extra/judge/mean",
    "rq_gain": "reward_extra/rq_gain/mean",
    "guard_ok": "reward_extra/guard_ok/mean",
    "entropy": "actor/entropy",
    "clip_fraction": "actor/pg_clipfrac",
    "value_loss": "critic/vf_loss",
}
"""What is reported of each training step, by the name that verl logs it under."""

_LENGTHS = re.compile(r"(filter )?dataset len: (\d+)|selected (\d+) random samples")
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:-]*")
_ENV = {
    **QUIET_ENV,
    "HYDRA_FULL_ERROR": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Workers that Ray starts ahead of need have nothing imported and only take time from those that are needed.
    "RAY_prestart_worker_first_driver": "0",
}

Overrides = dict[str, Any]


def ppo_command(
    profile: Profile,
    *,
    model: Path,
    train_file: Path,
    dev_file: Path,
    output_dir: Path,
    reward_config: Path,
    trainer_settings: Path,
    metrics_path: Path,
    run_name: str,
) -> Command:
    """Train from `model`, resuming from the newest whole checkpoint under `output_dir` if there is one.

    `reward_config` is a `RewardService` for the reward function, `trainer_settings` a `TrainerSettings` for our trainer.

    Metrics go to `metrics_path`, one `{"step", "data"}` object a step; it must not exist (see `next_metrics_path`).
    """
    paths = {
        "data.train_files": train_file.resolve(),
        "data.val_files": dev_file.resolve(),
        "trainer.default_local_dir": output_dir.resolve(),
        "hydra.run.dir": output_dir.resolve() / "hydra",
        "+reward.custom_reward_function.reward_kwargs.config_path": reward_config.resolve(),
        "+qinglan.trainer_settings": trainer_settings.resolve(),
    }
    overrides = {
        **_algorithm(profile),
        **_data(profile),
        **_policy(profile, model.resolve()),
        **_rollout(profile),
        **_trainer(profile, run_name),
        **paths,
    }
    if profile.rl.algorithm == "ppo":
        overrides |= _critic(profile, model.resolve())
    overrides |= _on_cpu(profile) if profile.trainer.device == "cpu" else _on_cuda(profile)
    overrides |= profile.rl.extra
    argv = [engine_python(profile), "-m", "qinglan.engines.ppo"]
    argv += [f"{key}={hydra_value(value)}" for key, value in overrides.items()]
    return Command(argv, _environment(profile, model) | {"VERL_FILE_LOGGER_PATH": str(metrics_path.resolve())})


def export_command(profile: Profile, *, checkpoint: Path, base_model: Path, output_dir: Path) -> Command:
    """Make a Hugging Face folder of a checkpoint (`global_step_N`); `base_model` is what training started from."""
    argv = [engine_python(profile), "-m", "qinglan.engines.export"]
    argv += ["--checkpoint", str(checkpoint.resolve())]
    argv += ["--base-model", str(base_model.resolve())]
    argv += ["--output-dir", str(output_dir.resolve())]
    return Command(argv, _environment(profile, base_model))


def hydra_value(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in {"true", "false", "null", "nan", "inf"}:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def next_metrics_path(folder: Path) -> Path:
    """Where the next attempt should write its metrics."""
    return folder / f"metrics.{len(_attempts(folder)) + 1}.jsonl"


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step over all attempts; where two measured the same, the later one counts.

    A resumed run validates first, under the step that it resumes from.
    """
    steps: dict[int, dict[str, float]] = {}
    for path in _attempts(folder):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                known = {name: value for name, value in entry["data"].items() if value is not None}
                steps.setdefault(entry["step"], {}).update(known)
    return dict(sorted(steps.items()))


def dev_metric(data_source: str, name: str = "reward") -> str:
    """The name under which verl logs the dev split's mean of the reward, or of a value that came with it."""
    section = "val-core" if name == "reward" else "val-aux"
    return f"{section}/{data_source}/{name}/mean@1"


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """Whole checkpoints by step; verl writes its tracker last, so a folder beyond it may be torn."""
    tracker = output_dir / "latest_checkpointed_iteration.txt"
    newest = int(tracker.read_text()) if tracker.exists() else 0
    found = {int(path.name.removeprefix("global_step_")): path for path in output_dir.glob("global_step_*")}
    return {step: path for step, path in sorted(found.items()) if step <= newest}


def best_checkpoint(output_dir: Path, metrics_folder: Path, metric: str) -> tuple[int, Path, float]:
    """Step, folder and value of the checkpoint with the highest dev metric; the later one in a tie.

    Raises:
        ArtifactError: no checkpoint has that metric.
    """
    measured = read_metrics(metrics_folder)
    values = {step: measured[step][metric] for step in checkpoints(output_dir) if metric in measured.get(step, {})}
    if not values:
        raise ArtifactError(f"no checkpoint under {output_dir} has {metric}; make save_freq a multiple of test_freq")
    step = max(values, key=lambda step: (values[step], step))
    return step, checkpoints(output_dir)[step], values[step]


def left_out(log: str) -> int:
    """How many prompts for training verl left out as longer than `max_prompt_length`, by its log.

    It prints the number of prompts before and after, for the training file first.
    """
    before = 0
    for is_filtered, length, selected in _LENGTHS.findall(log):
        if is_filtered:
            return before - int(length)
        before = int(length or selected)
    return 0


def _attempts(folder: Path) -> list[Path]:
    return sorted(folder.glob("metrics.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))


def _algorithm(profile: Profile) -> Overrides:
    rl = profile.rl
    exact = profile.trainer.device == "cpu" and not rl.lora_rank
    return {
        "algorithm.adv_estimator": "gae" if rl.algorithm == "ppo" else "grpo",
        "algorithm.gamma": rl.gamma,
        "algorithm.lam": rl.lam,
        "algorithm.rollout_correction.bypass_mode": exact,
        "reward.custom_reward_function.path": REWARD_FUNCTION,
        "reward.custom_reward_function.name": "compute_score",
    }


def _data(profile: Profile) -> Overrides:
    rl = profile.rl
    return {
        "data.train_batch_size": rl.train_batch_size,
        "data.max_prompt_length": rl.max_prompt_length,
        "data.max_response_length": rl.max_response_length,
        "data.seed": rl.seed,
        "data.dataloader_num_workers": 0,
        # Otherwise verl cuts a prompt that is too long on its left, and the system prompt is gone.
        "data.filter_overlong_prompts": True,
    }


def _policy(profile: Profile, model: Path) -> Overrides:
    rl, actor = profile.rl, "actor_rollout_ref.actor"
    overrides: Overrides = {
        "actor_rollout_ref.model.path": model,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": rl.ppo_mini_batch_size,
        f"{actor}.ppo_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        f"{actor}.ppo_epochs": rl.ppo_epochs,
        f"{actor}.clip_ratio": rl.clip_ratio,
        f"{actor}.clip_ratio_low": rl.clip_ratio,
        f"{actor}.clip_ratio_high": rl.clip_ratio,
        f"{actor}.entropy_coeff": rl.entropy_coefficient,
        f"{actor}.optim.lr": rl.actor_lr,
        f"{actor}.fsdp_config.seed": rl.seed,
        f"{actor}.data_loader_seed": rl.seed,
        **_schedule(profile, actor),
    }
    overrides[f"{actor}.optim.clip_grad"] = rl.grad_clip
    if rl.kl_loss_coefficient:
        overrides |= {
            f"{actor}.use_kl_loss": True,
            f"{actor}.kl_loss_coef": rl.kl_loss_coefficient,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        }
    if rl.lora_rank:
        overrides |= {
            "actor_rollout_ref.model.lora_rank": rl.lora_rank,
            "actor_rollout_ref.model.lora_alpha": rl.lora_alpha,
        }
    return overrides


def _critic(profile: Profile, model: Path) -> Overrides:
    rl = profile.rl
    adapter = {"critic.model.lora_rank": rl.lora_rank, "critic.model.lora_alpha": rl.lora_alpha} if rl.lora_rank else {}
    return {
        **adapter,
        "critic.model.path": model,
        "critic.strategy": "fsdp2",
        "critic.ppo_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        "critic.optim.lr": rl.critic_lr,
        "critic.optim.clip_grad": rl.grad_clip * 0.5 / rl.value_coefficient,
        "critic.fsdp.seed": rl.seed,
        "critic.data_loader_seed": rl.seed,
        **_schedule(profile, "critic"),
    }


def _schedule(profile: Profile, owner: str) -> Overrides:
    rl = profile.rl
    return {
        f"{owner}.optim.lr_scheduler_type": rl.lr_scheduler_type,
        f"{owner}.optim.min_lr_ratio": rl.min_lr_ratio,
        f"{owner}.optim.lr_warmup_steps_ratio": rl.lr_warmup_steps_ratio,
    }


def _rollout(profile: Profile) -> Overrides:
    rl, rollout = profile.rl, "actor_rollout_ref.rollout"
    return {
        f"{rollout}.n": rl.rollouts_per_prompt,
        f"{rollout}.temperature": rl.temperature,
        f"{rollout}.tensor_model_parallel_size": rl.tensor_model_parallel_size,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        f"{rollout}.seed": rl.seed,
    }


def _trainer(profile: Profile, run_name: str) -> Overrides:
    rl, trainer = profile.rl, profile.trainer
    return {
        "trainer.device": trainer.device,
        "trainer.nnodes": trainer.nodes,
        "trainer.n_gpus_per_node": trainer.gpus_per_node,
        "trainer.project_name": profile.tracking.experiment,
        "trainer.experiment_name": run_name,
        "trainer.logger": ["console", "file"],
        "trainer.total_training_steps": rl.total_steps,
        "trainer.total_epochs": rl.total_steps,  # an epoch has a step or more, so the steps decide
        "trainer.save_freq": rl.save_freq,
        "trainer.test_freq": rl.test_freq,
        "trainer.val_before_train": rl.val_before_train,
        "trainer.resume_mode": "auto",
        "trainer.max_actor_ckpt_to_keep": rl.max_checkpoints,
        "trainer.max_critic_ckpt_to_keep": rl.max_checkpoints,
        "hydra.output_subdir": None,
    }


def _on_cpu(profile: Profile) -> Overrides:
    """One worker, fp32 throughout, as few processes as verl allows."""
    rl = profile.rl
    overrides: Overrides = {
        "trainer.v1.trainer_mode": "cpu_sync",
        "actor_rollout_ref.rollout.name": "hf_cpu",
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.include_dashboard": False,
        **_fp32("actor_rollout_ref", "actor.fsdp_config"),
        "actor_rollout_ref.actor.use_torch_compile": False,
    }
    if rl.algorithm == "ppo":
        overrides |= _fp32("critic", "fsdp")
    if rl.lora_rank:
        overrides["actor_rollout_ref.model.lora.merge"] = True
    else:
        overrides["actor_rollout_ref.actor.checkpoint.save_contents"] = ["model", "optimizer", "extra", "hf_model"]
        # What is saved beyond the state is not there to be loaded.
        overrides["actor_rollout_ref.actor.checkpoint.load_contents"] = ["model", "optimizer", "extra"]
    return overrides


def _fp32(owner: str, engine: str) -> Overrides:
    return {
        f"{owner}.model.use_remove_padding": False,
        f"{owner}.model.enable_gradient_checkpointing": False,
        f"+{owner}.model.override_config.attn_implementation": "sdpa",
        f"{owner}.{engine}.use_torch_compile": False,
        f"+{owner}.{engine}.mixed_precision": dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32"),
    }


def _on_cuda(profile: Profile) -> Overrides:
    """verl's defaults for vLLM and FSDP2; offload as the profile says."""
    rl = profile.rl
    overrides: Overrides = {
        "trainer.v1.trainer_mode": TRAINER,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.actor.fsdp_config.param_offload": rl.param_offload,
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": rl.optimizer_offload,
    }
    if rl.algorithm == "ppo":
        overrides |= {
            "critic.fsdp.param_offload": rl.param_offload,
            "critic.fsdp.optimizer_offload": rl.optimizer_offload,
        }
    if rl.kl_loss_coefficient:
        overrides["actor_rollout_ref.ref.fsdp_config.param_offload"] = rl.param_offload
    if rl.lora_rank:  # vLLM loads the base itself and is then sent the adapter
        overrides["actor_rollout_ref.rollout.load_format"] = "safetensors"
    return overrides


def _environment(profile: Profile, model: Path) -> dict[str, str]:
    if profile.trainer.device == "cuda":
        device = {"VERL_PLATFORM": "nvidia"}
    else:
        # TransferQueue sets torch to 8 threads around every transfer; threads that spin while they wait make
        # training several times slower as soon as anything else runs on the machine.
        device = {"VERL_PLATFORM": "cpu", "TQ_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return engine_env(profile, str(model)) | _ENV | device
