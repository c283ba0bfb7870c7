"""verl's command lines for training, with its configuration as Hydra overrides, and for exporting a
checkpoint.

Nothing is started or imported here.

The profile's names are verl's, except for these:

- `algorithm` selects an advantage estimator: `ppo` is GAE, `dr_grpo` is GRPO without the division
  by the group's standard deviation and with sums over tokens in place of means. Not offered,
  because verl 0.9.1's v1 trainer lacks their input: ReMax (it samples no baseline), optimal token
  baselines (no Σπ²) and GDPO (no reward parts). Nor those that fail where a sample has no reward:
  OPO divides by the fill-up rows' zero tokens, GRPO-pass@k needs two samples a group. GPG and DRO
  have no clipping and so no use for several updates a step; GMPO's loss ignores batch splits.
- `grad_clip` is `optim.clip_grad` for actor and critic (`actor.grad_clip` exists in verl and is
ignored).
- `value_coefficient` is the weight of the squared value error. verl's critic is a separate model
  with its own AdamW and a fixed weight of 0.5. AdamW does not depend on a loss's scale, but
  gradient clipping does: a critic with weight v that is clipped at c moves exactly as verl's
  clipped at 0.5·c/v, which is what is passed.
- `kl` with a mode loads a reference, the model that training starts from. With LoRA verl takes it
  from the policy with the adapter switched off. That is why the SFT adapter is merged first and
  never given as `lora_adapter_path`: the reference would be the base. `horizon_steps` is verl's
  `horizon` in samples over the samples of a step.

Our own rollout, on the CPU, samples with the fp32 weights that learn, so its log-probabilities are
the old policy's: verl's bypass mode saves a forward pass. Not with LoRA, whose merged weights are
sent in bf16, nor with vLLM.

vLLM's rollout is the same on the CPU as on GPUs: `_on_cpu` alone says what its CPU build needs.

The prompt is rendered without `enable_thinking`, so Qwen3 gets no empty `<think>` block: ms-swift's
template `qwen3_nothinking` trains without one as well.
"""

import re
from pathlib import Path
from typing import Any

from qinglan.config import Profile
from qinglan.runs.launcher import ROW_CACHE, Command
from qinglan.training.engines.swift import absolute_or_hub_id, engine_env, engine_python

TRAINER = "qinglan_sync"
"""`trainer.v1.trainer_mode` of our trainer on GPUs; on the CPU it is `cpu_vllm_sync` with vLLM,
`cpu_sync` without."""
REWARD_FUNCTION = "pkg://qinglan.training.reward_service.function"
AGENT = "seeded_single_turn"
"""The agent loop in agents.yaml."""
CRITIC_CONFIG = "qinglan.training.engines.ppo_trainer.CriticModelConfig"

Overrides = dict[str, Any]
STEP_METRICS = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
    "policy_loss": "actor/pg_loss",
    "value_loss": "critic/vf_loss",
}
"""Metrics that are reported of each training step beside the reward's parts: our name → verl's."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ESTIMATORS = {"ppo": "gae", "dr_grpo": "grpo"}
_SCHEDULE = ("lr_scheduler_type", "min_lr_ratio", "lr_warmup_steps_ratio")
_STATE = ["model", "optimizer", "extra"]
_CPU_KV_CACHE = 256 << 20  # bytes; vLLM would take a share of the machine's memory
_LENGTHS = re.compile(r"(filter )?dataset len: (\d+)|selected (\d+) random samples")
_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:-]*")
_ENV = {
    "HYDRA_FULL_ERROR": "1",
    # Workers that Ray starts in advance have nothing imported and take CPU time from those that are
    # needed.
    "RAY_prestart_worker_first_driver": "0",
}


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
    """Train from `model`, resuming from the newest complete checkpoint under `output_dir` if there
    is one.

    Args:
        reward_config: a `RewardService` as JSON, for the reward function.
        trainer_settings: a `TrainerSettings` as JSON, for our trainer.
        metrics_path: gets one `{"step", "data"}` object a step; must not exist (see
            `next_metrics_path`).
    """
    paths = {
        "data.train_files": train_file.resolve(),
        "data.val_files": dev_file.resolve(),
        "trainer.default_local_dir": output_dir.resolve(),
        "hydra.run.dir": output_dir.resolve() / "hydra",
        "+reward.custom_reward_function.reward_kwargs.config_path": reward_config.resolve(),
        "+qinglan.trainer_settings": trainer_settings.resolve(),
    }
    given = _overrides(profile, model.resolve(), run_name) | paths | profile.rl.extra
    argv = [engine_python(profile), "-m", "qinglan.training.engines.ppo"]
    argv += [f"{key}={hydra_value(value)}" for key, value in given.items()]
    rewarded_by = (profile.rag.api_key_env, profile.judge.api_key_env, profile.ledger.url_env)
    env = _environment(
        profile, model, *rewarded_by, "RAY_AUTH_TOKEN", "RAY_TLS_SERVER_KEY"
    )  # verl starts a Ray
    cache = output_dir.resolve().parent / ROW_CACHE
    return Command(
        argv,
        env
        | {"VERL_FILE_LOGGER_PATH": str(metrics_path.resolve()), "HF_DATASETS_CACHE": str(cache)},
    )


def export_command(
    profile: Profile, *, checkpoint: Path, base_model: Path, output_dir: Path
) -> Command:
    """Make a Hugging Face folder of a checkpoint (`global_step_N`); `base_model` is what training
    started from."""
    folders = [str(folder.resolve()) for folder in (checkpoint, base_model, output_dir)]
    argv = [engine_python(profile), "-m", "qinglan.training.engines.export", *folders]
    return Command(
        argv, _environment(profile, base_model), gpus=int(profile.trainer.device == "cuda")
    )


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


def left_out(log: str) -> int:
    """How many prompts for training verl left out as longer than `max_prompt_length`, by its log.

    The log has the number of prompts before and after, for the training file first.
    """
    before = 0
    for is_filtered, length, selected in _LENGTHS.findall(log):
        if is_filtered:
            return before - int(length)
        before = int(length or selected)
    return 0


def _environment(profile: Profile, model: Path, *secrets: str | None) -> dict[str, str]:
    if profile.trainer.device == "cuda":
        device = {"VERL_PLATFORM": "nvidia"}
    else:
        # TransferQueue sets torch to 8 threads around every transfer, and logs a line for each
        # field of each sample.
        device = {"VERL_PLATFORM": "cpu", "TQ_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "WARNING"}
    return engine_env(profile, str(model), *secrets) | _ENV | device


def _overrides(profile: Profile, model: Path, run_name: str) -> Overrides:
    """Everything but the run's files and `rl.extra`."""
    rl, trainer = profile.rl, profile.trainer
    # Outside a Ray job, start a Ray of our own: else `ray.init` would join what RAY_ADDRESS names,
    # or a cluster that `ray start` once left in /tmp/ray/ray_current_cluster. Its cores are only
    # counted: where there are fewer than verl reserves, it would wait for ever.
    cores = 16 + 3 * trainer.gpus_per_node
    own_ray = {
        "+ray_kwargs.ray_init.address": "local",
        _UNITS: 1,
        "ray_kwargs.ray_init.num_cpus": cores,
    }
    return {
        "algorithm.adv_estimator": _ESTIMATORS.get(rl.algorithm, rl.algorithm),
        **_same_names(profile, "algorithm", "gamma", "lam"),
        "algorithm.rollout_correction.bypass_mode": profile.rollout_engine == "cpu"
        and not rl.lora_rank,
        "reward.custom_reward_function.path": REWARD_FUNCTION,
        **_same_names(
            profile, "data", "train_batch_size", "max_prompt_length", "max_response_length"
        ),
        "data.seed": rl.seed,
        "data.dataloader_num_workers": 0,
        # Otherwise verl truncates a prompt that is too long on its left, and the system prompt is
        # lost.
        "data.filter_overlong_prompts": True,
        f"{_ROLLOUT}.n": rl.rollouts_per_prompt,
        **_same_names(profile, _ROLLOUT, "temperature", "tensor_model_parallel_size"),
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        f"{_ROLLOUT}.seed": rl.seed,
        f"{_ROLLOUT}.agent.default_agent_loop": AGENT,
        "trainer.device": trainer.device,
        "trainer.nnodes": trainer.nodes,
        "trainer.n_gpus_per_node": trainer.gpus_per_node,
        "trainer.project_name": profile.tracking.experiment,
        "trainer.experiment_name": run_name,
        "trainer.logger": ["console", "file"],
        "trainer.total_training_steps": rl.total_steps,
        "trainer.total_epochs": rl.total_steps,  # an epoch has a step or more, so the steps decide
        **_same_names(profile, "trainer", "save_freq", "test_freq", "val_before_train"),
        "hydra.output_subdir": None,
        **({} if trainer.ray_dashboard_url else own_ray),
        **_policy(profile, model),
        **_kl(profile),
        **(_critic(profile, model) if rl.algorithm == "ppo" else {}),
        **_engines(profile),
        **_rollout(profile),
        **(_on_cpu(profile) if trainer.device == "cpu" else {}),
    }


def _same_names(profile: Profile, owner: str, *names: str) -> Overrides:
    """Settings of the profile's section `rl` that verl has under the same names in this part of its
    configuration."""
    return {f"{owner}.{name}": getattr(profile.rl, name) for name in names}


def _policy(profile: Profile, model: Path) -> Overrides:
    rl = profile.rl
    given: Overrides = {
        "actor_rollout_ref.model.path": model,
        f"{_ACTOR}.strategy": "fsdp2",
        **_same_names(
            profile, _ACTOR, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"
        ),
        f"{_ACTOR}.shuffle": rl.ppo_epochs
        > 1,  # else each epoch has the same mini-batches; the critic's follow
        f"{_ACTOR}.clip_ratio": rl.clip_ratio,
        f"{_ACTOR}.clip_ratio_low": rl.clip_ratio,
        f"{_ACTOR}.clip_ratio_high": rl.clip_ratio,
        f"{_ACTOR}.policy_loss.loss_mode": rl.policy_loss,
        f"{_ACTOR}.entropy_coeff": rl.entropy_coefficient,
        f"{_ACTOR}.optim.lr": rl.actor_lr,
        f"{_ACTOR}.optim.clip_grad": rl.grad_clip,
        f"{_ACTOR}.fsdp_config.seed": rl.seed,
        f"{_ACTOR}.data_loader_seed": rl.seed,
        **_same_names(profile, f"{_ACTOR}.optim", *_SCHEDULE),
    }
    if rl.policy_loss in ("gspo", "sapo"):  # losses of whole sequences
        given[f"{_ACTOR}.loss_agg_mode"] = "seq-mean-token-mean"
    if rl.algorithm == "dr_grpo":
        given |= {
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
            f"{_ACTOR}.loss_scale_factor": rl.max_response_length,
        }
    if rl.lora_rank:
        given |= {
            # The frozen weights are those of the start model, and need not be in every checkpoint.
            f"+{_ACTOR}.checkpoint.save_lora_only": True,
            **_same_names(profile, "actor_rollout_ref.model", "lora_rank", "lora_alpha"),
        }
    return given


def _kl(profile: Profile) -> Overrides:
    rl, kl = profile.rl, profile.rl.kl
    if kl.mode == "off":
        return {}
    given: Overrides = {
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu
    }
    if kl.mode == "loss":
        return given | {
            f"{_ACTOR}.use_kl_loss": True,
            f"{_ACTOR}.kl_loss_coef": kl.coefficient,
            f"{_ACTOR}.kl_loss_type": kl.estimator or "low_var_kl",
        }
    given |= {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": kl.estimator or "kl",
        "algorithm.kl_ctrl.type": "fixed" if kl.target_kl is None else "adaptive",
        "algorithm.kl_ctrl.kl_coef": kl.coefficient,
    }
    if kl.target_kl is not None:
        given["algorithm.kl_ctrl.target_kl"] = kl.target_kl
        given["algorithm.kl_ctrl.horizon"] = (
            kl.horizon_steps * rl.train_batch_size * rl.rollouts_per_prompt
        )
    return given


def _critic(profile: Profile, model: Path) -> Overrides:
    rl = profile.rl
    rank = rl.lora_rank if rl.critic_lora_rank is None else rl.critic_lora_rank
    return {
        **(
            {"critic.model.lora_rank": rank, "critic.model.lora_alpha": rl.lora_alpha}
            if rank
            else {}
        ),
        "critic.model._target_": CRITIC_CONFIG,
        "critic.model.path": absolute_or_hub_id(rl.critic_model) if rl.critic_model else model,
        "critic.model.tokenizer_path": model,
        **({"+critic.model.revision": rl.critic_revision} if rl.critic_revision else {}),
        "critic.strategy": "fsdp2",
        "critic.ppo_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        "critic.optim.lr": rl.critic_lr,
        "critic.optim.clip_grad": rl.grad_clip * 0.5 / rl.value_coefficient,
        "critic.fsdp.seed": rl.seed,
        "critic.data_loader_seed": rl.seed,
        **_same_names(profile, "critic.optim", *_SCHEDULE),
    }


def _rollout(profile: Profile) -> Overrides:
    """verl's defaults for vLLM, or our own rollout on the CPU."""
    rl = profile.rl
    if profile.rollout_engine == "cpu":
        given: Overrides = {"trainer.v1.trainer_mode": "cpu_sync", f"{_ROLLOUT}.name": "hf_cpu"}
        return given | ({"actor_rollout_ref.model.lora.merge": True} if rl.lora_rank else {})
    given = {
        "trainer.v1.trainer_mode": TRAINER,
        f"{_ROLLOUT}.name": "vllm",
        f"{_ROLLOUT}.full_determinism": rl.deterministic,
        # Else the model's own limit, for which vLLM wants room in its cache.
        f"{_ROLLOUT}.max_model_len": rl.max_prompt_length + rl.max_response_length,
    }
    if rl.lora_rank:
        # vLLM loads the base itself, and verl then sends it the adapter alone. verl's default,
        # `dummy`, would send the base through FSDP as well. `layered_summon` gains nothing: FSDP2
        # gathers the adapter tensor by tensor.
        given[f"{_ROLLOUT}.load_format"] = "safetensors"
    return given


def _on_cpu(profile: Profile) -> Overrides:
    """One worker, fp32 throughout, and as few processes as verl allows."""
    rl = profile.rl
    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    given: Overrides = {
        f"{_ROLLOUT}.agent.num_workers": 1,
        f"{_ROLLOUT}.free_cache_engine": False,
        "reward.num_workers": 1,
        _UNITS: 1,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    for owner, engine in _models(profile):
        given[f"+{owner}.model.override_config.attn_implementation"] = "sdpa"
        given[f"{owner}.model.use_remove_padding"] = False
        given[f"{owner}.model.enable_gradient_checkpointing"] = False
        given[f"{engine}.full_determinism"] = True
        given[f"{engine}.use_torch_compile"] = False
        given[f"+{engine}.mixed_precision"] = fp32
    if not rl.lora_rank:
        given[f"{_ACTOR}.checkpoint.save_contents"] = [*_STATE, "hf_model"]
        # `hf_model` is saved for the export, and verl can't load it.
        given[f"{_ACTOR}.checkpoint.load_contents"] = _STATE
    if profile.rollout_engine == "vllm":
        given |= {
            "trainer.v1.trainer_mode": "cpu_vllm_sync",
            f"{_ROLLOUT}.dtype": "float32",
            f"{_ROLLOUT}.full_determinism": False,  # vLLM's batch-invariant kernels are for GPUs
            f"{_ROLLOUT}.enforce_eager": True,
            f"+{_ROLLOUT}.enable_sleep_mode": False,  # vLLM refuses it on the CPU
            f"{_ROLLOUT}.enable_chunked_prefill": False,  # a sample with a seed of its own fails with it on the CPU
            f"{_ROLLOUT}.gpu_memory_utilization": 0.1,
            f"+{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": _CPU_KV_CACHE,
            # Without GPUs the weights go through shared memory, which takes this much of /dev/shm.
            f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 64,
        }
    return given


def _models(profile: Profile) -> list[tuple[str, str]]:
    """Those that learn: verl's names of their configuration and of their engine's."""
    policy, critic = ("actor_rollout_ref", f"{_ACTOR}.fsdp_config"), ("critic", "critic.fsdp")
    return [policy, critic] if profile.rl.algorithm == "ppo" else [policy]


def _engines(profile: Profile) -> Overrides:
    """Of the models that learn. Without padding, sequences are packed, and flash attention alone
    keeps packed sequences apart."""
    rl = profile.rl
    given: Overrides = {}
    for owner, engine in _models(profile):
        given[f"+{owner}.model.override_config.attn_implementation"] = rl.attention
        given[f"{owner}.model.use_remove_padding"] = rl.attention == "flash_attention_2"
        given[f"{engine}.full_determinism"] = rl.deterministic
        given |= _same_names(profile, engine, "param_offload", "optimizer_offload")
    return given
