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
    """As a worker of one process."""
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

    made = getattr(cpu, kind)(
        model,
        FSDPEngineConfig(strategy="fsdp2", mixed_precision=FP32, use_torch_compile=False),
        FSDPOptimizerConfig(lr=0.05, total_training_steps=10),
        CheckpointConfig(**checkpoint),
    )
    made.initialize()
    return made


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


def whole(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }


def same(one: Any, other: Any) -> bool:
    import torch

    ours, theirs = whole(one.module.state_dict()), whole(other.module.state_dict())
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) for name, value in ours.items()
    )


@pytest.mark.parametrize("rank", [4, 0])
def test_a_policy_is_saved_resumed_and_exported_whole(tmp_path: Path, rank: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from verl.workers.config import HFModelConfig

    policy, given = make_model(tmp_path / "policy"), ADAPTER | {"lora_rank": rank}
    trained = engine(
        "CpuActorEngine", HFModelConfig(path=str(policy), **given), save_lora_only=bool(rank)
    )
    learn(trained)
    trained.save_checkpoint(str(tmp_path / "step" / "actor"))
    saved = torch.load(
        tmp_path / "step" / "actor" / "model_world_size_1_rank_0.pt", weights_only=False
    )
    assert saved and all(("lora_" in name) == bool(rank) for name in saved)

    resumed = engine(
        "CpuActorEngine", HFModelConfig(path=str(policy), **given), save_lora_only=bool(rank)
    )
    assert not same(trained, resumed)
    resumed.load_checkpoint(str(tmp_path / "step" / "actor"))
    assert same(trained, resumed)

    export(tmp_path / "step", policy, tmp_path / "exported")
    exported, before = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("exported", "policy")
    )
    with torch.no_grad():
        now, then, expected = outputs(exported), outputs(before), outputs(trained.module)
    assert (now - expected).abs().max() < 0.05 * (
        then - expected
    ).abs().max()  # the export is in bf16

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        json.dumps({"id": "1", "messages": [{"role": "user", "content": "cats"}]}), encoding="utf-8"
    )
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

    policy, critic = (
        make_model(tmp_path / "policy"),
        make_model(tmp_path / "critic", hidden_size=32, layers=1),
    )
    given = {
        "path": str(critic),
        "tokenizer_path": str(policy),
        "model_type": "value_model",
        **ADAPTER,
    }
    trained = engine("CpuValueEngine", CriticModelConfig(**given))
    free = {
        name.split(".")[-2]
        for name, value in trained.module.named_parameters()
        if value.requires_grad
    }
    assert free == {"default"} and outputs(trained.module).shape == (2, 7, 1)
    before = {name: value.clone() for name, value in whole(trained.module.state_dict()).items()}
    learn(trained)
    after = whole(trained.module.state_dict())
    moved = {name for name in after if not after[name].equal(before[name])}
    assert any("score.modules_to_save" in name for name in moved) and any(
        "lora_B" in name for name in moved
    )
    assert all("lora_" in name or "score.modules_to_save" in name for name in moved)

    trained.save_checkpoint(str(tmp_path / "step"))
    resumed = engine("CpuValueEngine", CriticModelConfig(**given))
    resumed.load_checkpoint(str(tmp_path / "step"))
    assert same(trained, resumed)
