"""ms-swift for real: SFT of all parameters, of which a plain model folder is left."""

import json
from pathlib import Path

import pytest
from fixture_types import ProfileOf
from toy_rl import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from qinglan.runs.launcher import launch
from qinglan.training.engines import swift

pytestmark = pytest.mark.slow


def test_all_parameters_learn_and_the_model_holds_no_state_of_the_training(
    tmp_path: Path, profile_of: ProfileOf
):
    base = make_model(tmp_path / "base")
    lines = []
    for number in range(8):
        question = {"role": "user", "content": f"say {number}"}
        answer = {"role": "assistant", "content": "yes"}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(lines), encoding="utf-8")
    settings = {
        "tuner_type": "full",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "eval_steps": 1,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "torch_dtype": "float32",
        "save_steps": 1,
    }
    output = tmp_path / "checkpoints"
    command = swift.sft_command(
        profile_of(sft=settings),
        model=str(base),
        train_file=rows,
        dev_file=rows,
        output_dir=output,
        resume_from=None,
    )
    launch(command, name="SFT", log=tmp_path / "sft.log")
    best = swift.best_checkpoint(output)
    swift.copy_model(best, tmp_path / "model")
    assert {"optimizer.pt", "trainer_state.json"} <= {path.name for path in best.iterdir()}
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {name for name in names if name.endswith((".pt", ".bin", ".pth"))} == set()
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert after.keys() == before.keys()
    assert {name for name in after if not after[name].equal(before[name])}, "it has learnt"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) > 0
