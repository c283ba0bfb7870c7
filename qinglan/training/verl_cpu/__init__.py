"""A CPU backend for verl, on verl's own extension points and without a patch.

verl imports this package in every process that it starts (entry-point group `verl.plugins`).
Importing it registers two things by name: the platform `cpu` (used where VERL_PLATFORM=cpu) and the
rollout `hf_cpu`. The engines, workers and trainer in `trainer` come with verl's heavy imports, so
the PPO entry point loads them where they are needed. On a GPU host the registrations stay unused.

verl's resource pools only count Ray's "GPU" or "NPU", so a worker holds a logical "GPU"
(`ray.init(num_gpus=1)`).
"""

# mypy: allow-subclassing-any

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base, replica

ROLLOUT = "hf_cpu"
"""`actor_rollout_ref.rollout.name` of the CPU rollout."""

_MEMORY_FIGURES = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
)
"""Calls on a device module that return a number of bytes; on the CPU all mean the process."""


def _device_module() -> types.ModuleType:
    """`torch.cpu`, with the memory and random-state calls that verl makes on a device module."""

    def do_nothing(*_: Any) -> None:
        pass

    def resident_bytes(*_: Any) -> int:
        return int(psutil.Process().memory_info().rss)

    def free_and_total_bytes(*_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    module = types.ModuleType("qinglan.training.verl_cpu.device")
    calls = {name: getattr(torch.cpu, name) for name in torch.cpu.__all__}
    calls.update(dict.fromkeys(_MEMORY_FIGURES, resident_bytes))
    calls.update(
        empty_cache=do_nothing,
        synchronize=do_nothing,
        # torch.cpu says True; verl asks this to learn whether there is an accelerator.
        is_available=lambda: False,
        mem_get_info=free_and_total_bytes,
        get_device_name=lambda *_: "CPU",
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    vars(module).update(calls)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """verl's view of a machine without an accelerator: one device, gloo, nothing to synchronize."""

    device_name = vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        """Can auto-detection choose it? Only where there is no CUDA."""
        return not torch.cuda.is_available()

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:  # noqa: ARG002
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


def _replica_class() -> type:
    # This module is in every process that verl starts, and most of them have no rollout.
    from qinglan.training.verl_cpu.rollout import CpuReplica

    return CpuReplica


replica.RolloutReplicaRegistry.register(ROLLOUT, _replica_class)
# The trainer's half of a rollout is looked up in a dictionary of class paths; verl offers no
# function to add one.
base._ROLLOUT_REGISTRY[(ROLLOUT, "async")] = "qinglan.training.verl_cpu.rollout.CpuRollout"
