"""The CPU rollout's sampling by itself, on a random tiny Qwen3."""

import asyncio
import itertools
import json
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from toy_rl import trainer_settings

from qinglan.errors import EngineError
from qinglan.training.alarms import CLIP_FRACTION
from qinglan.training.engines.progress import TrainingProgress, next_metrics_path
from qinglan.training.engines.verl import AGENT

pytest.importorskip("verl")

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]


def quietly(module: str) -> Any:
    """Import a module, whatever verl and its libraries warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"qinglan.training.{module}")


@pytest.fixture(scope="module")
def rollout() -> Any:
    return quietly("verl_cpu.sampling")


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder).eval()


def sample(
    rollout: Any, model: Any, prompts: list[list[int]], settings: list[Any], eos_ids: set[int]
) -> list[Any]:
    """One batch to its end: each row's tokens and their log-probabilities."""
    rows = []
    for prompt, sampling in zip(prompts, settings, strict=True):
        rows.append(rollout.RolloutRow(prompt, sampling, lambda _: None))
    batch = rollout.RolloutBatch(model, rows, eos_ids, 0)
    while batch.rows:
        batch.step()
    return [(row.tokens, row.log_probs) for row in rows]


def test_greedy_batch_agrees_with_generate(rollout: Any, model: Any) -> None:
    rows = [rollout.Sampling(max_tokens=8, temperature=0)] * len(PROMPTS)
    sampled = sample(rollout, model, PROMPTS, rows, {-5})
    for prompt, (tokens, _) in zip(PROMPTS, sampled, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        alone = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=511
        )
        assert tokens == alone[0, len(prompt) :].tolist()


def test_log_probs_are_those_of_a_plain_forward_pass(rollout: Any, model: Any) -> None:
    rows = [rollout.Sampling(max_tokens=6, temperature=0.7)] * len(PROMPTS)
    sampled = sample(rollout, model, PROMPTS, rows, {-5})
    for prompt, (tokens, log_probs) in zip(PROMPTS, sampled, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        tempered = torch.log_softmax(logits / 0.7, -1)
        expected = tempered.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=1e-5)


def test_each_row_has_its_own_limit_and_stops_after_eos(rollout: Any, model: Any) -> None:
    rows = [rollout.Sampling(max_tokens=limit, temperature=0) for limit in (1, 4, 9)]
    free = sample(rollout, model, PROMPTS, rows, {-5})
    assert [len(tokens) for tokens, _ in free] == [1, 4, 9]
    eos = free[2][0][2]
    stopped, log_probs = sample(rollout, model, PROMPTS, rows, {eos})[2]
    assert stopped.index(eos) == len(stopped) - 1
    assert len(stopped) <= 3
    assert len(log_probs) == len(stopped)


def test_top_k_and_top_p_cut_each_row_on_its_own(rollout: Any) -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3).log()
    rows = [rollout.Sampling(1, top_k=1), rollout.Sampling(1, top_p=0.8), rollout.Sampling(1)]
    possible_tokens = rollout.SamplingRules(rows).cut(log_probs).isfinite().sum(-1)
    assert possible_tokens.tolist() == [1, 2, 4]


def test_tokens_are_drawn_by_their_probability_and_never_without_one(rollout: Any) -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])
    logits = probabilities.log().expand(20_000, -1)
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(len(logits), 1, dtype=torch.float64, generator=generator)
    rules = rollout.SamplingRules([rollout.Sampling(1)] * len(logits))
    tokens, log_probs = rules.pick(logits, points)
    shares = torch.bincount(tokens, minlength=5) / len(logits)
    torch.testing.assert_close(shares, probabilities, atol=0.015, rtol=1e-5)
    assert shares[[1, 4]].tolist() == [0, 0]
    torch.testing.assert_close(log_probs, probabilities.log()[tokens], atol=1e-8, rtol=1e-5)


def test_a_row_draws_the_same_tokens_in_any_company(rollout: Any, model: Any) -> None:
    settings = [rollout.Sampling(9, seed=seed) for seed in (5, 6, 7)]
    together = sample(rollout, model, PROMPTS, settings, {-5})
    for prompt, row, (tokens, _) in zip(PROMPTS, settings, together, strict=True):
        assert sample(rollout, model, [prompt], [row], {-5})[0][0] == tokens
    [(with_other_seed, _)] = sample(
        rollout, model, PROMPTS[:1], [rollout.Sampling(9, seed=8)], {-5}
    )
    assert with_other_seed != together[0][0]


def test_a_row_is_answered_when_it_ends_and_leaves(rollout: Any, model: Any) -> None:
    lengths: list[int] = []

    def answer(sampled: tuple[list[int], list[float]]) -> None:
        lengths.append(len(sampled[0]))

    rows = []
    for prompt, limit in zip(PROMPTS, (5, 1, 2), strict=True):
        rows.append(rollout.RolloutRow(prompt, rollout.Sampling(limit), answer))
    batch = rollout.RolloutBatch(model, rows, {-5}, 0)
    assert (lengths, len(batch.rows)) == ([1], 2)
    batch.step()
    assert (lengths, len(batch.rows)) == ([1, 2], 1)


def server(model: Any, max_rows: int) -> Any:
    return quietly("verl_cpu.rollout").RolloutServer(model, {-5}, 0, max_rows)


async def test_a_batch_has_the_same_bits_whatever_the_order_of_its_requests(
    rollout: Any, model: Any
) -> None:
    serving = server(model, max_rows=2)

    async def ask(place: int) -> Any:
        sampling = rollout.Sampling(9, seed=place)
        return await serving.generate(PROMPTS[place], sampling, place, len(PROMPTS))

    forwards = await asyncio.gather(ask(0), ask(1), ask(2))
    backwards = await asyncio.gather(ask(2), ask(1), ask(0))
    assert forwards == backwards[::-1]


async def test_a_failed_batch_is_told_to_its_callers_and_the_next_one_is_served(
    rollout: Any, model: Any
) -> None:
    serving = server(model, max_rows=8)
    results = await asyncio.gather(
        serving.generate([10**6], rollout.Sampling(2), 0, 2),
        serving.generate(PROMPTS[0], rollout.Sampling(2), 1, 2),
        return_exceptions=True,
    )
    assert list(map(type, results)) == [IndexError, IndexError]
    tokens, _ = await serving.generate(PROMPTS[0], rollout.Sampling(2))
    assert len(tokens) == 2


async def test_weights_that_do_not_fit_change_nothing(model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = {name: value + 1 for name, value in before.items() if "norm" not in name}
    with pytest.raises(ValueError, match=r"missing .*norm.* unexpected .*more"):
        await server(model, max_rows=8).load(wrong | {"more": before["lm_head.weight"]})
    after = model.state_dict()
    assert [name for name in before if not after[name].equal(before[name])] == []


async def test_each_sample_has_a_seed_and_where_all_is_deterministic_a_name_of_its_own(
    monkeypatch: Any,
) -> None:
    module = quietly("engines.agent_loop")

    async def run(_: Any, sampling_params: dict[str, Any], **sample: Any) -> tuple[int, int]:
        return sampling_params["seed"], sample["priority"]

    monkeypatch.setattr(module.SingleTurnAgentLoop, "run", run)
    (agent,) = yaml.safe_load(module.AGENTS_FILE.read_text())
    assert agent == {"name": AGENT, "_target_": f"{module.__name__}.SeededSingleTurn"}
    seeds = set()
    priorities = set()
    for run_seed, step, index, session in itertools.product((1, 2), (1, 2), (0, 7), (0, 1)):
        loop: Any = object.__new__(module.SeededSingleTurn)
        loop.rollout_config = SimpleNamespace(seed=run_seed, n=2, full_determinism=True)
        sample = {"global_steps": step, "index": index, "session_id": session}
        seed, priority = await loop.run({}, **sample)
        assert await loop.run({}, **sample) == (seed, priority)
        seeds.add(seed)
        priorities.add(priority)
    assert (len(seeds), len(priorities)) == (16, 4)


def test_extras_that_are_not_known_are_left_out() -> None:
    extras = [{"rq": 1.0, "judge": float("nan"), "note": "text"}, {"rq": 0.0, "judge": 3.0}]
    expected = {"reward_extra/rq/mean": 0.5, "reward_extra/judge/mean": 3.0}
    assert quietly("engines.ppo_trainer").extra_metrics(extras) == expected


def test_the_critic_answers_with_its_adapter_after_the_references_turn() -> None:
    batch = SimpleNamespace(extra_info={"no_lora_adapter": True, "temperature": 1.0})
    assert quietly("engines.ppo_trainer")._for_workers(batch).extra_info == {"temperature": 1.0}


def test_rows_that_fill_up_a_batch_neither_dilute_the_kl_nor_stay_among_themselves(
    monkeypatch: Any,
) -> None:
    trainer = quietly("engines.ppo_trainer")
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    is_padding = [row >= 48 for row in range(64)]
    order = trainer.spread(is_padding, ranks=2)
    first_rank = order[:32]
    second_rank = order[32:]
    assert sorted(first_rank) == list(range(32)), "each rank has its rows"
    assert sorted(second_rank) == list(range(32, 64))
    padding_of_fours = []
    for start in range(0, 32, 4):
        four = second_rank[start : start + 4]
        padding_of_fours.append(sum(is_padding[row] for row in four))
    assert padding_of_fours == [2] * 8
    assert [row for row in order if not is_padding[row]] == list(range(48)), (
        "the samples keep their order"
    )

    # The samples' KL is 0.1, and 16 of 64 rows count as 0.
    diluted_kl = 0.075

    def compute_advantage(training: Any, batch: Any, metrics: dict[str, float]) -> Any:
        metrics[trainer.REWARD_KL] = diluted_kl
        training.kl_ctrl_in_reward.update(current_kl=diluted_kl, n_steps=64)
        return batch

    monkeypatch.setattr(trainer.PPOTrainerSync, "_compute_advantage", compute_advantage)
    told_of_all_rows = AdaptiveKLController(0.1, target_kl=0.1, horizon=640)
    told_of_all_rows.update(current_kl=diluted_kl, n_steps=64)
    assert told_of_all_rows.value < 0.1
    training: Any = object.__new__(trainer.RewardedTrainer)
    training.config = SimpleNamespace(algorithm=SimpleNamespace(use_kl_in_reward=True))
    training.kl_ctrl_in_reward = AdaptiveKLController(0.1, target_kl=0.1, horizon=640)
    training._extras = dict.fromkeys(range(48))
    metrics: dict[str, float] = {}
    training._compute_advantage(SimpleNamespace(keys=range(64)), metrics)
    assert metrics[trainer.REWARD_KL] == pytest.approx(0.1)
    assert training.kl_ctrl_in_reward.value == pytest.approx(0.1)


def attempt(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    resumed_at: int,
    rate: float = 1.0,
    **settings: Any,
) -> Any:
    """A trainer without verl: `rate` is multiplied as alarms want it, and `saved` has it by
    step."""
    module = quietly("engines.ppo_trainer")
    for name in ("_compute_metrics", "_balance_batch"):
        monkeypatch.setattr(module.PPOTrainerSync, name, lambda _, batch, *__: batch)
    answers = {
        "responses": torch.ones(1, 1),
        "rollout_log_probs": SimpleNamespace(values=lambda: torch.zeros(1)),
    }
    monkeypatch.setattr(module.transfer_queue, "kv_batch_get", lambda **_: answers)
    training = object.__new__(module.RewardedTrainer)
    training._settings = trainer_settings(folder, **settings)
    training._progress = TrainingProgress(training._settings, resumed_at)
    training._checkpoints = folder
    training._rollouts = 1
    training._extras = {"1": {"target": "1"}}
    training._data_before = {}
    training.global_steps = resumed_at
    training.total_training_steps = 100
    training.use_critic = False
    training.config = SimpleNamespace(algorithm=SimpleNamespace(use_kl_in_reward=False))
    training.val_dataset = [0]
    training.train_dataloader = SimpleNamespace(load_state_dict=lambda _: None)
    training.rate = rate
    training.saved = {}

    def scale_lr(factor: float) -> None:
        training.rate *= factor

    def save_checkpoint() -> None:
        training.saved[training.global_steps] = training.rate

    training.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]}, scale_lr=scale_lr)
    training._save_checkpoint = save_checkpoint
    return training


def step(run: Any, *, invalid: int = 0) -> None:
    """Train a step of one sample, which has no reward if `invalid` is 1."""
    run.global_steps += 1
    counts = Counter(wanted=1, samples=1 - invalid, invalid=invalid, lost=invalid)
    run._keep_scored = lambda batch: (batch, counts)
    batch = SimpleNamespace(tags=[{}], partition_id="train", reorder=lambda _: None)
    metrics = {CLIP_FRACTION: 0.9}
    run._balance_batch(batch, metrics)
    run._compute_metrics(batch, metrics)
    line = json.dumps({"step": run.global_steps, "data": metrics})
    next_metrics_path(run._checkpoints).write_text(f"{line}\n")


def test_an_alarm_lowers_the_rate_once_also_where_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lowering = {"actions": {"clip_fraction": "lower_lr"}}
    first = attempt(tmp_path, monkeypatch, 0, alarms=lowering)
    for _ in range(3):
        step(first)
    with pytest.raises(EngineError, match="of step 4 could not be scored"):
        step(first, invalid=1)
    second = attempt(tmp_path, monkeypatch, 3, first.saved[3], alarms=lowering)
    second.on_train_begin()
    step(second)
    assert second.rate == 0.5


@pytest.mark.parametrize(("at", "saved"), [(0, {}), (7, {7: 1.0})])
def test_a_validation_that_gives_up_keeps_what_was_learnt(
    tmp_path: Path, monkeypatch: Any, at: int, saved: Any
):
    training = attempt(tmp_path, monkeypatch, at)
    with pytest.raises(EngineError, match=f"of the validation at step {at} could not be scored"):
        training._val_metrics_update([], [], {"invalid": [True]})
    assert training.saved == saved


@pytest.mark.parametrize("platform", ["abacus", ""])
def test_entry_point_refuses_to_guess_the_platform(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = quietly("engines.ppo")
    monkeypatch.setenv("VERL_PLATFORM", platform)
    with pytest.raises(
        EngineError, match=r"VERL_PLATFORM is not set; .* platforms here: .*\bcpu\b"
    ):
        entry_point.check_platform()
