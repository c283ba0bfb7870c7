"""The bytes that SFT and RL are going to need."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixture_types import ProfileOf

from qinglan.training.disk_space import ModelSize, needed_bytes, rl_bytes, sft_bytes

SMALL = ModelSize(1_000_000, 2_000_000, 10_000)


def safetensors(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> Path:
    folder.mkdir()
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 100)
    return folder


def test_a_models_size_is_read_off_the_headers(tmp_path: Path):
    shapes = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.q_proj.weight": (16, 8),
        "model.norm.weight": (8,),
    }
    size = ModelSize.of(safetensors(tmp_path / "m", shapes))
    assert size is not None
    assert (size.parameters, size.adapter_parameters) == (800 + 128 + 8, 24)
    assert size.bytes == (tmp_path / "m" / "model.safetensors").stat().st_size


def test_a_hub_id_often_says_how_large_it_is(tmp_path: Path):
    parameters = {"Qwen/Qwen3-32B": 32e9, "Qwen/Qwen3-0.6B-Base": 0.6e9, "x/smollm-135M": 135e6}
    sizes = {name: ModelSize.of(name) for name in parameters}
    assert {name: size and size.parameters for name, size in sizes.items()} == parameters
    assert ModelSize.of("x/base") is None
    assert ModelSize.of(Path("qwen3-tiny-query_rewrite-5a0c71907b")) is None, (
        "a digest that ends like a size"
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"0" * 4000)
    assert ModelSize.of(tmp_path) == ModelSize(2000, 4000, 0), (
        "older weight files count by their size"
    )


def test_sft_keeps_adapters_or_whole_models_and_the_result(profile_of: ProfileOf):
    profile = profile_of(sft={"lora_rank": 16, "save_total_limit": 3})
    assert sft_bytes(profile, SMALL) == 5 * 16 * 10_000 * 12 + 2_000_000
    whole = profile_of(sft={"tuner_type": "full", "save_total_limit": 1})
    assert sft_bytes(whole, SMALL) == 3 * 16_000_000 + 2_000_000
    assert sft_bytes(profile, None) == 0


@pytest.mark.parametrize(
    ("rl", "expected"),
    [
        # Policy, critic, both with AdamW's state, the policy once more for Hugging Face; the
        # exported model.
        ({"total_steps": 100}, 5 * (16 + 12) * 1_000_000 + 4_000_000),
        ({"total_steps": 100, "keep_checkpoints": 1}, 3 * (16 + 12) * 1_000_000 + 4_000_000),
        ({"total_steps": 20, "keep_checkpoints": 9}, 1 * (16 + 12) * 1_000_000 + 4_000_000),
        (
            {"total_steps": 20, "algorithm": "grpo", "rollouts_per_prompt": 4},
            16_000_000 + 4_000_000,
        ),
        # Adapters only, but verl saves the critic's weights whole.
        ({"total_steps": 20, "lora_rank": 8}, 8 * 10_000 * 12 * 2 + 4_000_000 + 2_000_000),
    ],
)
def test_rl_keeps_checkpoints_of_policy_and_critic(
    profile_of: ProfileOf, rl: dict[str, Any], expected: int
):
    assert rl_bytes(profile_of(rl={"save_freq": 20, "test_freq": 20} | rl), SMALL) == expected


def test_what_a_flow_needs_is_known_before_it_starts(profile_of: ProfileOf, tmp_path: Path):
    model = safetensors(tmp_path / "m", {"layers.0.q_proj.weight": (1000, 1000)})
    profile = profile_of(student={"base_model": str(model)}, retention={"min_free_mb": 3})
    assert needed_bytes(profile, "refresh") == 3_000_000
    size = ModelSize.of(model)
    training_bytes = sft_bytes(profile, size) + rl_bytes(profile, size)
    assert needed_bytes(profile, "train") == 3_000_000 + training_bytes
