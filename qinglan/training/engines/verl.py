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

vLLM's rollout is the same on the CPU as on GPUs: `_vllm_on_cpu` alone says what its CPU build
needs.

The prompt is rendered without `enable_thinking`, so Qwen3 gets no empty `<think>` block: ms-swift's
template `qwen3_nothinking` trains without one as well.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from qinglan.config import Profile
from qinglan.runs.launcher import ROW_CACHE, Command
from qinglan.training.engines.swift import absolute_or_hub_id, engine_env, engine_python

RAY_SECRETS = ("RAY_AUTH_TOKEN", "RAY_TLS_SERVER_KEY")
"""Environment variables by which a Ray node is let into its cluster."""
TRAINER = "qinglan_sync"
"""`trainer.v1.trainer_mode` of our trainer on GPUs; on the CPU it is `cpu_vllm_sync` with vLLM,
`cpu_sync` without."""
REWARD_FUNCTION = "pkg://qinglan.training.reward_service.function"
AGENT = "seeded_single_turn"
"""Name of the agent loop in agents.yaml."""
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

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_ESTIMATORS = {"ppo": "gae", "dr_grpo": "grpo"}
"""Advantage estimators that verl calls otherwise than `rl.algorithm` does."""
_SCHEDULE = ("lr_scheduler_type", "min_lr_ratio", "lr_warmup_steps_ratio")
_STATE = ["model", "optimizer", "extra"]
"""Parts of a checkpoint that verl can load."""
_CPU_KV_CACHE_BYTES = 256 << 20
"""Memory of vLLM's cache on the CPU, where vLLM would take a share of the machine's."""
_LENGTH_LINES = re.compile(r"(filter )?dataset len: (\d+)|selected (\d+) random samples")
"""Lines of verl's log that say how many rows a dataset has, before and after its filter."""
_STORAGE_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:-]*")
_ENV = {
    "HYDRA_FULL_ERROR": "1",
    # Workers that Ray starts in advance have nothing imported and take CPU time from those that are
    # needed.
    "RAY_prestart_worker_first_driver": "0",
}


class _LearningModel(NamedTuple):
    """Names of a model's sections in verl's configuration."""

    model: str
    engine: str


_POLICY = _LearningModel("actor_rollout_ref.model", f"{_ACTOR}.fsdp_config")
_CRITIC = _LearningModel("critic.model", "critic.fsdp")


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
    overrides = _overrides(profile, model.resolve(), run_name)
    overrides |= {
        "data.train_files": train_file.resolve(),
        "data.val_files": dev_file.resolve(),
        "trainer.default_local_dir": output_dir.resolve(),
        "hydra.run.dir": output_dir.resolve() / "hydra",
        "+reward.custom_reward_function.reward_kwargs.config_path": reward_config.resolve(),
        "+qinglan.trainer_settings": trainer_settings.resolve(),
    }
    overrides |= profile.rl.extra
    argv = [engine_python(profile), "-m", "qinglan.training.engines.ppo"]
    argv += [f"{key}={hydra_value(value)}" for key, value in overrides.items()]
    secrets_of_reward = (profile.rag.api_key_env, profile.judge.api_key_env, profile.ledger.url_env)
    # verl starts a Ray of its own outside of a cluster.
    env = _environment(profile, model, *secrets_of_reward, *RAY_SECRETS)
    env["VERL_FILE_LOGGER_PATH"] = str(metrics_path.resolve())
    env["HF_DATASETS_CACHE"] = str(output_dir.resolve().parent / ROW_CACHE)
    return Command(argv, env)


def export_command(
    profile: Profile, *, checkpoint: Path, base_model: Path, output_dir: Path
) -> Command:
    """Make a Hugging Face folder of a checkpoint (`global_step_N`); `base_model` is what training
    started from."""
    folders = [str(folder.resolve()) for folder in (checkpoint, base_model, output_dir)]
    argv = [engine_python(profile), "-m", "qinglan.training.engines.export", *folders]
    gpus = 1 if profile.trainer.device == "cuda" else 0
    return Command(argv, _environment(profile, base_model), gpus=gpus)


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
        items = (f"{key}:{hydra_value(item)}" for key, item in value.items())
        return "{" + ",".join(items) + "}"
    text = str(value)
    is_keyword = text.lower() in {"true", "false", "null", "nan", "inf"}
    if _NEEDS_NO_QUOTES.fullmatch(text) and not is_keyword:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def left_out(log: str) -> int:
    """Number of prompts for training that verl left out as longer than `max_prompt_length`, by its
    log.

    The log has the number of prompts before and after, for the training file first.
    """
    before = 0
    for is_filtered, length, selected in _LENGTH_LINES.findall(log):
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
    """All overrides but those of the run's files and `rl.extra`; a later section wins."""
    overrides = _algorithm(profile)
    overrides["reward.custom_reward_function.path"] = REWARD_FUNCTION
    overrides |= _data(profile)
    overrides |= _sampling(profile)
    overrides |= _trainer(profile, run_name)
    overrides["hydra.output_subdir"] = None
    if not profile.trainer.ray_dashboard_url:
        overrides |= _own_ray(profile)
    overrides |= _policy(profile, model)
    overrides |= _kl(profile)
    if profile.rl.algorithm == "ppo":
        overrides |= _critic(profile, model)
    overrides |= _engines(profile)
    overrides |= _rollout(profile)
    if profile.trainer.device == "cpu":
        overrides |= _on_cpu(profile)
    return overrides


def _same_names(profile: Profile, owner: str, *names: str) -> Overrides:
    """Settings of the profile's section `rl` that verl has under the same names in this part of its
    configuration."""
    return {f"{owner}.{name}": getattr(profile.rl, name) for name in names}


def _algorithm(profile: Profile) -> Overrides:
    rl = profile.rl
    samples_with_policy_itself = profile.rollout_engine == "cpu" and not rl.lora_rank
    return {
        "algorithm.adv_estimator": _ESTIMATORS.get(rl.algorithm, rl.algorithm),
        **_same_names(profile, "algorithm", "gamma", "lam"),
        "algorithm.rollout_correction.bypass_mode": samples_with_policy_itself,
    }


def _data(profile: Profile) -> Overrides:
    return {
        **_same_names(
            profile, "data", "train_batch_size", "max_prompt_length", "max_response_length"
        ),
        "data.seed": profile.rl.seed,
        "data.dataloader_num_workers": 0,
        # Otherwise verl truncates a prompt that is too long on its left, and the system prompt is
        # lost.
        "data.filter_overlong_prompts": True,
    }


def _sampling(profile: Profile) -> Overrides:
    """Settings that every rollout engine has."""
    rl = profile.rl
    return {
        f"{_ROLLOUT}.n": rl.rollouts_per_prompt,
        **_same_names(profile, _ROLLOUT, "temperature", "tensor_model_parallel_size"),
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        f"{_ROLLOUT}.seed": rl.seed,
        f"{_ROLLOUT}.agent.default_agent_loop": AGENT,
    }


def _trainer(profile: Profile, run_name: str) -> Overrides:
    trainer = profile.trainer
    return {
        "trainer.device": trainer.device,
        "trainer.nnodes": trainer.nodes,
        "trainer.n_gpus_per_node": trainer.gpus_per_node,
        "trainer.project_name": profile.tracking.experiment,
        "trainer.experiment_name": run_name,
        "trainer.logger": ["console", "file"],
        "trainer.total_training_steps": profile.rl.total_steps,
        # An epoch has a step or more, so the steps decide.
        "trainer.total_epochs": profile.rl.total_steps,
        **_same_names(profile, "trainer", "save_freq", "test_freq", "val_before_train"),
    }


def _own_ray(profile: Profile) -> Overrides:
    """A Ray of the training's own, outside of a cluster's job.

    Otherwise `ray.init` would join what RAY_ADDRESS names, or a cluster that `ray start` once left
    in /tmp/ray/ray_current_cluster.
    """
    return {
        "+ray_kwargs.ray_init.address": "local",
        _STORAGE_UNITS: 1,
        # Cores are only counted. With fewer than verl reserves, it would wait for ever.
        "ray_kwargs.ray_init.num_cpus": 16 + 3 * profile.trainer.gpus_per_node,
    }


def _policy(profile: Profile, model: Path) -> Overrides:
    rl = profile.rl
    overrides: Overrides = {
        "actor_rollout_ref.model.path": model,
        f"{_ACTOR}.strategy": "fsdp2",
        **_same_names(
            profile, _ACTOR, "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_epochs"
        ),
        # Without it each epoch has the same mini-batches. The critic follows this setting.
        f"{_ACTOR}.shuffle": rl.ppo_epochs > 1,
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
    is_loss_of_sequences = rl.policy_loss in ("gspo", "sapo")
    if is_loss_of_sequences:
        overrides[f"{_ACTOR}.loss_agg_mode"] = "seq-mean-token-mean"
    if rl.algorithm == "dr_grpo":
        overrides |= {
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
            f"{_ACTOR}.loss_scale_factor": rl.max_response_length,
        }
    if rl.lora_rank:
        overrides |= {
            # The frozen weights are those of the start model, and need not be in every checkpoint.
            f"+{_ACTOR}.checkpoint.save_lora_only": True,
            **_same_names(profile, "actor_rollout_ref.model", "lora_rank", "lora_alpha"),
        }
    return overrides


def _kl(profile: Profile) -> Overrides:
    """The penalty for leaving the reference, in the loss or in the reward."""
    rl = profile.rl
    kl = rl.kl
    if kl.mode == "off":
        return {}
    overrides: Overrides = {
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu
    }
    if kl.mode == "loss":
        overrides |= {
            f"{_ACTOR}.use_kl_loss": True,
            f"{_ACTOR}.kl_loss_coef": kl.coefficient,
            f"{_ACTOR}.kl_loss_type": kl.estimator or "low_var_kl",
        }
        return overrides
    overrides |= {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": kl.estimator or "kl",
        "algorithm.kl_ctrl.type": "fixed" if kl.target_kl is None else "adaptive",
        "algorithm.kl_ctrl.kl_coef": kl.coefficient,
    }
    if kl.target_kl is not None:
        samples_per_step = rl.train_batch_size * rl.rollouts_per_prompt
        overrides["algorithm.kl_ctrl.target_kl"] = kl.target_kl
        overrides["algorithm.kl_ctrl.horizon"] = kl.horizon_steps * samples_per_step
    return overrides


def _critic(profile: Profile, model: Path) -> Overrides:
    rl = profile.rl
    overrides: Overrides = {}
    lora_rank = rl.lora_rank_of_critic
    if lora_rank:
        overrides["critic.model.lora_rank"] = lora_rank
        overrides["critic.model.lora_alpha"] = rl.lora_alpha
    critic_model = absolute_or_hub_id(rl.critic_model) if rl.critic_model else model
    overrides |= {
        "critic.model._target_": CRITIC_CONFIG,
        "critic.model.path": critic_model,
        "critic.model.tokenizer_path": model,
    }
    if rl.critic_revision:
        overrides["+critic.model.revision"] = rl.critic_revision
    overrides |= {
        "critic.strategy": "fsdp2",
        "critic.ppo_micro_batch_size_per_gpu": rl.ppo_micro_batch_size_per_gpu,
        "critic.optim.lr": rl.critic_lr,
        # verl's loss of the critic has a fixed weight of 0.5; see the module's docstring.
        "critic.optim.clip_grad": rl.grad_clip * 0.5 / rl.value_coefficient,
        "critic.fsdp.seed": rl.seed,
        "critic.data_loader_seed": rl.seed,
        **_same_names(profile, "critic.optim", *_SCHEDULE),
    }
    return overrides


def _rollout(profile: Profile) -> Overrides:
    """verl's defaults for vLLM, or our own rollout on the CPU."""
    rl = profile.rl
    if profile.rollout_engine == "cpu":
        overrides: Overrides = {"trainer.v1.trainer_mode": "cpu_sync", f"{_ROLLOUT}.name": "hf_cpu"}
        if rl.lora_rank:
            overrides["actor_rollout_ref.model.lora.merge"] = True
        return overrides
    overrides = {
        "trainer.v1.trainer_mode": TRAINER,
        f"{_ROLLOUT}.name": "vllm",
        f"{_ROLLOUT}.full_determinism": rl.deterministic,
        # Otherwise the model's own limit, for which vLLM wants room in its cache.
        f"{_ROLLOUT}.max_model_len": rl.max_prompt_length + rl.max_response_length,
    }
    if rl.lora_rank:
        # vLLM loads the base itself, and verl then sends it the adapter alone. verl's default,
        # `dummy`, would send the base through FSDP as well. `layered_summon` gains nothing: FSDP2
        # gathers the adapter tensor by tensor.
        overrides[f"{_ROLLOUT}.load_format"] = "safetensors"
    return overrides


def _on_cpu(profile: Profile) -> Overrides:
    """One worker, fp32 throughout, and as few processes as verl allows."""
    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    overrides: Overrides = {
        f"{_ROLLOUT}.agent.num_workers": 1,
        f"{_ROLLOUT}.free_cache_engine": False,
        "reward.num_workers": 1,
        _STORAGE_UNITS: 1,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }
    for model, engine in _learning_models(profile):
        overrides[f"+{model}.override_config.attn_implementation"] = "sdpa"
        overrides[f"{model}.use_remove_padding"] = False
        overrides[f"{model}.enable_gradient_checkpointing"] = False
        overrides[f"{engine}.full_determinism"] = True
        overrides[f"{engine}.use_torch_compile"] = False
        overrides[f"+{engine}.mixed_precision"] = fp32
    if not profile.rl.lora_rank:
        overrides[f"{_ACTOR}.checkpoint.save_contents"] = [*_STATE, "hf_model"]
        # `hf_model` is saved for the export, and verl can't load it.
        overrides[f"{_ACTOR}.checkpoint.load_contents"] = _STATE
    if profile.rollout_engine == "vllm":
        overrides |= _vllm_on_cpu()
    return overrides


def _vllm_on_cpu() -> Overrides:
    return {
        "trainer.v1.trainer_mode": "cpu_vllm_sync",
        f"{_ROLLOUT}.dtype": "float32",
        # vLLM's batch-invariant kernels are for GPUs.
        f"{_ROLLOUT}.full_determinism": False,
        f"{_ROLLOUT}.enforce_eager": True,
        # vLLM refuses it on the CPU.
        f"+{_ROLLOUT}.enable_sleep_mode": False,
        # A sample with a seed of its own fails with it on the CPU.
        f"{_ROLLOUT}.enable_chunked_prefill": False,
        f"{_ROLLOUT}.gpu_memory_utilization": 0.1,
        f"+{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES,
        # Without GPUs the weights go through shared memory, which takes this much of /dev/shm.
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 64,
    }


def _learning_models(profile: Profile) -> list[_LearningModel]:
    return [_POLICY, _CRITIC] if profile.rl.algorithm == "ppo" else [_POLICY]


def _engines(profile: Profile) -> Overrides:
    """Engine settings of the models that learn.

    Without padding, sequences are packed, and flash attention alone keeps packed sequences apart.
    """
    rl = profile.rl
    overrides: Overrides = {}
    for model, engine in _learning_models(profile):
        overrides[f"+{model}.override_config.attn_implementation"] = rl.attention
        overrides[f"{model}.use_remove_padding"] = rl.attention == "flash_attention_2"
        overrides[f"{engine}.full_determinism"] = rl.deterministic
        overrides |= _same_names(profile, engine, "param_offload", "optimizer_offload")
    return overrides
