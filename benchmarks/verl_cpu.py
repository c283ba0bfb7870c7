"""Costs of a verl run on the CPU of this machine: start-up, phases of a step, CPU time by process.

    make bench NAME=verl_cpu

PPO with a critic on an untrained Qwen3 of 1.5 M parameters: 64 samples a step, each of exactly 24
tokens, because the end of sequence is an id that no token has. Start-up ends where the first
training step begins; nothing is validated or saved before. The median is over the steps after the
first two. Prints the tables and writes benchmarks/results/verl_cpu.json. Give a number of steps to
take more or fewer than 12.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from qinglan.config import Alarms, Profile
from qinglan.recipes import PrimaryMetric
from qinglan.runs.launcher import Command
from qinglan.training.engines.progress import TrainerSettings, next_metrics_path
from qinglan.training.engines.verl import ppo_command

RESULT = Path(__file__).parent / "results" / "verl_cpu.json"
STARTUP_TARGET_S = 35.0
STEP_TARGET_S = 1.6
STEPS = 12
WARM_UP_STEPS = 2
SAMPLES = 64
RESPONSE_TOKENS = 24
HIDDEN_SIZE = 128
LAYERS = 5
NO_TOKEN = 10**6
"""An id that no token has, so no answer ends early."""
POLL_S = 0.02

REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info, **_):
    row = {"row_id": extra_info["row_id"], "target": extra_info["row_id"]}
    return row | {"score": solution_str.count(ground_truth) / max(len(solution_str), 1)}
"""


def main(steps: int = STEPS) -> None:
    """Run, then print and write."""
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), steps)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"\n{result['parameters']:,} parameters, {os.cpu_count()} cores, "
        f"load before {result['load_before']:.1f}\n"
    )
    print("| | s | target | ratio |\n| --- | ---: | ---: | ---: |")
    for label, key, target in (
        ("start-up", "startup_s", STARTUP_TARGET_S),
        ("step", "step_s", STEP_TARGET_S),
    ):
        print(f"| {label} | {result[key]:.2f} | {target:.1f} | {result[key] / target:.2f} |")
    print_table("phase of a step | s", result["phases_s"], "{:.3f}")
    print_table(
        "process | CPU s up to the end of the first step", result["startup_cpu_s"], "{:.1f}"
    )
    print_table("process | CPU s a step", result["step_cpu_s"], "{:.2f}")
    print(f"\nWritten to {RESULT}")


def print_table(header: str, rows: dict[str, float], form: str) -> None:
    """Print a table of names and values."""
    print(f"\n| {header} |\n| --- | ---: |")
    for name, value in rows.items():
        print(f"| {name} | {form.format(value)} |")


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """The figures of one run."""
    parameters = make_model(folder / "model")
    command = training(folder, steps)
    load = os.getloadavg()[0]
    run = Run(command, folder)
    run.watch()
    first = run.steps[0]
    warm = run.steps[WARM_UP_STEPS:]
    before_warm = run.steps[WARM_UP_STEPS - 1]
    # Steps with answers of another length could not be compared.
    tokens = {step["data"]["response_length/mean"] for step in run.steps}
    if tokens != {float(RESPONSE_TOKENS)}:
        sys.exit(f"error: answers of {tokens} tokens instead of {RESPONSE_TOKENS}")
    phases_s: dict[str, float] = {}
    for name in sorted(warm[0]["data"]):
        if name.startswith("timing_s/"):
            seconds = statistics.median(step["data"][name] for step in warm)
            phases_s[name.removeprefix("timing_s/")] = seconds
    ends_s = [step["at"] for step in (before_warm, *warm)]
    warm_cpu_s = {
        name: (seconds - before_warm["cpu"].get(name, 0.0)) / len(warm)
        for name, seconds in run.steps[-1]["cpu"].items()
    }
    return {
        "cores": os.cpu_count(),
        "load_before": load,
        "parameters": parameters,
        "prompt_tokens": warm[0]["data"]["prompt_length/mean"],
        "startup_s": first["at"] - first["data"]["timing_s/step"] - run.began,
        "step_s": statistics.median(end - start for start, end in itertools.pairwise(ends_s)),
        "phases_s": phases_s,
        "startup_cpu_s": with_sum(first["cpu"]),
        "step_cpu_s": with_sum(warm_cpu_s),
        "whole_run_s": run.ended - run.began,
    }


def with_sum(seconds: dict[str, float]) -> dict[str, float]:
    """The sum, then the figures with the largest first."""
    largest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return {"all": sum(seconds.values()), **dict(largest_first)}


class Run:
    """A training process, with its metrics and its CPU time at the end of each step."""

    def __init__(self, command: Command, folder: Path) -> None:
        self._log = folder / "log.txt"
        self._metrics = Path(command.env["VERL_FILE_LOGGER_PATH"])
        self._cpu: dict[tuple[int, str], float] = {}
        self.steps: list[dict[str, Any]] = []
        self.began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command.argv, env=os.environ | command.env, stdout=log, stderr=log
            )

    def watch(self) -> None:
        """Wait for the end, noting time and CPU time at each step's end."""
        while self._process.poll() is None:
            self._look()
            time.sleep(POLL_S)
        self.ended = time.monotonic()
        if self._process.returncode != 0:
            sys.exit(f"error: training failed\n{self._log.read_text(encoding='utf-8')[-4000:]}")

    def _look(self) -> None:
        """Note each step whose line is there in full."""
        text = self._metrics.read_text(encoding="utf-8") if self._metrics.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        for line in lines[len(self.steps) :]:
            step = json.loads(line)
            step["at"] = time.monotonic()
            step["cpu"] = self._cpu_seconds()
            self.steps.append(step)

    def _cpu_seconds(self) -> dict[str, float]:
        """CPU seconds by role; of processes that have ended, those that were seen last."""
        root = psutil.Process(self._process.pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                name = role(process)
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._cpu[process.pid, name] = times.user + times.system
        seconds: dict[str, float] = {}
        for (_, name), value in self._cpu.items():
            seconds[name] = seconds.get(name, 0.0) + value
        return seconds


def role(process: psutil.Process) -> str:
    """The purpose of a process, by its command line."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith("ray::"):
        return words[0].split(".")[0].split("(")[0]
    if "qinglan.training.engines.ppo" in words:
        return "trainer"
    if len(words) < 3:
        return Path(words[0]).name
    # Ray's own processes; those in Python by their script.
    scripts = [Path(word).name for word in words[:4] if word.endswith(".py")]
    return f"Ray: {scripts[0] if scripts else Path(words[0]).name}"


def make_model(folder: Path) -> int:
    """Write an untrained model with the embedded base model's tokenizer; its parameters' number."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from qinglan.simulators.domains import domain_of
    from qinglan.simulators.pretrain import build_tokenizer

    tokenizer = build_tokenizer(domain_of("query_rewrite"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=4 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN_SIZE // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = NO_TOKEN
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def training(folder: Path, steps: int) -> Command:
    """The command line of the pipeline's RL stage, with the embedded profile's settings."""
    reward = folder / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    (folder / "reward.json").write_text("{}", encoding="utf-8")
    settings = TrainerSettings(
        folder=folder,
        max_invalid_share=0.0,
        use_labels=True,
        dev_metric="reward",
        dev_rows=frozenset(),
        primary_metric=PrimaryMetric("reward", "the reward"),
        patience=None,
        keep_checkpoints=None,
        alarms=Alarms(),
    )
    (folder / "trainer.json").write_text(settings.model_dump_json(), encoding="utf-8")
    return ppo_command(
        profile(str(reward), steps),
        model=folder / "model",
        train_file=make_prompts(folder / "train.parquet", 10 * SAMPLES),
        dev_file=make_prompts(folder / "dev.parquet", SAMPLES),
        output_dir=folder / "rl",
        reward_config=folder / "reward.json",
        trainer_settings=folder / "trainer.json",
        metrics_path=next_metrics_path(folder),
        run_name="benchmark",
    )


def profile(reward: str, steps: int) -> Profile:
    """The embedded profile's RL section over the benchmark's own reward.

    It has no validation and no checkpoints.
    """
    endpoint = {"model": "none"}
    return Profile.model_validate(
        {
            "name": "benchmark",
            "teacher": endpoint,
            "judge": endpoint,
            "prices": {"none": {"input_per_million_usd": 0, "output_per_million_usd": 0}},
            "rl": {
                "total_steps": steps,
                "train_batch_size": SAMPLES,
                "ppo_mini_batch_size": SAMPLES // 2,
                "ppo_micro_batch_size_per_gpu": SAMPLES // 2,
                "ppo_epochs": 1,
                "entropy_coefficient": 0.0,
                "grad_clip": 1.0,
                "actor_lr": 3e-4,
                "critic_lr": 1e-3,
                "max_prompt_length": 96,
                "max_response_length": RESPONSE_TOKENS,
                "val_before_train": False,
                "extra": {
                    "reward.custom_reward_function.path": reward,
                    "trainer.save_freq": -1,
                    "trainer.test_freq": -1,
                },
            },
            "trainer": {"device": "cpu", "threads": 2},
        }
    )


def make_prompts(path: Path, rows: int) -> Path:
    """Write questions of the embedded demo's length in the form that verl wants."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [
        {
            "data_source": "benchmark",
            "prompt": [
                {"role": "system", "content": "把问题改写成标准说法。"},
                {"role": "user", "content": f"第{number}个问题：那个饭前吃还是饭后吃？"},
            ],
            "ability": "benchmark",
            "reward_model": {"style": "rule", "ground_truth": "的"},
            "extra_info": {
                "index": number,
                "row_id": str(number),
                "gold_id": "",
                "unit": str(number),
            },
        }
        for number in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
