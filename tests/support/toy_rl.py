"""Random tiny Qwen3 models, prompts and a reward, for tests that train and serve for real.

The reward is the share of the letter `a` in the answer, which PPO learns in a few steps from
nothing.
"""

import json
import os
import random
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_service import SIMULATED
from verl_config import command_of

from qinglan.config import Profile, Trainer
from qinglan.recipes import PrimaryMetric
from qinglan.runs.launcher import Command
from qinglan.training.engines.progress import TrainerSettings, checkpoints, next_metrics_path
from qinglan.training.engines.verl import export_command

VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
NEEDS_VLLM = pytest.mark.skipif(
    not VLLM_PYTHON.exists(), reason="vLLM is not installed here: run `make setup-vllm`"
)
_TEXT = (
    "count the letters write words about cats dogs rivers stars tiny machines please say nice "
    "using a lot"
)
WORDS = _TEXT.split()
VERDICT = "词有，正确"
_JUDGE_CONTEXT = 4096
"""Tokens of a judge's longest prompt: passages in a byte-level vocabulary are long."""
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_REWARD = """
import asyncio, json, pathlib, random
async def compute_score(
    data_source, solution_str, ground_truth, extra_info, config_path, **_
):
    row = {'row_id': extra_info['row_id'], 'target': extra_info['row_id']}
    config = json.loads(pathlib.Path(config_path).read_text())
    await asyncio.sleep(config.get('latency_s', 0) * random.random())
    unknown = float('nan')
    if extra_info['index'] in config['failing']:
        row |= {'score': 0.0, 'invalid': 1.0, 'half_known': unknown, 'has_letter': unknown}
        return row
    share = solution_str.count(ground_truth) / max(len(solution_str), 1)
    half_known = share if extra_info['index'] % 2 else unknown
    row |= {'score': share, 'invalid': 0.0, 'half_known': half_known}
    return row | {'has_letter': float(share > 0)}
"""


def make_model(
    folder: Path, *, hidden_size: int = 64, layers: int = 2, vocab_size: int | None = 512
) -> Path:
    """A random Qwen3, as `save_pretrained` writes it.

    Args:
        vocab_size: None for a model that has no token that its tokenizer lacks.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    rng = random.Random(0)
    corpus = [" ".join(rng.choices(WORDS, k=12)) for _ in range(400)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=509, initial_alphabet=alphabet, special_tokens=special)
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size or len(fast),
        hidden_size=hidden_size,
        intermediate_size=8 * hidden_size // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_judge(folder: Path) -> Path:
    """A tiny Qwen3 that says one and the same verdict after any prompt.

    The verdict is one token, which it learns.
    """
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(folder, hidden_size=32, layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=_JUDGE_CONTEXT)
    tokenizer.add_tokens([AddedToken(VERDICT, normalized=False)])
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer = tokenizer.convert_tokens_to_ids([VERDICT, "<|im_end|>"])
    starts = [
        tokenizer.encode(f"<|im_start|>assistant\n{thoughts}")
        for thoughts in ("", "<think>\n\n</think>\n\n")
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        before = torch.randint(0, 256, (8, 48), generator=generator)
        ends = torch.tensor([starts[step % 2] + answer] * 8)
        ids = torch.cat([before, ends], dim=1)
        labels = ids.clone()
        labels[:, : -len(answer)] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = _JUDGE_CONTEXT
    path.write_text(json.dumps(config))
    return folder


def make_prompts(path: Path, rows: int) -> Path:
    """Write prompts into a parquet file, in the form that verl wants."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(path.name)
    records = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=6))}],
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"index": index, "row_id": str(index), "gold_id": "", "unit": str(index)},
        }
        for index in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def make_reward(folder: Path) -> tuple[Path, Path]:
    """A reward module and its configuration.

    The configuration has the rows that the reward can't score, and the longest time that it takes.
    """
    module = folder / "toy_reward.py"
    config = folder / "reward.json"
    module.write_text(_REWARD)
    config.write_text(json.dumps({"failing": []}))
    return module, config


def toy_profile(rl: dict[str, Any]) -> Profile:
    """A CPU profile with PPO settings that suit the toy."""
    settings: dict[str, Any] = {
        "train_batch_size": 16,
        "ppo_mini_batch_size": 8,
        "ppo_micro_batch_size_per_gpu": 8,
        "ppo_epochs": 1,
        "entropy_coefficient": 0.0,
        "grad_clip": 1.0,
        "gamma": 1.0,
        "lam": 1.0,
        "actor_lr": 3e-3,
        "critic_lr": 3e-3,
        "max_prompt_length": 64,
        "max_response_length": 12,
        "total_steps": 200,
        "save_freq": 20,
        "test_freq": 20,
    }
    sections = {"name": "toy", "rl": settings | rl, "trainer": {"device": "cpu", "threads": 1}}
    return Profile.model_validate(SIMULATED | sections)


def trainer_settings(folder: Path, **changes: Any) -> TrainerSettings:
    defaults = {
        "folder": folder,
        "max_invalid_share": 0.05,
        "use_labels": True,
        "patience": None,
        "keep_checkpoints": None,
        "alarms": {},
        "dev_rows": frozenset(),
        "dev_metric": "score",
        "primary_metric": PrimaryMetric("gold_top1", "gold top-1"),
    }
    return TrainerSettings.model_validate(defaults | changes)


class Toy:
    """A training run in a folder of its own."""

    def __init__(
        self, folder: Path, model_folder: Path, *, max_invalid_share: float = 0.5, **rl: Any
    ) -> None:
        self.folder = folder
        self.model = model_folder
        self.output = folder / "rl"
        # Not in the stage's folder, where each file counts as its engine's progress.
        self.said = folder.with_name(f"{folder.name}.said.txt")
        self.train = make_prompts(folder / "train.parquet", 64)
        self.dev = make_prompts(folder / "dev.parquet", 16)
        module, self.reward_config = make_reward(folder)
        extra = {"reward.custom_reward_function.path": str(module)}
        self.profile: Profile = toy_profile(rl | {"extra": extra})
        self.trainer_settings = folder / "trainer.json"
        settings = trainer_settings(
            folder,
            **self.profile.rl.model_dump(include={"patience", "keep_checkpoints", "alarms"}),
            dev_rows=frozenset(map(str, range(16))),
            max_invalid_share=max_invalid_share,
        )
        self.trainer_settings.write_text(settings.model_dump_json())

    def command(self) -> Command:
        return command_of(self.profile, self.folder, self.model, next_metrics_path(self.folder))

    def run_stage(self, trainer: Trainer) -> None:
        """Run the engine as the RL stage does."""
        # It is here because a process that is spawned to be killed can import this module, not a
        # test's.
        from qinglan.tasks.engine import run_engine

        self.profile = self.profile.model_copy(update={"trainer": trainer})
        with self.said.open("a", buffering=1) as messages:
            stage: Any = SimpleNamespace(
                run=SimpleNamespace(id="run", profile=self.profile),
                name="rl",
                key="abcdefghijkl",
                directory=self.folder,
                say=lambda text, **_: messages.write(text + "\n"),
            )
            progress = partial(checkpoints, self.output)
            run_engine(stage, self.command, name="verl", log="rl.log", progress=progress)

    def start(self, command: Command) -> "subprocess.Popen[bytes]":
        # As where a user hides all GPUs.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **command.env}
        with (self.folder / "log.txt").open("ab") as log:
            return subprocess.Popen(
                command.argv, env=env, stdout=log, stderr=log, start_new_session=True
            )

    def run(self, command: Command) -> None:
        status = self.start(command).wait(timeout=1800)
        assert status == 0, (self.folder / "log.txt").read_text()[-4000:]

    def export(self) -> Any:
        from transformers import AutoModelForCausalLM

        newest = max(checkpoints(self.output))
        output_dir = self.folder / "exported"
        command = export_command(
            self.profile,
            checkpoint=self.output / f"global_step_{newest}",
            base_model=self.model,
            output_dir=output_dir,
        )
        self.run(command)
        return AutoModelForCausalLM.from_pretrained(output_dir)


def vllm_toy(folder: Path, model: Path, extra: dict[str, Any] | None = None, **rl: Any) -> Toy:
    toy = Toy(folder, model, rollout_engine="vllm", **rl)
    trainer = toy.profile.trainer.model_copy(update={"python": str(VLLM_PYTHON)})
    toy.profile = toy.profile.model_copy(update={"trainer": trainer})
    toy.profile.rl.extra.update(extra or {})
    return toy
