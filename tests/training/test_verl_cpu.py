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
    """Import it, whatever verl and its libraries warn of."""
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
    rows = [
        rollout.RolloutRow(prompt, row, lambda _: None)
        for prompt, row in zip(prompts, settings, strict=True)
    ]
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
    for prompt, (tokens, log_probs) in zip(
        PROMPTS, sample(rollout, model, PROMPTS, rows, {-5}), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        expected = (
            torch.log_softmax(logits / 0.7, -1)
            .gather(1, torch.tensor(tokens).unsqueeze(1))
            .squeeze(1)
        )
        assert torch.allclose(torch.tensor(log_probs), expected, atol=1e-4)


def test_each_row_has_its_own_limit_and_stops_after_eos(rollout: Any, model: Any) -> None:
    rows = [rollout.Sampling(max_tokens=limit, temperature=0) for limit in (1, 4, 9)]
    free = sample(rollout, model, PROMPTS, rows, {-5})
    assert [len(tokens) for tokens, _ in free] == [1, 4, 9]
    eos = free[2][0][2]
    stopped, log_probs = sample(rollout, model, PROMPTS, rows, {eos})[2]
    assert stopped[-1] == eos and eos not in stopped[:-1] and len(log_probs) == len(stopped) <= 3


def test_top_k_and_top_p_cut_each_row_on_its_own(rollout: Any) -> None:
    log_probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]] * 3).log()
    rows = [rollout.Sampling(1, top_k=1), rollout.Sampling(1, top_p=0.8), rollout.Sampling(1)]
    left = rollout.SamplingRules(rows).cut(log_probs).isfinite().sum(-1)
    assert left.tolist() == [1, 2, 4]


def test_tokens_are_drawn_by_their_probability_and_never_without_one(rollout: Any) -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])
    logits = probabilities.log().expand(20_000, -1)
    points = torch.rand(
        len(logits), 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    token, log_prob = rollout.SamplingRules([rollout.Sampling(1)] * len(logits)).pick(
        logits, points
    )
    share = torch.bincount(token, minlength=5) / len(logits)
    assert torch.allclose(share, probabilities, atol=0.015) and share[1] == share[4] == 0
    assert torch.allclose(log_prob, probabilities.log()[token])


def test_a_row_draws_the_same_tokens_in_any_company(rollout: Any, model: Any) -> None:
    settings = [rollout.Sampling(9, seed=seed) for seed in (5, 6, 7)]
    together = sample(rollout, model, PROMPTS, settings, {-5})
    for prompt, row, (tokens, _) in zip(PROMPTS, settings, together, strict=True):
        assert sample(rollout, model, [prompt], [row], {-5})[0][0] == tokens
    [(other, _)] = sample(rollout, model, PROMPTS[:1], [rollout.Sampling(9, seed=8)], {-5})
    assert other != together[0][0]


def test_a_row_is_answered_when_it_ends_and_leaves(rollout: Any, model: Any) -> None:
    answers: list[int] = []
    rows = [
        rollout.RolloutRow(
            prompt, rollout.Sampling(limit), lambda sampled: answers.append(len(sampled[0]))
        )
        for prompt, limit in zip(PROMPTS, (5, 1, 2), strict=True)
    ]
    batch = rollout.RolloutBatch(model, rows, {-5}, 0)
    assert answers == [1] and len(batch.rows) == 2
    batch.step()
    assert answers == [1, 2] and len(batch.rows) == 1


def server(model: Any, max_rows: int) -> Any:
    return quietly("verl_cpu.rollout").RolloutServer(model, {-5}, 0, max_rows)


async def test_a_batch_has_the_same_bits_whatever_the_order_of_its_requests(
    rollout: Any, model: Any
) -> None:
    serving, rows = server(model, max_rows=2), list(enumerate(PROMPTS))

    async def ask(place: int, prompt: list[int]) -> Any:
        return place, await serving.generate(
            prompt, rollout.Sampling(9, seed=place), place, len(PROMPTS)
        )

    first = await asyncio.gather(*(ask(*row) for row in rows))
    assert first == sorted(await asyncio.gather(*(ask(*row) for row in reversed(rows))))


async def test_a_failed_batch_is_told_to_its_callers_and_the_next_one_is_served(
    rollout: Any, model: Any
) -> None:
    serving = server(model, max_rows=8)
    asked = [
        serving.generate(row, rollout.Sampling(2), place, 2)
        for place, row in enumerate(([10**6], PROMPTS[0]))
    ]
    failed = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(error, IndexError) for error in failed)
    assert len((await serving.generate(PROMPTS[0], rollout.Sampling(2)))[0]) == 2


async def test_weights_that_do_not_fit_change_nothing(model: Any) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = {name: value + 1 for name, value in before.items() if "norm" not in name}
    with pytest.raises(ValueError, match=r"missing .*norm.* unexpected .*more"):
        await server(model, max_rows=8).load(wrong | {"more": before["lm_head.weight"]})
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


async def test_each_sample_has_a_seed_and_where_all_is_deterministic_a_name_of_its_own(
    monkeypatch: Any,
) -> None:
    module = quietly("engines.agent_loop")

    async def run(_: Any, sampling_params: dict[str, Any], **sample: Any) -> tuple[int, int]:
        return sampling_params["seed"], sample["priority"]

    monkeypatch.setattr(module.SingleTurnAgentLoop, "run", run)
    (agent,) = yaml.safe_load(module.AGENTS_FILE.read_text())
    assert agent == {"name": AGENT, "_target_": f"{module.__name__}.SeededSingleTurn"}
    drawn = []
    for run_seed, step, index, session in itertools.product((1, 2), (1, 2), (0, 7), (0, 1)):
        loop: Any = object.__new__(module.SeededSingleTurn)
        loop.rollout_config = SimpleNamespace(seed=run_seed, n=2, full_determinism=True)
        sample = {"global_steps": step, "index": index, "session_id": session}
        drawn.append(await loop.run({}, **sample))
        assert await loop.run({}, **sample) == drawn[-1]
    assert [len(set(each)) for each in zip(*drawn, strict=True)] == [16, 4]


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
    assert sorted(order[:32]) == list(range(32)) and sorted(order[32:]) == list(range(32, 64)), (
        "each rank has its rows"
    )
    assert {sum(is_padding[row] for row in order[at : at + 4]) for at in range(32, 64, 4)} == {2}
    assert [row for row in order if not is_padding[row]] == list(range(48)), (
        "the samples keep their order"
    )

    def diluted(of: Any, batch: Any, metrics: dict[str, float]) -> Any:
        metrics[trainer.REWARD_KL] = 0.075  # of 0.1, as 16 of 64 rows count as 0
        of.kl_ctrl_in_reward.update(current_kl=0.075, n_steps=64)
        return batch

    monkeypatch.setattr(trainer.PPOTrainerSync, "_compute_advantage", diluted)
    training: Any = object.__new__(trainer.RewardedTrainer)
    training.config = SimpleNamespace(algorithm=SimpleNamespace(use_kl_in_reward=True))
    training.kl_ctrl_in_reward, diluted_too = (
        AdaptiveKLController(0.1, target_kl=0.1, horizon=640) for _ in range(2)
    )
    diluted_too.update(current_kl=0.075, n_steps=64)
    assert diluted_too.value < 0.1
    training._extras, metrics = dict.fromkeys(range(48)), dict[str, float]()
    training._compute_advantage(SimpleNamespace(keys=range(64)), metrics)
    assert (
        training.kl_ctrl_in_reward.value
        == pytest.approx(metrics[trainer.REWARD_KL])
        == pytest.approx(0.1)
    )


def attempt(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    resumed_at: int,
    rate: float = 1.0,
    **settings: Any,
) -> Any:
    """A trainer without verl: `rate` is multiplied as alarms want it, and `saved` has it by
    step."""
    module, quiet = quietly("engines.ppo_trainer"), SimpleNamespace(load_state_dict=lambda _: None)
    for name in ("_compute_metrics", "_balance_batch"):
        monkeypatch.setattr(module.PPOTrainerSync, name, lambda _, batch, *__: batch)
    answers = {
        "responses": torch.ones(1, 1),
        "rollout_log_probs": SimpleNamespace(values=lambda: torch.zeros(1)),
    }
    monkeypatch.setattr(module.transfer_queue, "kv_batch_get", lambda **_: answers)
    made, given = object.__new__(module.RewardedTrainer), trainer_settings(folder, **settings)
    made._settings, made._progress, made._checkpoints = (
        given,
        TrainingProgress(given, resumed_at),
        folder,
    )
    made.global_steps, made.total_training_steps, made.use_critic, made._rollouts = (
        resumed_at,
        100,
        False,
        1,
    )
    made.config = SimpleNamespace(algorithm=SimpleNamespace(use_kl_in_reward=False))
    made._extras, made.val_dataset, made.train_dataloader, made._data_before = (
        {"1": {"target": "1"}},
        [0],
        quiet,
        {},
    )
    made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})
    made.actor_rollout_wg.scale_lr = lambda factor: vars(made).update(rate=made.rate * factor)
    made.rate, made.saved, made._save_checkpoint = (
        rate,
        {},
        lambda: made.saved.update({made.global_steps: made.rate}),
    )
    return made


def step(run: Any, *, invalid: int = 0) -> None:
    run.global_steps += 1
    run._keep_scored = lambda batch: (
        batch,
        Counter(wanted=1, samples=1 - invalid, invalid=invalid, lost=invalid),
    )
    batch = SimpleNamespace(tags=[{}], partition_id="train", reorder=lambda _: None)
    run._balance_batch(batch, metrics := {CLIP_FRACTION: 0.9})
    run._compute_metrics(batch, metrics)
    next_metrics_path(run._checkpoints).write_text(
        json.dumps({"step": run.global_steps, "data": metrics}) + "\n"
    )


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
