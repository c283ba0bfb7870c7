"""The command that serves a model's folder, and where it may run. Pure: nothing is started here.

ms-swift's server, by `python -m`: under SIGTERM `swift deploy` itself leaves its server behind.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qinglan.config import Profile
from qinglan.runs.launcher import Command
from qinglan.runs.processes import HOST
from qinglan.serving.routes import Backend
from qinglan.training.engines.swift import engine_env, swift_argv

CPU_BATCH = 16
"""Requests that the transformers engine answers together; without a batch size, one at a time."""
_VLLM_MEMORY = 0.9
"""vLLM's own default share of a GPU."""


def serve_command(profile: Profile, folder: Path, backend: Backend, port: int, gpus: Sequence[str] = ()) -> Command:
    """ms-swift's OpenAI-compatible server for a merged model, on loopback; questions never reach its log.

    ms-swift silently takes the next free port where this one is busy: ask the server for its models' names.
    """
    engine = profile.serve.backend or ("vllm" if profile.trainer.device == "cuda" else "transformers")
    arguments: dict[str, Any] = {
        "model": folder.resolve(),
        "model_type": profile.student.model_type,
        "template": profile.student.template,
        "torch_dtype": profile.sft.torch_dtype,
        "infer_backend": engine,
        "host": HOST,
        "port": port,
        "served_model_name": backend.model,
        "temperature": 0,
        "max_new_tokens": profile.student.max_new_tokens,
        "verbose": False,
        "log_interval": -1,
        "log_level": "warning",
    }
    if engine == "vllm":
        arguments |= {
            "vllm_tensor_parallel_size": profile.rl.tensor_model_parallel_size,
            "vllm_gpu_memory_utilization": round(_VLLM_MEMORY / profile.serve.models_per_gpu, 3),
        }
    else:
        arguments |= {"max_batch_size": CPU_BATCH, "attn_impl": "sdpa"}
    if profile.trainer.device == "cpu":
        arguments["device_map"] = "cpu"
    argv = swift_argv(profile, "deploy", arguments | profile.serve.extra)
    env = engine_env(profile, str(folder))
    return Command(argv, env | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else env)


def places_of(profile: Profile, environment: Mapping[str, str]) -> list[list[str]] | None:
    """The groups of GPUs that a model can have, a group as often as models share it; None on the CPU: no limit."""
    if profile.trainer.device == "cpu":
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(profile.trainer.gpus_per_node)]
    size = profile.rl.tensor_model_parallel_size
    groups = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
    return groups * profile.serve.models_per_gpu
