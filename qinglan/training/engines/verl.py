"""verl's command lines for training and for exporting a checkpoint, and reading a run's metrics and checkpoints.

Nothing is started or imported here; `verl_overrides` makes verl's configuration from a profile.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from qinglan.config import Profile
from qinglan.errors import ArtifactError
from qinglan.runs.launcher import QUIET_ENV, Command
from qinglan.training.engines.swift import engine_env, engine_python
from qinglan.training.engines.trainer_settings import DEV_VALUE
from qinglan.training.engines.verl_overrides import overrides

STEP_METRICS = {
    "reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "clip_fraction": "actor/pg_clipfrac",
    "value_loss": "critic/vf_loss",
}
"""Metrics that are reported of each training step beside the reward's parts: our name → verl's."""

TRACKER = "latest_checkpointed_iteration.txt"
"""File in verl's folder of checkpoints with the newest one's step; written last."""
_LENGTHS = re.compile(r"(filter )?dataset len: (\d+)|selected (\d+) random samples")
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./:-]*")
_ENV = {
    **QUIET_ENV,
    "HYDRA_FULL_ERROR": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Workers that Ray starts in advance have nothing imported and take CPU time from those that are needed.
    "RAY_prestart_worker_first_driver": "0",
}


def ppo_command(
    profile: Profile,
    *,
    model: Path,
    train_file: Path,
    dev_file: Path,
    output_dir: Path,
    reward_config: Path,
    trainer_settings: Path,
    metrics_path: Path,
    run_name: str,
) -> Command:
    """Train from `model`, resuming from the newest complete checkpoint under `output_dir` if there is one.

    Args:
        reward_config: a `RewardService` as JSON, for the reward function.
        trainer_settings: a `TrainerSettings` as JSON, for our trainer.
        metrics_path: gets one `{"step", "data"}` object a step; must not exist (see `next_metrics_path`).
    """
    paths = {
        "data.train_files": train_file.resolve(),
        "data.val_files": dev_file.resolve(),
        "trainer.default_local_dir": output_dir.resolve(),
        "hydra.run.dir": output_dir.resolve() / "hydra",
        "+reward.custom_reward_function.reward_kwargs.config_path": reward_config.resolve(),
        "+qinglan.trainer_settings": trainer_settings.resolve(),
    }
    given = overrides(profile, model.resolve(), run_name) | paths | profile.rl.extra
    argv = [engine_python(profile), "-m", "qinglan.training.engines.ppo"]
    argv += [f"{key}={hydra_value(value)}" for key, value in given.items()]
    return Command(argv, _environment(profile, model) | {"VERL_FILE_LOGGER_PATH": str(metrics_path.resolve())})


def export_command(profile: Profile, *, checkpoint: Path, base_model: Path, output_dir: Path) -> Command:
    """Make a Hugging Face folder of a checkpoint (`global_step_N`); `base_model` is what training started from."""
    folders = [str(folder.resolve()) for folder in (checkpoint, base_model, output_dir)]
    argv = [engine_python(profile), "-m", "qinglan.training.engines.export", *folders]
    return Command(argv, _environment(profile, base_model), gpus=int(profile.trainer.device == "cuda"))


def hydra_value(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in {"true", "false", "null", "nan", "inf"}:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def next_metrics_path(folder: Path) -> Path:
    return folder / f"metrics.{len(_metrics_files(folder)) + 1}.jsonl"


def read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step over all attempts; where two measured the same, the later one counts.

    A resumed run validates first, under the step that it resumes from.
    """
    steps: dict[int, dict[str, float]] = {}
    for path in _metrics_files(folder):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                known = {name: value for name, value in entry["data"].items() if value is not None}
                steps.setdefault(entry["step"], {}).update(known)
    return dict(sorted(steps.items()))


def checkpoints(output_dir: Path) -> dict[int, Path]:
    """Complete checkpoints by step; verl writes its tracker last, so a folder with a later step may be incomplete."""
    found = {int(path.name.removeprefix("global_step_")): path for path in output_dir.glob("global_step_*")}
    tracker = output_dir / TRACKER
    text = tracker.read_text().strip() if tracker.exists() else "0"
    if not text.isdigit():  # verl empties the file before it writes it, and wrote data.pt just before
        text = str(max((step for step, path in found.items() if (path / "data.pt").exists()), default=0))
    return {step: path for step, path in sorted(found.items()) if step <= int(text)}


def repair_checkpoints(output_dir: Path) -> None:
    """Repair an empty tracker file, and delete incomplete folders before a later step makes them look complete."""
    tracker, saved = output_dir / TRACKER, checkpoints(output_dir)
    if tracker.exists() and not tracker.read_text().strip().isdigit():
        if saved:
            tracker.write_text(str(max(saved)))
        else:
            tracker.unlink()
    for incomplete in set(output_dir.glob("global_step_*")) - set(saved.values()):
        shutil.rmtree(incomplete)


def best_checkpoint(output_dir: Path, metrics_folder: Path) -> tuple[int, Path | None]:
    """Step and folder of the best checkpoint on the dev split; in a tie, the later one.

    The policy before training counts as step 0, without a folder, where it was validated. It wins a tie.
    """
    saved, measured = checkpoints(output_dir), read_metrics(metrics_folder)
    values = {step: measured[step][DEV_VALUE] for step in (0, *saved) if DEV_VALUE in measured.get(step, {})}
    if not values:
        raise ArtifactError(
            f"nothing was validated before training ended: no checkpoint under {output_dir} has {DEV_VALUE}; "
            "set rl.val_before_train, or rl.choose = last"
        )
    step = max(values, key=lambda step: (values[step], step == 0, step))
    return step, saved.get(step)


def last_checkpoint(output_dir: Path) -> tuple[int, Path]:
    """Step and folder of the newest checkpoint, validated or not."""
    if not (saved := checkpoints(output_dir)):
        raise ArtifactError(f"no checkpoint under {output_dir}")
    return max(saved), saved[max(saved)]


def left_out(log: str) -> int:
    """How many prompts for training verl left out as longer than `max_prompt_length`, by its log.

    The log has the number of prompts before and after, for the training file first.
    """
    before = 0
    for is_filtered, length, selected in _LENGTHS.findall(log):
        if is_filtered:
            return before - int(length)
        before = int(length or selected)
    return 0


def _metrics_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("metrics.*.jsonl"), key=lambda path: int(path.name.split(".")[1]))


def _environment(profile: Profile, model: Path) -> dict[str, str]:
    if profile.trainer.device == "cuda":
        device = {"VERL_PLATFORM": "nvidia"}
    else:
        # TransferQueue sets torch to 8 threads around every transfer. Threads that spin while they wait make training
        # several times slower as soon as anything else runs on the machine.
        device = {"VERL_PLATFORM": "cpu", "TQ_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        device["TQ_LOGGING_LEVEL"] = "WARNING"  # it has a line for each field of each sample
    return engine_env(profile, str(model)) | _ENV | device
