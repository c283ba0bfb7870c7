"""The most that SFT and RL are going to write, by the size of the model and the checkpoints that
are kept."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from qinglan.config import EMBEDDED, TRAINING_FLOWS, Profile
from qinglan.config.training import AUTO_INTERVALS
from qinglan.simulators.base_model import cached_path
from qinglan.simulators.domains import domain_for

_BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHTS_BYTES = 4
"""Bytes per parameter of a checkpoint: weights in fp32."""
_TRAINED_BYTES = 12
"""The same with AdamW's two moments."""
_SIZE_IN_NAME = re.compile(r"(\d+(?:\.\d+)?)\s?([bm])(?![a-z0-9])", re.IGNORECASE)
_SIZE_UNITS = {"b": 1e9, "m": 1e6}
_ADAPTER_SHARE = 4e-4
"""Parameters of an adapter of rank 1, per parameter of a model whose layers are not known; Qwen3's
have 2.5 to 3.5e-4."""


class ModelSize(NamedTuple):
    """Numbers of a model's parameters, and the bytes of its files."""

    parameters: int
    bytes: int
    adapter_parameters: int
    """Parameters of an adapter of rank 1 on every linear layer."""

    @classmethod
    def of(cls, model: str | Path) -> "ModelSize | None":
        """The size by the headers of a folder's weights, or by the size in a hub id; None where
        neither is there.

        The name of a `Path` is not read: a digest in it may end like a size.
        """
        folder = Path(model)
        weight_files = sorted(folder.glob("*.safetensors"))
        if weight_files:
            return cls._of_weights(weight_files)
        older_files = sorted(folder.glob("*.bin"))
        if older_files:
            return cls._of_parameters(sum(file.stat().st_size for file in older_files) // 2)
        size_in_name = _SIZE_IN_NAME.search(folder.name)
        if isinstance(model, Path) or size_in_name is None:
            return None
        number, unit = size_in_name.groups()
        return cls._of_parameters(int(float(number) * _SIZE_UNITS[unit.lower()]))

    @classmethod
    def _of_weights(cls, files: list[Path]) -> "ModelSize":
        parameters = 0
        adapter_parameters = 0
        for file in files:
            for name, shape in _shapes(file):
                parameters += math.prod(shape)
                # Adapters leave embeddings and the output layer alone.
                is_adapted = len(shape) == 2 and not re.search("embed|lm_head", name)
                if is_adapted:
                    adapter_parameters += sum(shape)
        return cls(parameters, sum(file.stat().st_size for file in files), adapter_parameters)

    @classmethod
    def _of_parameters(cls, parameters: int) -> "ModelSize":
        """The size of a model with two bytes per parameter, of unknown layers."""
        return cls(parameters, 2 * parameters, int(_ADAPTER_SHARE * parameters))


def needed_bytes(profile: Profile, flow: str) -> int:
    """Bytes that a flow is going to write under `paths.runs`, as far as is known before it
    starts."""
    floor = profile.retention.min_free_mb * 10**6
    if flow not in TRAINING_FLOWS:
        return floor
    model: str | Path = profile.student.base_model
    if model == EMBEDDED:
        model = cached_path(
            profile.paths, profile.embedded, domain_for(profile, "student.base_model")
        )
    base = ModelSize.of(model)
    return floor + sft_bytes(profile, base) + rl_bytes(profile, base)


def sft_bytes(profile: Profile, base: ModelSize | None) -> int:
    """Bytes that SFT writes: checkpoints with their optimizer's state, and the model; 0 where the
    base is not known."""
    if base is None:
        return 0
    sft = profile.sft
    if sft.tuner_type == "full":
        # ZeRO-3 saves the weights in both forms.
        checkpoint = base.parameters * (_TRAINED_BYTES + _WEIGHTS_BYTES)
    else:
        checkpoint = sft.lora_rank * base.adapter_parameters * _TRAINED_BYTES
    model = base.parameters * _BYTES_OF_DTYPE[sft.torch_dtype]
    # The best one may be kept beyond the limit, and the newest is there before an older one is
    # deleted.
    return (sft.save_total_limit + 2) * checkpoint + model


def rl_bytes(profile: Profile, start: ModelSize | None) -> int:
    """Bytes that RL writes: checkpoints of policy and critic, and the exported model; 0 where the
    start is not known."""
    if start is None:
        return 0
    rl = profile.rl
    on_cpu = profile.trainer.device == "cpu"
    if rl.lora_rank:
        policy = rl.lora_rank * start.adapter_parameters * _TRAINED_BYTES
        exported = start.bytes
    elif on_cpu:
        # Each checkpoint holds the model in Hugging Face's form as well, in fp32.
        policy = start.parameters * (_TRAINED_BYTES + _WEIGHTS_BYTES)
        exported = start.parameters * _WEIGHTS_BYTES
    else:
        policy = start.parameters * _TRAINED_BYTES
        # verl's merger writes bf16.
        exported = start.parameters * _BYTES_OF_DTYPE["bfloat16"]
    return _kept_checkpoints(profile) * (policy + _critic_bytes(profile, start)) + exported


def _kept_checkpoints(profile: Profile) -> int:
    """The number of checkpoints of RL that are there at a time, at most."""
    rl = profile.rl
    saved = AUTO_INTERVALS
    if rl.total_steps and rl.save_freq:
        saved = math.ceil(rl.total_steps / rl.save_freq)
    if rl.keep_checkpoints is None:
        return saved
    # The best one, and the newest one before an older one is deleted.
    return min(saved, rl.keep_checkpoints + 2)


def _critic_bytes(profile: Profile, start: ModelSize) -> int:
    rl = profile.rl
    if rl.algorithm != "ppo":
        return 0
    critic = start
    if rl.critic_model:
        critic = ModelSize.of(rl.critic_model) or start
    lora_rank = rl.lora_rank_of_critic
    if lora_rank:
        # verl saves all of a critic's weights.
        adapter = lora_rank * critic.adapter_parameters * _TRAINED_BYTES
        return critic.parameters * _WEIGHTS_BYTES + adapter
    return critic.parameters * _TRAINED_BYTES


def _shapes(file: Path) -> list[tuple[str, list[int]]]:
    """Names and shapes of a safetensors file's tensors: its header is JSON, after its length."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    return [(name, tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"]
