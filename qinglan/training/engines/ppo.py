"""`python -m qinglan.training.engines.ppo OVERRIDE…`: verl's own PPO entry point, with our trainers
registered.

Beyond `verl.trainer.main_ppo`, it refuses to start without VERL_PLATFORM, because verl only logs a
failed plug-in at debug level, and to overwrite the metrics of an earlier attempt; and it starts the
run's reward service.
"""

# mypy: allow-subclassing-any, allow-untyped-decorators, allow-untyped-calls

import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import ray
from filelock import Timeout
from omegaconf import DictConfig, open_dict
from verl.plugin.platform import PlatformRegistry
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo, validate_config
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from qinglan.errors import EngineError
from qinglan.runs.locks import ray_start_lock
from qinglan.training.engines.verl import REWARD_FUNCTION
from qinglan.training.reward_service.function import close_reward_service, start_reward_service


class TaskRunner(TaskRunnerV1.__ray_actor_class__):
    """verl's task runner, in whose process the trainer lives."""

    def run(self, config: DictConfig) -> Any:
        reward_function = config.reward.custom_reward_function
        reward_service = None
        if reward_function.path == REWARD_FUNCTION:
            # Started first, so that its imports overlap with verl's.
            reward_service = start_reward_service(reward_function.reward_kwargs.config_path)
        # Importing a trainer's module registers it with verl.
        import_module("qinglan.training.engines.ppo_trainer")
        if config.trainer.device == "cpu":
            # verl has loaded the plug-in already, by its entry point.
            import_module("qinglan.training.verl_cpu")
            import_module("qinglan.training.verl_cpu.trainer")
        try:
            return super().run(config)
        finally:
            if reward_service is not None:
                close_reward_service(reward_service)


class LocalTaskRunner:
    """Has the interface of the Ray actor that `run_ppo` asks for; runs the trainer here, without 10
    s of imports."""

    ray_start = ray_start_lock()
    """Taken before `run_ppo` starts Ray; then it calls `remote`."""
    run = SimpleNamespace(remote=lambda config: ray.put(TaskRunner().run(config)))
    """`run.remote(config)` trains to the end and returns a Ray reference to None."""

    @classmethod
    def remote(cls) -> "LocalTaskRunner":
        cls.ray_start.release()
        return cls()


def check_platform() -> None:
    """Raise EngineError where VERL_PLATFORM is not set: verl would guess one, though our plug-in
    failed to load."""
    if PlatformRegistry.get(os.environ.get("VERL_PLATFORM", "")) is None:
        names = ", ".join(PlatformRegistry.registered_names())
        raise EngineError(
            f"VERL_PLATFORM is not set; set it to one of verl's platforms here: {names}"
        )


def _prepare_metrics_file() -> None:
    """Make the folder of verl's file logger, which would overwrite an earlier attempt's metrics."""
    metrics = Path(os.environ.get("VERL_FILE_LOGGER_PATH", os.devnull))
    if metrics.is_file() and metrics.stat().st_size:
        raise EngineError(
            f"{metrics} already has metrics; give each attempt its own file (`next_metrics_path`)"
        )
    metrics.parent.mkdir(parents=True, exist_ok=True)


def _leave_size_to_cluster(config: DictConfig) -> None:
    """Inside a Ray job the cluster's size is given, and `ray.init` refuses another."""
    ray_init = config.ray_kwargs.ray_init
    is_in_job = os.environ.get("RAY_ADDRESS") and ray_init.get("address") != "local"
    if not is_in_job:
        return
    with open_dict(config):
        for key in ("num_cpus", "num_gpus", "include_dashboard"):
            ray_init.pop(key, None)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train as the configuration says, in a Ray that this starts or whose job it is."""
    on_cpu = config.trainer.device == "cpu"
    if on_cpu and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        # With an empty list Ray refuses the logical GPU that verl asks for on the CPU.
        del os.environ["CUDA_VISIBLE_DEVICES"]
    check_platform()
    _prepare_metrics_file()
    _leave_size_to_cluster(config)
    validate_config(
        config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    runner = ray.remote(TaskRunner)
    if on_cpu:
        runner = LocalTaskRunner
        # Where another Ray has been starting for longer than the lock waits, it hangs and has taken
        # its ports already.
        with suppress(Timeout):
            runner.ray_start.acquire()
    run_ppo(config, task_runner_class=runner)


if __name__ == "__main__":
    main()
