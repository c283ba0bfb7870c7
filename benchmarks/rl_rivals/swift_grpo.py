"""GRPO with ms-swift (`swift rlhf --rlhf_type grpo`), as a process whose settings are a JSON file.

A step of ours, one batch of samples, is several optimizer steps of ms-swift's. Everything that
isn't set here is ms-swift's default: rewards scaled by their group, the `grpo` loss, AdamW with its
weight decay.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from swift.pipelines import rlhf_main

PLUGIN = Path(__file__).with_name("swift_reward.py")
TRAINING_ENV = "QINGLAN_RIVAL_TRAINING"


def main(path: str) -> None:
    """Train and save checkpoints."""
    training = json.loads(Path(path).read_text(encoding="utf-8"))
    os.environ[TRAINING_ENV] = path
    prompts = Path(path).with_name("prompts.jsonl")
    rows = pq.read_table(training["prompts"], columns=["prompt", "extra_info"]).to_pylist()
    with prompts.open("w", encoding="utf-8") as stream:
        for row in rows:
            baseline = json.dumps(row["extra_info"], ensure_ascii=False)
            record = {"messages": row["prompt"], "baseline": baseline}
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
    argv: list[str] = []
    for name, value in arguments(training, prompts).items():
        argv += [f"--{name}", str(value)]
    rlhf_main(argv)


def arguments(training: dict[str, Any], prompts: Path) -> dict[str, Any]:
    """ms-swift's arguments."""
    updates = training["samples"] // training["update"]
    return {
        "rlhf_type": "grpo",
        "model": training["model"],
        "model_type": training["model_type"],
        "template": training["template"],
        "tuner_type": "full",
        "torch_dtype": "float32",
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "device_map": "cpu",
        "attn_impl": "sdpa",
        "gradient_checkpointing": False,
        "check_model": False,
        "dataset": prompts,
        "split_dataset_ratio": 0,
        "load_from_cache_file": False,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "max_length": training["max_prompt_length"],
        "max_completion_length": training["max_response_length"],
        "external_plugins": PLUGIN,
        "reward_funcs": "qinglan",
        "callbacks": "qinglan_clock",
        "num_generations": training["rollouts"],
        "per_device_train_batch_size": training["update"],
        "generation_batch_size": training["samples"],
        "gradient_accumulation_steps": 1,
        "temperature": training["temperature"],
        "beta": 0,
        "epsilon": training["clip_ratio"],
        "learning_rate": training["learning_rate"],
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": json.dumps({"min_lr_rate": training["min_lr_ratio"]}),
        "warmup_ratio": 0,
        "max_grad_norm": training["grad_clip"],
        "max_steps": training["steps"] * updates,
        "save_steps": training["save_every"] * updates,
        "save_strategy": "steps",
        "eval_strategy": "no",
        "save_only_model": True,
        "output_dir": training["output"],
        "add_version": False,
        "logging_steps": updates,
        "seed": training["seed"],
        "report_to": "none",
    }


if __name__ == "__main__":
    main(sys.argv[1])
