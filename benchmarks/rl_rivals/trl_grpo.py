"""GRPO with TRL's GRPOTrainer, as a process whose settings are a JSON file.

A step of ours, one batch of samples, is several optimizer steps of TRL's. Everything that isn't set
here is TRL's default: the `dapo` loss, rewards scaled by their group, no KL, AdamW without weight
decay.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from clock import Clock
from datasets import Dataset
from scoring import Scoring
from trl import GRPOConfig, GRPOTrainer


def main(path: str) -> None:
    """Train and save checkpoints."""
    training = json.loads(Path(path).read_text(encoding="utf-8"))
    scoring = Scoring(training)
    rows = pq.read_table(training["prompts"], columns=["prompt", "extra_info"]).to_pylist()

    def reward(completions: list[Any], extra_info: list[dict[str, Any]], **_: Any) -> list[float]:
        return scoring.scores(extra_info, [completion[0]["content"] for completion in completions])

    trainer = GRPOTrainer(
        model=training["model"],
        reward_funcs=reward,
        args=config(training),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock(training)],
    )
    trainer.train()


def config(training: dict[str, Any]) -> GRPOConfig:
    """TRL's settings."""
    updates = training["samples"] // training["update"]
    return GRPOConfig(
        output_dir=training["output"],
        per_device_train_batch_size=training["update"],
        generation_batch_size=training["samples"],
        num_generations=training["rollouts"],
        max_steps=training["steps"] * updates,
        save_steps=training["save_every"] * updates,
        save_only_model=True,
        learning_rate=training["learning_rate"],
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": training["min_lr_ratio"]},
        max_grad_norm=training["grad_clip"],
        epsilon=training["clip_ratio"],
        temperature=training["temperature"],
        max_completion_length=training["max_response_length"],
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        seed=training["seed"],
        logging_steps=updates,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
