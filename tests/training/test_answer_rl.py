"""A real verl run of a recipe graded by rules alone: three steps of GRPO through the real reward service."""

import math
from pathlib import Path
from statistics import fmean
from typing import Any

import letters
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy_rl import Toy, make_model

from qinglan.config import Budget, LedgerStore, Reward, Tenant
from qinglan.recipes.scoring.service import RewardService
from qinglan.rows import Row
from qinglan.runs.launcher import JsonlTail
from qinglan.training.engines.progress import DEV_VALUE, TrainerSettings, checkpoints, read_metrics
from qinglan.training.engines.verl import REWARD_FUNCTION

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.ray]
for module in ("torch", "verl", "transfer_queue"):
    pytest.importorskip(module)

LETTERS = letters.Letters()
STEPS: dict[str, Any] = {"total_steps": 3, "save_freq": 3, "test_freq": 3}
GROUPS: dict[str, Any] = {"rollouts_per_prompt": 4, "train_batch_size": 4, "ppo_mini_batch_size": 4}


def write_prompts(path: Path, toy_prompts: Path) -> None:
    """The toy's questions as the dataset stage writes them; every fourth row names no letter."""
    questions = [row["prompt"][0]["content"] for row in pq.read_table(toy_prompts).to_pylist()]
    rows = [
        Row(id=f"{path.stem}-{n}", tenant="t", query=q, source="f", inputs={"letter": "a"} if n % 4 else {})
        for n, q in enumerate(questions)
    ]
    records = [LETTERS.rl_record(row, Tenant()) for row in rows]
    pq.write_table(pa.Table.from_pylist(records, schema=LETTERS.rl_schema), path)


def test_grpo_on_parts_given_by_rules(tmp_path: Path) -> None:
    toy = Toy(tmp_path, make_model(tmp_path / "model"), algorithm="grpo", max_invalid_share=0.0, **GROUPS, **STEPS)
    toy.profile.rl.extra["reward.custom_reward_function.path"] = REWARD_FUNCTION
    for path in (toy.train, toy.dev):
        write_prompts(path, path)
    service = RewardService(
        recipe=letters.__file__,
        parts=LETTERS.score_parts,
        reward=Reward(),
        tenant=Tenant(),
        ledger=LedgerStore(),
        state=tmp_path,
        budget=Budget(),
        run_id="toy",
        samples_log=tmp_path / "samples.jsonl",
    )
    toy.reward_config.write_text(service.model_dump_json())
    settings = TrainerSettings.model_validate_json(toy.trainer_settings.read_text())
    of_recipe = {"dev_metric": LETTERS.dev_metric(Reward(), []), "primary_metric": LETTERS.primary_metric}
    toy.trainer_settings.write_text(settings.model_copy(update=of_recipe).model_dump_json())
    toy.run(toy.command())

    steps = read_metrics(tmp_path)
    assert set(steps) == {0, 1, 2, 3} and max(checkpoints(toy.output)) == 3
    trained = [steps[step] for step in (1, 2, 3)]
    for part in ("share", "format", "pure", "judge_asked"):
        assert all(math.isfinite(step[f"reward_extra/{part}/mean"]) for step in trained)
    assert all(step["reward_extra/invalid"] == 0 and step["actor/grad_norm"] > 0 for step in trained)
    logged = list(JsonlTail(tmp_path / "samples.jsonl").new())
    assert len(logged) == 3 * 16 + 2 * 16
    dev, first = logged[:16], logged[16:32]
    assert {line["row_id"].partition("-")[0] for line in dev} == {"dev"}
    assert sum("share" in line for line in dev) == 12
    assert steps[0][DEV_VALUE] == pytest.approx(mean("share", dev))
    assert steps[1]["reward_extra/share/mean"] == pytest.approx(mean("share", first), abs=1e-6)
    assert steps[1]["critic/score/mean"] == pytest.approx(mean("score", first), abs=1e-6)
    assert not any("rag" in name for name in (*logged[0], *trained[0]))


def mean(part: str, samples: list[dict[str, Any]]) -> float:
    """Over the samples that have it."""
    return fmean(line[part] for line in samples if part in line)
