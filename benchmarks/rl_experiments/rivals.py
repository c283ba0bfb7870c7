"""A rival's measurement: SFT model, prompts, reward and evaluation are those of a run of ours.

The rival trains in a process of its own (benchmarks/rl_rivals) and saves checkpoints at the steps
where ours does. As with ours, the best on the dev split is tested.
"""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from qinglan.clients.roles import Services, open_clients
from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.evaluation.arms import student_rows
from qinglan.evaluation.figures import summarise
from qinglan.evaluation.measuring import measure
from qinglan.recipes import get_recipe
from qinglan.rows import ArmRow, Row
from qinglan.runs.artifacts import read_jsonl, write_json, write_jsonl
from qinglan.runs.launcher import Command, launch
from qinglan.runs.run import Run
from qinglan.simulators.domains.query_rewrite import write_sample
from qinglan.simulators.services import embedded_services
from qinglan.tasks.followers import first_and_last
from qinglan.training.engines.generate import generate_commands
from qinglan.training.engines.swift import engine_env

from .results import Point, Result, marks, result_of_run, stage_of, work_of

SCRIPTS = Path(__file__).parents[1] / "rl_rivals"
PACKAGES = {
    "trl": ("trl", "transformers", "torch"),
    "swift": ("ms-swift", "trl", "transformers", "torch"),
}
TRAINING = "training.json"
REWARDS = "rewards.jsonl"
TIMES = "times.jsonl"


def measure_rival(
    trainer: str, profile: Profile, verl_run: Path, fields: Mapping[str, Any]
) -> tuple[Result, dict[str, str]]:
    """Train with a rival, choose its checkpoint on dev, test it.

    Raises:
        QinglanError: it failed; with the end of its log.
    """
    start = time.monotonic()
    ours, groups = result_of_run(verl_run, **fields, wall_s=0.0)
    folder = profile.paths.runs / f"{fields['experiment']}-{fields['seed']}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    knowledge_base = write_sample(profile.paths.state / "sample", profile.embedded).knowledge_base
    with embedded_services(profile, knowledge_base) as services:
        write_json(folder / TRAINING, training(profile, verl_run, services, folder))
        seconds = _train(trainer, profile, folder)
        run = Run(id=folder.name, flow="pipeline", profile=profile, directory=folder)
        tested = _evaluate(run, services, verl_run)
    curve = read_curve(folder / REWARDS, folder / TIMES)
    rewards = first_and_last("reward", [(point.samples, point.reward) for point in curve])
    measured = {
        "run_id": folder.name,
        "versions": {package: version(package) for package in PACKAGES[trainer]},
        "wall_s": time.monotonic() - start,
        "rl_s": seconds,
        "top1": {**ours.top1, "rl": tested.pop("top1")},
        "quality": {**ours.quality, "rl": tested.pop("quality")},
        "summary": {"steps": len(curve), **rewards, **tested},
        "alarms": [],
        "curve": curve,
    }
    return ours.model_copy(update=measured), groups


def training(profile: Profile, verl_run: Path, services: Services, folder: Path) -> dict[str, Any]:
    """The settings of a rival's script; writes its reward's beside them."""
    rl = profile.rl
    dataset = stage_of(verl_run, "dataset")
    reward = json.loads((work_of(verl_run, "rl") / "reward.json").read_text(encoding="utf-8"))
    reward |= {
        "rag_url": services().rag_url,
        "judge_url": services().judge_url,
        "samples_log": str(folder / "samples.jsonl"),
        "run_id": folder.name,
        # A ledger of its own, which is empty as ours was.
        "ledger": profile.ledger.model_dump(mode="json"),
    }
    write_json(folder / "reward.json", reward)
    return {
        "model": str(stage_of(verl_run, "sft").path("model")),
        "model_type": profile.student.model_type,
        "template": profile.student.template,
        "prompts": str(dataset.path("rl_train")),
        "reward": str(folder / "reward.json"),
        "rewards": str(folder / REWARDS),
        "times": str(folder / TIMES),
        "output": str(folder / "checkpoints"),
        "steps": rl.total_steps,
        "save_every": rl.save_freq,
        "samples": rl.train_batch_size * rl.rollouts_per_prompt,
        "rollouts": rl.rollouts_per_prompt,
        "update": rl.ppo_mini_batch_size * rl.rollouts_per_prompt,
        "learning_rate": rl.actor_lr,
        "min_lr_ratio": rl.min_lr_ratio,
        "grad_clip": rl.grad_clip,
        "clip_ratio": rl.clip_ratio,
        "temperature": rl.temperature,
        "max_prompt_length": rl.max_prompt_length,
        "max_response_length": rl.max_response_length,
        "seed": rl.seed,
    }


def read_curve(rewards: Path, times: Path) -> list[Point]:
    """A point a step: the scoring's line about its samples, and the clock's seconds at its end.

    Raises:
        StageError: the two files don't have as many steps.
    """
    steps = [json.loads(line) for line in _lines(rewards)]
    seconds = [json.loads(line) for line in _lines(times)]
    if len(steps) != len(seconds):
        raise StageError(
            f"{len(steps)} batches were scored ({rewards}) in {len(seconds)} steps ({times})"
        )
    points: list[Point] = []
    for step, end in zip(steps, seconds, strict=True):
        samples = step["samples"] + (points[-1].samples if points else 0)
        points.append(Point(samples=samples, seconds=round(end, 2), reward=step["reward"]))
    return points


def _train(trainer: str, profile: Profile, folder: Path) -> float:
    script = SCRIPTS / f"{trainer}_grpo.py"
    # Offline, with as many threads as our trainer has.
    environment = engine_env(profile, str(folder))
    command = Command([sys.executable, str(script), str(folder / TRAINING)], environment)
    with chdir(folder):
        return launch(command, name=trainer, log=folder / "train.log")


def _evaluate(run: Run, services: Services, verl_run: Path) -> dict[str, Any]:
    """Choose a checkpoint on the dev split, and test it."""
    profile = run.profile
    recipe = get_recipe(profile.recipe)
    dataset = stage_of(verl_run, "dataset")
    folders = _checkpoints(run.directory)
    # As with ours: where training made it worse, SFT's model is kept.
    folders[0] = stage_of(verl_run, "sft").path("model")
    rl_dev = pq.read_table(dataset.path("rl_dev"))["extra_info"].to_pylist()
    dev_ids = {info["row_id"] for info in rl_dev}
    dev = [row for row in read_jsonl(dataset.path("rows"), Row) if row.id in dev_ids]
    models = {f"step_{step}": str(path) for step, path in folders.items()}
    dev_arms = _arms(run, services, models, dev, "dev")
    dev_values = {
        name: summarise(arm, dev, profile.evaluate, recipe).mean("top1") or 0.0
        for name, arm in dev_arms.items()
    }
    best = max(folders, key=lambda step: (dev_values[f"step_{step}"], step))
    test = list(read_jsonl(dataset.path("test"), Row))
    test_arm = _arms(run, services, {"rl": str(folders[best])}, test, "test")["rl"]
    updates_a_step = profile.rl.train_batch_size // profile.rl.ppo_mini_batch_size
    return {
        "top1": marks(test_arm, test, recipe),
        "quality": summarise(test_arm, test, profile.evaluate, recipe).mean("quality"),
        "chosen_step": best // updates_a_step,
        "dev_metric": "top1",
        "dev_value": dev_values[f"step_{best}"],
    }


def _checkpoints(directory: Path) -> dict[int, Path]:
    """The checkpoints' folders, by the rival's step.

    Raises:
        StageError: there is none.
    """
    folders = {
        int(path.name.rpartition("-")[2]): path
        for path in (directory / "checkpoints").glob("checkpoint-*")
    }
    if not folders:
        raise StageError(f"no checkpoint under {directory}; see {directory / 'train.log'}")
    return folders


def _arms(
    run: Run, services: Services, folders: dict[str, str], rows: Sequence[Row], split: str
) -> dict[str, list[ArmRow]]:
    """The rows through each model, as `evaluate` does it."""
    profile = run.profile
    recipe = get_recipe(profile.recipe)
    directory = run.stage_directory(split)
    prompts = directory / "prompts.jsonl"
    write_jsonl(
        prompts,
        ({"id": row.id, "messages": recipe.student_messages(row, profile.tenant)} for row in rows),
    )
    for command in generate_commands(profile, folders, prompts, directory, {}):
        launch(command, name="generation", log=directory / "generate.log")
    price = profile.prices.get(profile.student.name)
    answers = {
        name: student_rows(_lines(directory / f"{name}.answers.jsonl"), price, recipe)
        for name in folders
    }

    async def complete() -> dict[str, list[ArmRow]]:
        async with open_clients(run, services, recipe.grader.services) as clients:
            measured = await measure(answers, rows, recipe.grader, clients, profile)
        return measured.arms

    return asyncio.run(complete())


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
