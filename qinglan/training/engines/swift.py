"""ms-swift's command lines for SFT and for merging an adapter. Pure: nothing is started here.

A local model folder needs both `--model_type` and `--template`, and paths must be absolute, or
ms-swift looks on a model hub.
"""

import json
import math
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qinglan.config import Profile, withheld_secrets
from qinglan.cpu import cpu_env
from qinglan.errors import EngineError
from qinglan.runs.artifacts import write_jsonl
from qinglan.runs.launcher import ROW_CACHE, Command, JsonlTail

VLLM_PLUGIN = "qinglan_cpu"
"""Entry point of ours for vLLM (training/engines/vllm_plugin.py)."""
LOGGING_FILE = "logging.jsonl"
"""Log under the output directory, to which ms-swift appends one object per logged step."""

_SAME_NAMES = (
    "tuner_type",
    "gradient_checkpointing",
    "max_length",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_ratio",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "seed",
)
"""Settings of the profile's section `sft` that ms-swift calls the same."""
_ADAPTER_NAMES = ("target_modules", "lora_rank", "lora_alpha", "lora_dropout")
"""The same for settings of LoRA."""
_TRAINING_STATE = (
    "optimizer.*",
    "scheduler.*",
    "rng_state*",
    "global_step*",
    "latest",
    "trainer_state.json",
    "*.bin",
)
"""Files of a checkpoint that are not the model's."""
_ROWS_LINE = re.compile(r"train_dataset: (?:None|Dataset\b.*?num_rows: (\d+))", re.DOTALL)
"""Place in ms-swift's log that says how many training rows are not too long."""
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "MLFLOW_DISABLE_AUTO_LOGGING": "1",
}
_HUB_SECRETS = (
    "HF_TOKEN",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "MODELSCOPE_API_TOKEN",
)

# ms-swift's plug-in for vLLM needs torchvision. vLLM would bind its threads to cores that other
# processes use.
_VLLM_ON_CPU = {"VLLM_PLUGINS": VLLM_PLUGIN, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def engine_python(profile: Profile) -> str:
    """The interpreter of the trainer's environment; on a cluster without `trainer.python`, the
    nodes' `python`."""
    if profile.trainer.python:
        return profile.trainer.python
    return "python" if profile.trainer.ray_dashboard_url else sys.executable


def engine_env(profile: Profile, model: str, *secrets: str | None) -> dict[str, str]:
    """Environment of an engine, with only these secrets; hubs are switched off where the model is a
    local folder."""
    env: dict[str, str] = {}
    if profile.trainer.device == "cpu":
        env = cpu_env(profile.trainer.threads, profile.sft.torch_dtype) | _VLLM_ON_CPU
    is_path = Path(absolute_or_hub_id(model)).is_absolute()
    hub_secrets = () if is_path else _HUB_SECRETS
    env |= withheld_secrets(profile, *secrets, *hub_secrets)
    if Path(model).is_dir():
        env |= _ENV
    return env


def sft_command(
    profile: Profile,
    *,
    model: str,
    train_file: Path,
    dev_file: Path,
    output_dir: Path,
    resume_from: Path | None,
) -> Command:
    """SFT of `model` on chat JSONL; checkpoints go to `output_dir/checkpoint-N`."""
    sft = profile.sft
    names = list(_SAME_NAMES)
    if sft.tuner_type == "lora":
        names += _ADAPTER_NAMES
    arguments: dict[str, Any] = {
        **model_arguments(profile, model),
        **{name: getattr(sft, name) for name in names},
        "bf16": sft.torch_dtype == "bfloat16",
        "fp16": sft.torch_dtype == "float16",
        "dataset": train_file.resolve(),
        "val_dataset": dev_file.resolve(),
        # Seed of the rows' order, which ms-swift begins at 42 whatever `seed` is.
        "data_seed": 41 + sft.seed,
        "output_dir": output_dir.resolve(),
        "add_version": False,
        "check_model": False,
        "load_from_cache_file": False,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "per_device_eval_batch_size": sft.per_device_train_batch_size,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "report_to": "none",
    }
    env = engine_env(profile, model)
    if Path(model).is_dir():
        # Not for a hub's model: its weights are in that cache too.
        env["MODELSCOPE_CACHE"] = str(output_dir.resolve().parent / ROW_CACHE)
    gpus = profile.trainer.gpus_per_node
    if profile.trainer.device == "cpu":
        gpus = 0
        arguments |= {"use_cpu": True, "device_map": "cpu", "full_determinism": True}
    if sft.deepspeed:
        arguments["deepspeed"] = sft.deepspeed
    if resume_from:
        arguments["resume_from_checkpoint"] = resume_from.resolve()
    return Command(swift_argv(profile, "sft", arguments | sft.extra, processes=gpus), env, gpus)


def merge_command(profile: Profile, *, adapter: Path, output_dir: Path, model: str) -> Command:
    """Merge a LoRA adapter into its base model, written as a plain Hugging Face folder."""
    arguments = model_arguments(profile, model) | {
        "adapters": adapter.resolve(),
        "merge_lora": True,
        "output_dir": output_dir.resolve(),
    }
    gpus = profile.trainer.gpus_per_node
    if profile.trainer.device == "cpu":
        gpus = 0
        arguments["device_map"] = "cpu"
    return Command(swift_argv(profile, "export", arguments), engine_env(profile, model), gpus)


def copy_model(checkpoint: Path, folder: Path) -> None:
    """Copy the model out of a checkpoint of all parameters, as a plain Hugging Face folder."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(*_TRAINING_STATE))


def model_arguments(profile: Profile, model: str) -> dict[str, Any]:
    """Arguments of all of ms-swift's commands that say which model it is; ms-swift does not read
    the revision of a folder's model."""
    student = profile.student
    arguments: dict[str, Any] = {
        "model": absolute_or_hub_id(model),
        "model_type": student.model_type,
        "template": student.template,
    }
    if student.revision:
        arguments["model_revision"] = student.revision
    arguments["torch_dtype"] = profile.sft.torch_dtype
    return arguments


def best_checkpoint(output_dir: Path) -> Path:
    """The checkpoint with the lowest loss on the dev split, the newest where none was evaluated.

    Raises:
        EngineError: there is no checkpoint, or none with a finite loss.
    """
    newest = newest_checkpoint(output_dir)
    if newest is None:
        raise EngineError(f"ms-swift ended without a checkpoint under {output_dir}; see its log")
    # The newest checkpoint's state has the history of all.
    state = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))
    losses: dict[Path, float] = {}
    for entry in state.get("log_history", ()):
        if "eval_loss" not in entry:
            continue
        folder = output_dir / f"checkpoint-{entry['step']}"
        if folder.is_dir():
            losses[folder] = entry["eval_loss"]
    if not losses:
        return newest
    finite_losses = {folder: loss for folder, loss in losses.items() if math.isfinite(loss)}
    if not finite_losses:
        raise EngineError(
            "SFT diverged: no checkpoint's loss on dev is a finite number; lower sft.learning_rate"
        )
    return min(finite_losses, key=lambda folder: finite_losses[folder])


def newest_checkpoint(output_dir: Path) -> Path | None:
    """The complete checkpoint with the latest step; None where there is none."""
    by_step: dict[int, Path] = {}
    for folder in output_dir.glob("checkpoint-*"):
        step = folder.name.rpartition("-")[2]
        # ms-swift writes the trainer's state last.
        if step.isdigit() and (folder / "trainer_state.json").exists():
            by_step[int(step)] = folder
    return by_step[max(by_step)] if by_step else None


def rewind_log(output_dir: Path, checkpoint: Path | None) -> None:
    """Cut the log to complete steps up to `checkpoint`, from which training goes on.

    ms-swift only appends, so the steps between the checkpoint and the kill would be there twice.
    """
    log = output_dir / LOGGING_FILE
    if not log.exists():
        return
    last_step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else -1
    kept_entries = []
    for entry in JsonlTail(log).new():
        step_and_total = logged_step(entry)
        if step_and_total and step_and_total[0] <= last_step:
            kept_entries.append(entry)
    write_jsonl(log, kept_entries)


def logged_step(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """Step and number of steps of a line in the log; None for the summary at the end."""
    step_of_total = entry.get("global_step/max_steps")
    if not step_of_total:
        return None
    step, total = map(int, step_of_total.split("/"))
    return step, total


def left_out(rows: int, log: str) -> int:
    """Number of the `rows` for training that ms-swift left out as longer than `max_length`, by its
    log.

    The log has the number of rows that are left, None if there are none, in each attempt.
    """
    rows_line = _ROWS_LINE.search(log)
    if rows_line is None:
        return 0
    return rows - int(rows_line[1] or 0)


def swift_argv(
    profile: Profile, verb: str, arguments: dict[str, Any], *, processes: int = 0
) -> list[str]:
    """`swift VERB` in the trainer's environment; a list becomes several words, a dictionary
    JSON."""
    argv = [engine_python(profile)]
    if processes > 1:
        # As `swift` itself starts several processes, whose NPROC_PER_NODE its modules do not read.
        argv += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    argv += ["-m", f"swift.cli.{verb}"]
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        argv += [f"--{name}", *map(_word, values)]
    return argv


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | dict) else str(value)


def absolute_or_hub_id(model: str) -> str:
    """A local folder's absolute path, as the engine may start in another folder; a hub id
    unchanged."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model
