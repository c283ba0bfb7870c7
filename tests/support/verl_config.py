"""A profile's command line for verl, and the configuration that verl composes of it."""

from pathlib import Path
from typing import Any

import pytest

from qinglan.config import Profile
from qinglan.runs.launcher import Command
from qinglan.training.engines.verl import ppo_command


def command_of(
    profile: Profile, folder: Path, model: Path | None = None, metrics_path: Path | None = None
) -> Command:
    return ppo_command(
        profile,
        model=model or folder / "model",
        train_file=folder / "train.parquet",
        dev_file=folder / "dev.parquet",
        output_dir=folder / "rl",
        reward_config=folder / "reward.json",
        trainer_settings=folder / "trainer.json",
        metrics_path=metrics_path or folder / "metrics.1.jsonl",
        run_name="run-1",
    )


def compose(command: Command) -> Any:
    """The configuration, as verl's entry point makes it.

    An override of a key that verl doesn't have is an error.
    """
    hydra = pytest.importorskip("hydra")
    verl = pytest.importorskip("verl")
    from omegaconf import OmegaConf

    assert command.argv[1:3] == ["-m", "qinglan.training.engines.ppo"]
    overrides = [word for word in command.argv[3:] if not word.startswith("hydra.")]
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose("ppo_trainer", overrides=overrides)
    OmegaConf.to_container(config, resolve=True)
    return config
