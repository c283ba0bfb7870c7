"""Sections about the student, its SFT and its evaluation."""

from typing import Any, Literal

from qinglan.config.base import EMBEDDED, Count, LocalPath, Positive, Section, Share


class Student(Section):
    """The model that learns."""

    base_model: LocalPath = EMBEDDED
    """Local folder or hub id, or `embedded` for a tiny Qwen3 that is pretrained on this machine."""
    model_type: str = "qwen3"
    """ms-swift's model type."""
    template: str = "qwen3_nothinking"
    """ms-swift's template; rewriting needs no thinking."""
    name: str = "student"
    """Key into `prices`."""
    max_new_tokens: Count = 64


class Sft(Section):
    """LoRA supervised fine-tuning; the names are ms-swift's."""

    lora_rank: Count = 16
    lora_alpha: Count = 32
    lora_dropout: Share = 0.0
    target_modules: str = "all-linear"
    learning_rate: Positive = 5e-5
    num_train_epochs: Positive = 3
    per_device_train_batch_size: Count = 2
    gradient_accumulation_steps: Count = 8
    max_length: Count = 2048
    warmup_ratio: Share = 0.05
    lr_scheduler_type: str = "cosine"
    torch_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    gradient_checkpointing: bool = True
    eval_steps: Count = 100
    save_steps: Count = 100
    save_total_limit: Count = 3
    logging_steps: Count = 10
    seed: int = 1
    deepspeed: str | None = None
    """ms-swift's deepspeed preset, such as `zero3`."""
    extra: dict[str, Any] = {}
    """More ms-swift arguments, passed through as they are."""


class Evaluate(Section):
    """Arms compared on the test split."""

    max_failed_share: Share = 0.05
    """Of the questions, without an answer from RAG, judge or a further teacher's service; with more failures the
    comparison would not be fair."""
    batch_size: Count = 64
    latency_queries: Count = 40
    """Queries timed one at a time, for p50 and p95."""
    teachers: tuple[str, ...] = ()
    """Names in `compare.teachers`: those are asked the test questions and compared too, for what their calls cost."""
    bootstrap_resamples: Count = 10_000
    seed: int = 0
    red_team: LocalPath | None = None
    """More cases for the red team: .jsonl in its schema, or a workbook whose rows' gold documents must come first
    (docs/red-team.md)."""
