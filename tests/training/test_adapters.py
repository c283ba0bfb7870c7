"""verl's engines with adapters, in this process: what a checkpoint holds, how it resumes, what is
exported of it."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_rl import make_model

from qinglan.config import load_profile
from qinglan.runs.launcher import launch
from qinglan.training.engines.export import export
from qinglan.training.engines.generate import UNMERGED, generate_commands

pytestmark = pytest.mark.slow
pytest.importorskip("verl")

FP32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
ADAPTER: dict[str, Any] = {
    "lora_rank": 4,
    "lora_alpha": 8,
    "override_config": {"attn_implementation": "sdpa"},
    "use_remove_padding": False,
    "enable_gradient_checkpointing": False,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process verl's only worker."""
    import torch.distributed as dist

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def engine(kind: str, model: Any, **checkpoint: Any) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

    import qinglan.training.verl_cpu.trainer as cpu

    new_engine = getattr(cpu, kind)(
        model,
        FSDPEngineConfig(strategy="fsdp2", mixed_precision=FP32, use_torch_compile=False),
        FSDPOptimizerConfig(lr=0.05, total_training_steps=10),
        CheckpointConfig(**checkpoint),
    )
    new_engine.initialize()
    return new_engine


def learn(trained: Any, steps: int = 2) -> None:
    for _ in range(steps):
        outputs(trained.module).square().mean().backward()
        trained.optimizer.step()
        trained.optimizer.zero_grad()


def outputs(model: Any) -> Any:
    import torch

    ids = torch.arange(5, 19).view(2, 7)
    places = torch.arange(7).expand(2, 7)
    return model(
        input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=places, use_cache=False
    ).logits


def weights_of(trained: Any) -> dict[str, Any]:
    """Copies of an engine's weights, which may be sharded there."""
    weights = {}
    for name, value in trained.module.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        weights[name] = whole.clone()
    return weights


def different_weights(left: Any, right: Any) -> set[str]:
    """Names of the weights in which two engines differ."""
    left_weights = weights_of(left)
    right_weights = weights_of(right)
    assert left_weights.keys() == right_weights.keys()
    return {name for name in left_weights if not left_weights[name].equal(right_weights[name])}


@pytest.mark.parametrize("rank", [4, 0])
def test_a_policy_is_saved_resumed_and_exported_whole(tmp_path: Path, rank: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from verl.workers.config import HFModelConfig

    policy = make_model(tmp_path / "policy")

    def make_engine() -> Any:
        config = HFModelConfig(path=str(policy), **ADAPTER | {"lora_rank": rank})
        return engine("CpuActorEngine", config, save_lora_only=bool(rank))

    trained = make_engine()
    learn(trained)
    actor = tmp_path / "step" / "actor"
    trained.save_checkpoint(str(actor))
    saved = torch.load(actor / "model_world_size_1_rank_0.pt", weights_only=False)
    adapter_names = {name for name in saved if "lora_" in name}
    assert saved
    assert adapter_names == (set(saved) if rank else set())

    resumed = make_engine()
    assert different_weights(trained, resumed)
    resumed.load_checkpoint(str(actor))
    assert different_weights(trained, resumed) == set()

    export(tmp_path / "step", policy, tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with torch.no_grad():
        expected = outputs(trained.module)
        export_error = (outputs(exported) - expected).abs().max()
        change = (outputs(before) - expected).abs().max()
    assert export_error < 0.05 * change, "the export is in bf16"

    prompts = tmp_path / "prompts.jsonl"
    prompt = {"id": "1", "messages": [{"role": "user", "content": "cats"}]}
    prompts.write_text(json.dumps(prompt), encoding="utf-8")
    folders = {
        "rl": str(tmp_path / "exported"),
        f"rl{UNMERGED}": str(policy if rank else tmp_path / "exported"),
    }
    adapters = {f"rl{UNMERGED}": str(tmp_path / "adapter") if rank else ""}
    (command,) = generate_commands(load_profile("embedded"), folders, prompts, tmp_path, adapters)
    launch(command, name="generate", log=tmp_path / "generate.log")
    merged, unmerged = (
        json.loads((tmp_path / f"{name}.answers.jsonl").read_text("utf-8")) for name in folders
    )
    assert merged["text"] == unmerged["text"]
    assert merged["logprobs"] == pytest.approx(unmerged["logprobs"], abs=1e-4)


def test_a_critic_learns_by_its_adapter_and_its_whole_head(tmp_path: Path) -> None:
    from qinglan.training.engines.ppo_trainer import CriticModelConfig

    policy = make_model(tmp_path / "policy")
    critic = make_model(tmp_path / "critic", hidden_size=32, layers=1)
    settings = {
        "path": str(critic),
        "tokenizer_path": str(policy),
        "model_type": "value_model",
        **ADAPTER,
    }
    trained = engine("CpuValueEngine", CriticModelConfig(**settings))
    learning_parts = {
        name.split(".")[-2]
        for name, value in trained.module.named_parameters()
        if value.requires_grad
    }
    assert learning_parts == {"default"}
    assert outputs(trained.module).shape == (2, 7, 1)
    before = weights_of(trained)
    learn(trained)
    after = weights_of(trained)
    moved = {name for name in after if not after[name].equal(before[name])}
    moved_of_head = {name for name in moved if "score.modules_to_save" in name}
    moved_of_adapter = {name for name in moved if "lora_" in name}
    assert moved_of_head
    assert {name for name in moved if "lora_B" in name}
    assert moved - moved_of_head - moved_of_adapter == set()

    trained.save_checkpoint(str(tmp_path / "step"))
    resumed = engine("CpuValueEngine", CriticModelConfig(**settings))
    resumed.load_checkpoint(str(tmp_path / "step"))
    assert different_weights(trained, resumed) == set()
