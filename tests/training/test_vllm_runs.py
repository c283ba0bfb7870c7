"""verl with vLLM's rollout for real, by vLLM's CPU build: the code that GPU sites run, with other
devices and types of numbers.

Each start of verl with vLLM takes a minute or two, so one run shows several things.
"""

import json
import math
import os
import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toy_rl import NEEDS_VLLM, WORDS, make_model, vllm_toy
from waiting import processes_with, wait_until

from qinglan.config import load_profile
from qinglan.runs.launcher import JsonlTail, launch, remove_leaked_memory
from qinglan.training.alarms import SAMPLER_DIFFERENCE, read_alarms
from qinglan.training.engines.generate import UNMERGED, generate_commands
from qinglan.training.engines.progress import ALARMS_FILE, DEV_VALUE, checkpoints, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.extended, NEEDS_VLLM]
ROLLOUT = "actor_rollout_ref.rollout"
LARGEST_DIFFERENCE = "training/rollout_probs_diff_max"
CLOSE = {"max_sampler_difference": 1e-4}
"""A random model gives each token so little probability that the default would notice nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 numbers, as vLLM's attention on the CPU knows no smaller ones, and
    without unused tokens, which vLLM leaves out."""
    return make_model(tmp_path_factory.mktemp("model"), hidden_size=128, vocab_size=None)


def shared_memory() -> set[Path]:
    return {path for name in ("psm_*", "verl_weights_*") for path in Path("/dev/shm").glob(name)}


def test_ppo_goes_on_from_its_checkpoint_when_sampler_and_worker_are_killed_and_exports(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QINGLAN_WEIGHTS_WITHIN_S", "60")
    before = shared_memory()
    toy = vllm_toy(tmp_path, model, total_steps=8, save_freq=2, test_freq=2, alarms=CLOSE)
    trainer = toy.profile.trainer.model_copy(update={"max_restarts": 3})
    toy.profile = toy.profile.model_copy(update={"trainer": trainer})
    toy.reward_config.write_text('{"failing": [3], "latency_s": 1}')
    trains = threading.Thread(target=toy.run_stage, args=(toy.profile.trainer,), daemon=True)
    trains.start()

    def explain() -> str:
        return "".join(
            path.read_text() for path in (toy.said, tmp_path / "rl.log") if path.exists()
        )

    def has_ended(step: int) -> bool:
        """Has the step ended, or the training? A step's metrics come after its checkpoint."""
        metrics = read_metrics(tmp_path).get(step, {})
        return "critic/score/mean" in metrics or not trains.is_alive()

    for step, killed in ((2, "VLLM::EngineCore"), (4, "WorkerDict"), (6, "ray::EndingServer")):
        wait_until(f"step {step}", partial(has_ended, step), explain=explain)
        processes = processes_with(killed, started_by=os.getpid())
        assert processes, explain()[-4000:]
        processes[0].kill()
    trains.join(1800)
    assert "3 of 3 restarts" in toy.said.read_text()
    first, second, third = map(int, re.findall(r"Resuming from \S+global_step_(\d+)", explain()))
    assert 2 <= first < 4 <= second < 6 <= third
    assert max(checkpoints(toy.output)) == 8, explain()[-4000:]

    steps = read_metrics(tmp_path)
    trained = [steps[step] for step in steps if "critic/score/mean" in steps[step]]
    assert len(trained) >= 7
    assert DEV_VALUE in steps[0]
    assert DEV_VALUE in steps[8]
    assert sum(step["reward_extra/invalid"] for step in trained) > 0, (
        "a sample without a reward is left out"
    )
    assert max(step[LARGEST_DIFFERENCE] for step in trained) < 1e-4
    assert min(step["timing_s/gen"] for step in trained) < 4, (
        "one after the other, 16 rewards take 8 s"
    )
    assert "sampler_mismatch" not in {alarm.name for alarm in read_alarms(tmp_path / ALARMS_FILE)}
    assert shared_memory() <= before
    assert toy.export().model.embed_tokens.weight.isnan().sum() == 0


def test_grpo_and_ppo_send_an_adapter_to_a_sampler_in_bfloat16_and_correct_for_it(
    tmp_path: Path, model: Path
) -> None:
    from transformers import AutoModelForCausalLM

    groups: dict[str, Any] = {
        "rollouts_per_prompt": 4,
        "train_batch_size": 4,
        "ppo_mini_batch_size": 4,
    }
    correction = "algorithm.rollout_correction"
    extra = {
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.free_cache_engine": True,  # vLLM is asked to sleep and to wake up
        f"{correction}.rollout_is": "token",
        f"{correction}.rollout_is_threshold": 2.0,
    }
    rl = {"lora_rank": 8, "total_steps": 4, "save_freq": 4}
    critic = make_model(tmp_path / "critic", hidden_size=32, layers=1)
    learning: dict[str, Any] = {
        "algorithm": "ppo",
        "actor_lr": 0.02,
        "test_freq": 4,
        "critic_model": str(critic),
        "kl": {"mode": "reward", "target_kl": 0.05},
    }
    standing: dict[str, Any] = {
        "algorithm": "grpo",
        "actor_lr": 1e-12,
        "test_freq": 1,
        "patience": 1,
    }
    toys = []
    for seed, settings in ((1, learning), (2, standing)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        toys.append(vllm_toy(folder, model, extra, seed=seed, **rl, **settings, **groups))
    # At the same time: neither may take the other's weights.
    start = time.time()
    running = [toy.start(toy.command()) for toy in toys]
    for toy, process in zip(toys, running, strict=True):
        assert process.wait(1800) == 0, (toy.folder / "log.txt").read_text()[-4000:]
    remove_leaked_memory(start)
    weight = "model.layers.0.self_attn.q_proj.weight"
    frozen = "model.embed_tokens.weight"
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for toy, last in zip(toys, (4, 1), strict=True):
        steps = read_metrics(toy.folder)
        assert max(steps) == last, "ended early where dev stands still"
        assert max(checkpoints(toy.output)) == last
        trained = [steps[step] for step in range(1, last + 1)]
        losses = [step["actor/pg_loss"] for step in trained]
        assert [loss for loss in losses if not math.isfinite(loss)] == []
        assert max(step["actor/grad_norm"] for step in trained) > 0
        assert max(step[SAMPLER_DIFFERENCE] for step in trained) < 1e-4, (
            "the adapter has reached the sampler"
        )
        assert [name for name in trained[0] if name.startswith("rollout_corr/")]
        exported = toy.export().state_dict()
        assert exported[weight].isfinite().all()
        assert exported[frozen].equal(before[frozen])
        if toy is toys[0]:
            assert not exported[weight].equal(before[weight])
    metrics = read_metrics(toys[0].folder)[4]
    assert metrics["critic/grad_norm"] > 0
    assert metrics["actor/reward_kl_penalty_coeff"] != 0.001, "target_kl changes it"


@pytest.mark.parametrize("lora_rank", [0, 8], ids=["weights", "adapter"])
def test_a_sampler_that_loses_weights_is_noticed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, lora_rank: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    monkeypatch.setenv("QINGLAN_WEIGHTS_WITHIN_S", "60")
    extra = {f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls": "faulty_sampler.FaultyWorker"}
    rl = {
        "total_steps": 20,
        "val_before_train": False,
        "actor_lr": 0.01,
        "lora_rank": lora_rank,
        "alarms": CLOSE,
    }
    toy = vllm_toy(tmp_path, model, extra, **rl)
    start = time.time()
    process = toy.start(toy.command())
    assert process.wait(timeout=1800) != 0
    remove_leaked_memory(start)
    log = (tmp_path / "log.txt").read_text()
    assert "vLLM did not take the weights within 60 s" in log, log[-4000:]
    assert {alarm.name for alarm in read_alarms(tmp_path / ALARMS_FILE)} >= {"sampler_mismatch"}


def test_vllm_s_batch_engine_answers_as_transformers_does(tmp_path: Path, model: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    words = set(WORDS)
    lines = []
    for word in words:
        question = {"role": "user", "content": f"say {word} please"}
        lines.append(json.dumps({"id": word, "messages": [question]}) + "\n")
    prompts.write_text("".join(lines), encoding="utf-8")
    profile = load_profile("embedded_vllm")
    folders = {"sft": str(model), f"sft{UNMERGED}": str(model)}
    for command in generate_commands(profile, folders, prompts, tmp_path, {f"sft{UNMERGED}": ""}):
        launch(command, name="generate", log=tmp_path / "generate.log")
    by_vllm, by_transformers = (
        list(JsonlTail(tmp_path / f"{name}.answers.jsonl").new()) for name in folders
    )
    pairs = list(zip(by_vllm, by_transformers, strict=True))
    equal_pairs = [pair for pair in pairs if pair[0]["text"] == pair[1]["text"]]
    assert len(pairs) == len(words)
    assert len(equal_pairs) >= 0.9 * len(pairs), pairs
    for vllm_answer, transformers_answer in equal_pairs:
        expected = pytest.approx(transformers_answer["logprobs"], abs=1e-4)
        assert vllm_answer["logprobs"] == expected, vllm_answer["id"]
