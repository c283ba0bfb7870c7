"""Export of a verl checkpoint as a folder that `from_pretrained` loads.

    python -m qinglan.training.engines.export CHECKPOINT BASE_MODEL OUTPUT_DIR

A checkpoint with the whole model in Hugging Face form (full fine-tuning on the CPU, fp32) is
copied. From one with an adapter alone, verl's merger writes the adapter, which is then merged into
the base model in the base's precision. Any other goes through verl's merger, which writes bf16.
"""

# mypy: allow-subclassing-any

import json
import shutil
import sys
import tempfile
from pathlib import Path

from qinglan.errors import ArtifactError

ADAPTER = "adapter"
"""Folder beside the exported one, for runs with LoRA: the adapter alone."""


def export(checkpoint: Path, base_model: Path, output_dir: Path) -> None:
    """Write `output_dir` from the folder `global_step_N` of a training that started from
    `base_model`.

    An earlier export there is replaced.
    """
    actor = checkpoint / "actor"
    if not (actor / "fsdp_config.json").exists():
        raise ArtifactError(f"{checkpoint} is no verl checkpoint: it has no actor/fsdp_config.json")
    # The folder gets its name when it is whole, so that half an export is never taken for one.
    partial = output_dir.with_name(output_dir.name + ".partial")
    for earlier in (output_dir, output_dir.with_name(ADAPTER), partial):
        shutil.rmtree(earlier, ignore_errors=True)
    partial.mkdir(parents=True)
    whole_model = actor / "huggingface"
    if (actor / "lora_train_meta.json").exists():
        _merge_adapter(actor, base_model, partial)
    elif any(whole_model.glob("*.safetensors")):
        shutil.copytree(whole_model, partial, dirs_exist_ok=True)
        _record_dtype(partial)
    else:
        _merge_shards(actor, partial)
    partial.rename(output_dir)


def _record_dtype(folder: Path) -> None:
    """Write the weights' real precision into the model's configuration.

    verl writes fp32 weights under a configuration that says bf16, and `from_pretrained` believes
    the latter.
    """
    from safetensors import safe_open

    with safe_open(next(folder.glob("*.safetensors")), framework="pt") as weights:
        dtype = weights.get_tensor(next(iter(weights.keys()))).dtype
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _merge_shards(actor: Path, target: Path, *, adapter_only: bool = False) -> None:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    class AdapterMerger(FSDPModelMerger):
        """Writes the adapter alone: verl's merger would go on to write a model, which is not
        there."""

        save_hf_model_and_tokenizer = FSDPModelMerger.save_lora_adapter

    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(actor),
        target_dir=str(target),
        hf_model_config_path=str(actor / "huggingface"),
    )
    merger_class = AdapterMerger if adapter_only else FSDPModelMerger
    merger = merger_class(config)
    merger.merge_and_save()
    merger.cleanup()


def _merge_adapter(actor: Path, base_model: Path, target: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        _merge_shards(actor, Path(scratch), adapter_only=True)
        adapter = Path(scratch) / "lora_adapter"
        model = AutoModelForCausalLM.from_pretrained(base_model, dtype="auto")
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        merged.save_pretrained(target)
        shutil.copytree(adapter, target.with_name(ADAPTER))
    AutoTokenizer.from_pretrained(base_model).save_pretrained(target)


if __name__ == "__main__":
    export(*map(Path, sys.argv[1:]))
