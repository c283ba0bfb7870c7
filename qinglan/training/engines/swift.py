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
from qinglan.errors import EngineError
from qinglan.runs.artifacts import write_jsonl
from qinglan.runs.cpu import cpu_env
from qinglan.runs.launcher import ROW_CACHE, Command, JsonlTail

VLLM_PLUGIN = "qinglan_cpu"
"""Our entry point for vLLM (training/engines/vllm_plugin.py)."""
LOGGING_FILE = "logging.jsonl"
"""Under the output directory; ms-swift appends one object per logged step."""

_ADAPTER = ("target_modules", "lora_rank", "lora_alpha", "lora_dropout")
_SAME_NAMES = (
    *(
        "tuner_type",
        "gradient_checkpointing",
        "max_length",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_ratio",
    ),
    *(
        "num_train_epochs",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "eval_steps",
        "save_steps",
    ),
    *("save_total_limit", "logging_steps", "seed"),
)
"""Of the profile's section `sft`, what ms-swift calls the same; `_ADAPTER` is for LoRA alone."""
_TRAINING_STATE = (
    "optimizer.*",
    "scheduler.*",
    "rng_state*",
    "global_step*",
    "latest",
    "trainer_state.json",
    "*.bin",
)
_KEPT = re.compile(r"train_dataset: (?:None|Dataset\b.*?num_rows: (\d+))", re.DOTALL)
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
    return profile.trainer.python or (
        "python" if profile.trainer.ray_dashboard_url else sys.executable
    )


def engine_env(profile: Profile, model: str, *secrets: str | None) -> dict[str, str]:
    """Environment of an engine, with only these secrets; hubs are switched off where the model is a
    local folder."""
    on_cpu = profile.trainer.device == "cpu"
    env = cpu_env(profile.trainer.threads, profile.sft.torch_dtype) | _VLLM_ON_CPU if on_cpu else {}
    of_hub = () if Path(absolute_or_hub_id(model)).is_absolute() else _HUB_SECRETS
    return (
        env | withheld_secrets(profile, *secrets, *of_hub) | (_ENV if Path(model).is_dir() else {})
    )


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
    arguments: dict[str, Any] = {
        **model_arguments(profile, model),
        **{
            name: getattr(sft, name)
            for name in (*_SAME_NAMES, *(_ADAPTER if sft.tuner_type == "lora" else ()))
        },
        "bf16": sft.torch_dtype == "bfloat16",
        "fp16": sft.torch_dtype == "float16",
        "dataset": train_file.resolve(),
        "val_dataset": dev_file.resolve(),
        "data_seed": 41
        + sft.seed,  # of the rows' order, which ms-swift begins at 42 whatever `seed` is
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
    env, gpus = engine_env(profile, model), profile.trainer.gpus_per_node
    if Path(model).is_dir():  # of a model on a hub, the weights are in that cache too
        env |= {"MODELSCOPE_CACHE": str(output_dir.resolve().parent / ROW_CACHE)}
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
    merged = {"adapters": adapter.resolve(), "merge_lora": True, "output_dir": output_dir.resolve()}
    arguments = model_arguments(profile, model) | merged
    gpus = profile.trainer.gpus_per_node
    if profile.trainer.device == "cpu":
        arguments["device_map"], gpus = "cpu", 0
    return Command(swift_argv(profile, "export", arguments), engine_env(profile, model), gpus)


def copy_model(checkpoint: Path, folder: Path) -> None:
    """What a checkpoint of all parameters holds of the model, as a plain Hugging Face folder."""
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns(*_TRAINING_STATE))


def model_arguments(profile: Profile, model: str) -> dict[str, Any]:
    """What each of ms-swift's commands is told of the model; of a folder's it does not read the
    revision."""
    student = profile.student
    known = {
        "model": absolute_or_hub_id(model),
        "model_type": student.model_type,
        "template": student.template,
    }
    known |= {"model_revision": student.revision} if student.revision else {}
    return known | {"torch_dtype": profile.sft.torch_dtype}


def best_checkpoint(output_dir: Path) -> Path:
    """That with the lowest loss on the dev split, the newest where none was evaluated; raises
    `EngineError` if none."""
    if (newest := newest_checkpoint(output_dir)) is None:
        raise EngineError(f"ms-swift ended without a checkpoint under {output_dir}; see its log")
    history = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8")).get(
        "log_history", ()
    )
    losses = {
        output_dir / f"checkpoint-{each['step']}": each["eval_loss"]
        for each in history
        if "eval_loss" in each
    }
    saved = {folder: loss for folder, loss in losses.items() if folder.is_dir()}
    finite = [folder for folder in saved if math.isfinite(saved[folder])]
    if saved and not finite:
        raise EngineError(
            "SFT diverged: no checkpoint's loss on dev is a finite number; lower sft.learning_rate"
        )
    return min(finite, key=lambda folder: saved[folder], default=newest)


def newest_checkpoint(output_dir: Path) -> Path | None:
    found = {
        int(step): folder
        for folder in output_dir.glob("checkpoint-*")
        if (step := folder.name.rpartition("-")[2]).isdigit()
        and (folder / "trainer_state.json").exists()
    }
    return found[max(found)] if found else None


def rewind_log(output_dir: Path, checkpoint: Path | None) -> None:
    """Cut the log to complete steps up to `checkpoint`, from which training goes on.

    ms-swift only appends, so the steps between the checkpoint and the kill would be there twice.
    """
    log = output_dir / LOGGING_FILE
    if not log.exists():
        return
    last = int(checkpoint.name.rpartition("-")[2]) if checkpoint else -1
    write_jsonl(
        log,
        [
            entry
            for entry in JsonlTail(log).new()
            if (step := logged_step(entry)) and step[0] <= last
        ],
    )


def logged_step(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """Step and number of steps of a line in the log; None for the summary at the end."""
    place = entry.get("global_step/max_steps")
    if not place:
        return None
    step, total = map(int, place.split("/"))
    return step, total


def left_out(rows: int, log: str) -> int:
    """How many of the `rows` for training ms-swift left out as longer than `max_length`, by its
    log.

    The log has the rows that are left, None if there are none, in each attempt.
    """
    return rows - int(kept[1] or 0) if (kept := _KEPT.search(log)) else 0


def swift_argv(
    profile: Profile, verb: str, arguments: dict[str, Any], *, processes: int = 0
) -> list[str]:
    """`swift VERB` in the trainer's environment; a list becomes several words, a dictionary
    JSON."""
    # As `swift` itself starts several processes, whose NPROC_PER_NODE its modules do not read.
    several = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        if processes > 1
        else []
    )
    argv = [engine_python(profile), *several, "-m", f"swift.cli.{verb}"]
    for name, value in arguments.items():
        words = value if isinstance(value, list) else [value]
        argv += [
            f"--{name}",
            *(json.dumps(word) if isinstance(word, bool | dict) else str(word) for word in words),
        ]
    return argv


def absolute_or_hub_id(model: str) -> str:
    """A local folder's absolute path, as the engine may start in another folder; a hub id
    unchanged."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model
