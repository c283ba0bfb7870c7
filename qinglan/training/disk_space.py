"""How much SFT and RL are going to write at most, by the size of the model and the checkpoints that
are kept."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from qinglan.config import EMBEDDED, Profile
from qinglan.config.training import AUTO_INTERVALS
from qinglan.simulators.base_model import cached_path
from qinglan.simulators.domains import domain_for

_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHTS, _TRAINED = 4, 12
"""Bytes per parameter of a checkpoint: weights in fp32, and with AdamW's two moments."""
_SIZE_IN_NAME = re.compile(r"(\d+(?:\.\d+)?)\s?([bm])(?![a-z0-9])", re.IGNORECASE)
_ADAPTER_SHARE = 4e-4
"""Of a model whose layers are not known, the parameters of an adapter of rank 1: Qwen3's have 2.5
to 3.5e-4."""


class ModelSize(NamedTuple):
    parameters: int
    bytes: int
    adapter_parameters: int
    """Of an adapter of rank 1 on every linear layer."""

    @classmethod
    def of(cls, model: str | Path) -> "ModelSize | None":
        """From the headers of a folder's weights, or from the size in a hub id; None where neither
        is there.

        The name of a `Path` is not read: a digest in it may end like a size.
        """
        folder = Path(model)
        if files := sorted(folder.glob("*.safetensors")):
            tensors = [tensor for file in files for tensor in _shapes(file)]
            # Adapters leave embeddings and the output layer alone.
            linear = [
                shape
                for name, shape in tensors
                if len(shape) == 2 and not re.search("embed|lm_head", name)
            ]
            size_bytes = sum(file.stat().st_size for file in files)
            return cls(
                sum(math.prod(shape) for _, shape in tensors), size_bytes, sum(map(sum, linear))
            )
        if files := sorted(folder.glob("*.bin")):
            parameters = sum(file.stat().st_size for file in files) // 2
        elif isinstance(model, str) and (named := _SIZE_IN_NAME.search(folder.name)):
            parameters = int(float(named[1]) * {"b": 1e9, "m": 1e6}[named[2].lower()])
        else:
            return None
        return cls(parameters, 2 * parameters, int(_ADAPTER_SHARE * parameters))


def needed_bytes(profile: Profile, flow: str) -> int:
    """What a flow is going to write under `paths.runs`, as far as is known before it starts."""
    floor = profile.retention.min_free_mb * 10**6
    if flow not in ("pipeline", "train"):
        return floor
    model: str | Path = profile.student.base_model
    if model == EMBEDDED:
        model = cached_path(
            profile.paths, profile.embedded, domain_for(profile, "student.base_model")
        )
    base = ModelSize.of(model)
    return floor + sft_bytes(profile, base) + rl_bytes(profile, base)


def sft_bytes(profile: Profile, base: ModelSize | None) -> int:
    """What SFT writes: checkpoints with their optimizer's state, and the model; 0 where the base is
    not known."""
    if base is None:
        return 0
    sft = profile.sft
    model = base.parameters * _DTYPES[sft.torch_dtype]
    saved = sft.lora_rank * base.adapter_parameters * _TRAINED
    if sft.tuner_type == "full":
        saved = base.parameters * (_TRAINED + _WEIGHTS)  # ZeRO-3 saves the weights in both forms
    return (sft.save_total_limit + 2) * saved + model


def rl_bytes(profile: Profile, start: ModelSize | None) -> int:
    """What RL writes: checkpoints of policy and critic, and the exported model; 0 where the start
    is not known."""
    if start is None:
        return 0
    rl, on_cpu = profile.rl, profile.trainer.device == "cpu"
    saved = (
        -(-rl.total_steps // rl.save_freq) if rl.total_steps and rl.save_freq else AUTO_INTERVALS
    )
    kept = saved if rl.keep_checkpoints is None else min(saved, rl.keep_checkpoints + 2)
    if rl.lora_rank:
        policy, exported = rl.lora_rank * start.adapter_parameters * _TRAINED, start.bytes
    else:
        # On the CPU each checkpoint holds the model in Hugging Face's form as well, in fp32.
        policy = start.parameters * (_TRAINED + (_WEIGHTS if on_cpu else 0))
        exported = start.parameters * (_WEIGHTS if on_cpu else 2)
    return kept * (policy + _critic_bytes(profile, start)) + exported


def _critic_bytes(profile: Profile, start: ModelSize) -> int:
    rl = profile.rl
    if rl.algorithm != "ppo":
        return 0
    critic = (ModelSize.of(rl.critic_model) if rl.critic_model else None) or start
    rank = rl.lora_rank if rl.critic_lora_rank is None else rl.critic_lora_rank
    if rank:
        return critic.parameters * _WEIGHTS + rank * critic.adapter_parameters * _TRAINED
    return critic.parameters * _TRAINED


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return [(name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]
