"""ms-swift's command lines: pure, absolute, every profile's settings handed through; and the
generation's loop."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_types import ProfileOf

from qinglan.config import Profile
from qinglan.cpu import cpu_env
from qinglan.errors import EngineError
from qinglan.runs.launcher import Command
from qinglan.training.engines import generate, swift
from qinglan.training.engines.generate import generate_commands
from qinglan.training.engines.swift import merge_command, sft_command


def options(command: Command) -> dict[str, str]:
    """The words after each option, by its name."""
    starts = [place for place, word in enumerate(command.argv) if word.startswith("--")]
    values = {}
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        name = command.argv[start].removeprefix("--")
        values[name] = " ".join(command.argv[start + 1 : end])
    return values


def sft(
    profile: Profile, model: str = "Qwen/Qwen3-32B", resume_from: Path | None = None
) -> Command:
    files = {
        "train_file": Path("train.jsonl"),
        "dev_file": Path("dev.jsonl"),
        "output_dir": Path("out"),
    }
    return sft_command(profile, model=model, resume_from=resume_from, **files)


def test_settings_reach_the_command_line_and_extra_arguments_win(profile_of: ProfileOf):
    extra = {
        "packing": True,
        "seed": 5,
        "target_modules": ["q_proj", "v_proj"],
        "model_kwargs": {"a": 1},
    }
    settings = {"learning_rate": 1e-4, "lora_rank": 8, "torch_dtype": "float32", "extra": extra}
    command = sft(
        profile_of(sft=settings, trainer={"threads": 3}), resume_from=Path("out/checkpoint-3")
    )
    assert command.argv[:3] == [sys.executable, "-m", "swift.cli.sft"]
    assert cpu_env(3, "float32").items() <= command.env.items()
    expected = {
        "learning_rate": "0.0001",
        "lora_rank": "8",
        "bf16": "false",
        "fp16": "false",
        "full_determinism": "true",
        "model_type": "qwen3",
        "template": "qwen3_nothinking",
        "dataset": str(Path("train.jsonl").resolve()),
        "resume_from_checkpoint": str(Path("out/checkpoint-3").resolve()),
        "packing": "true",
        "seed": "5",
        "data_seed": "42",
        "target_modules": "q_proj v_proj",
        "model_kwargs": '{"a": 1}',
    }
    assert expected.items() <= options(command).items()
    assert "resume_from_checkpoint" not in options(sft(profile_of()))
    assert options(sft(profile_of(sft={"seed": 2})))["data_seed"] == "43", (
        "another order of the rows"
    )
    whole = options(sft(profile_of(sft={"tuner_type": "full"})))
    assert whole["tuner_type"] == "full"
    assert whole.keys() & {"lora_rank", "lora_alpha", "target_modules"} == set()


def test_a_local_model_is_absolute_and_offline(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").mkdir()
    local = sft(profile_of(), model="base")
    assert (options(local)["model"], local.env["HF_HUB_OFFLINE"]) == (str(tmp_path / "base"), "1")
    remote = sft(profile_of())
    assert options(remote)["model"] == "Qwen/Qwen3-32B"
    assert "HF_HUB_OFFLINE" not in remote.env


def test_a_hub_models_revision_reaches_every_command_that_loads_it(profile_of: ProfileOf):
    profile = profile_of(student={"base_model": "Qwen/Qwen3-32B", "revision": "abc123"})
    merge = merge_command(profile, adapter=Path("a"), output_dir=Path("m"), model="Qwen/Qwen3-32B")
    assert options(sft(profile))["model_revision"] == "abc123"
    assert options(merge)["model_revision"] == "abc123"
    assert "model_revision" not in options(sft(profile_of()))
    (command,) = generate_commands(
        profile, {"base": "Qwen/Qwen3-32B"}, Path("p.jsonl"), Path("out"), {}
    )
    assert json.loads(command.argv[-1])["revision"] == "abc123"


def test_gpus(profile_of: ProfileOf):
    trainer = {"device": "cuda", "gpus_per_node": 8, "python": "/opt/py"}
    command = sft(profile_of(trainer=trainer, sft={"deepspeed": "zero3"}))
    launcher = [
        "/opt/py",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=8",
        "-m",
        "swift.cli.sft",
    ]
    assert command.argv[:7] == launcher
    assert options(command)["deepspeed"] == "zero3"
    assert options(command).keys() & {"use_cpu", "full_determinism"} == set()


def test_merging(profile_of: ProfileOf):
    command = merge_command(
        profile_of(), adapter=Path("a"), output_dir=Path("m"), model="Qwen/Qwen3-32B"
    )
    assert command.argv[2] == "swift.cli.export"
    expected = {
        "merge_lora": "true",
        "adapters": str(Path("a").resolve()),
        "device_map": "cpu",
    }
    assert expected.items() <= options(command).items()


def checkpoint(
    folder: Path, step: Any, *, whole: bool = True, losses: dict[int, float] | None = None
) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    if whole:
        history: list[dict[str, float]] = [{"step": 1, "loss": 1}]
        for evaluated_at, loss in (losses or {}).items():
            history.append({"step": evaluated_at, "eval_loss": loss})
        (path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return path


def test_the_newest_whole_checkpoint(tmp_path: Path):
    assert swift.newest_checkpoint(tmp_path) is None
    for step in (90, 100):
        newest = checkpoint(tmp_path, step)
    checkpoint(tmp_path, 110, whole=False)
    checkpoint(tmp_path, "110-merged")
    assert swift.newest_checkpoint(tmp_path) == newest


def test_the_checkpoint_with_the_lowest_dev_loss(tmp_path: Path):
    with pytest.raises(EngineError, match="without a checkpoint"):
        swift.best_checkpoint(tmp_path)
    best = checkpoint(tmp_path, 20)
    assert swift.best_checkpoint(tmp_path) == best, "none was evaluated"
    losses = {10: 0.1, 20: 0.3, 30: 0.2, 40: 0.4}
    checkpoint(tmp_path, 40, losses=losses)
    assert swift.best_checkpoint(tmp_path) == best, "of those that were saved"
    better = checkpoint(tmp_path, 60, losses=losses | {20: math.nan, 60: 0.2})
    assert swift.best_checkpoint(tmp_path) == better
    checkpoint(tmp_path, 80, losses={20: math.nan, 60: math.nan})
    with pytest.raises(EngineError, match="SFT diverged"):
        swift.best_checkpoint(tmp_path)


def test_the_log_goes_back_to_the_checkpoint(tmp_path: Path):
    log = tmp_path / swift.LOGGING_FILE
    swift.rewind_log(tmp_path, tmp_path / "checkpoint-2")
    assert not log.exists()
    lines = [{"loss": 1.0 / step, "global_step/max_steps": f"{step}/9"} for step in (1, 2, 3, 4)]
    whole_lines = [json.dumps(line) + "\n" for line in [*lines, {"memory": 0}]]
    log.write_text("".join(whole_lines) + '{"loss": 0.')
    swift.rewind_log(tmp_path, tmp_path / "checkpoint-2")
    assert [json.loads(line) for line in log.read_text().splitlines()] == lines[:2]


@pytest.mark.parametrize(
    ("device", "backend", "models"),
    [
        ("cpu", "transformers", [{"sft": "/m/a", "rl": "/m/b"}]),
        ("cuda", "vllm", [{"sft": "/m/a"}, {"rl": "/m/b"}]),
    ],
)
def test_vllm_has_a_process_per_model(
    profile_of: ProfileOf, device: str, backend: str, models: list[dict[str, str]]
):
    serve = {"extra": {"vllm_max_model_len": 1024, "log_interval": 1}}
    profile = profile_of(
        trainer={"device": device, "gpus_per_node": 4},
        rl={"tensor_model_parallel_size": 4},
        serve=serve,
    )
    commands = generate_commands(
        profile, {"sft": "/m/a", "rl": "/m/b"}, Path("p.jsonl"), Path("out"), {}
    )
    arguments = [json.loads(command.argv[-1]) for command in commands]
    assert [argument["models"] for argument in arguments] == models
    first = arguments[0]
    assert first["prompts"] == str(Path("p.jsonl").resolve())
    assert first["backend"] == backend
    assert first["vllm"] == {"tensor_parallel_size": 4, "max_model_len": 1024}
    assert first["max_new_tokens"] == profile.student.max_new_tokens
    assert first["template"] == profile.student.template


def answer(engine: Any, prompts: list[dict[str, Any]], _max_tokens: int) -> list[Any]:
    usage = SimpleNamespace(prompt_tokens=7, completion_tokens=3)
    message = SimpleNamespace(content=f"{engine.folder} 答")
    return [
        SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage) for _ in prompts
    ]


class Engine:
    alive = 0

    def __init__(self, folder: str, *_: Any) -> None:
        Engine.alive += 1
        self.folder = folder
        # As with real ones, only the garbage collector gets it.
        self.itself = self
        assert Engine.alive == 1

    def __del__(self) -> None:
        Engine.alive -= 1


def test_answers_of_each_model_with_their_time(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "messages": []}) + "\n" for n in range(3)))
    profile = profile_of(evaluate={"latency_queries": 2})
    (command,) = generate_commands(profile, {"sft": "/a", "rl": "/b"}, prompts, tmp_path, {})
    sizes: list[int] = []

    def ask(engine: Any, prompts: list[dict[str, Any]], max_tokens: int) -> list[Any]:
        sizes.append(len(prompts))
        return answer(engine, prompts, max_tokens)

    monkeypatch.setattr("sys.argv", command.argv[2:])
    monkeypatch.setattr(generate, "_engine", Engine)
    monkeypatch.setattr(generate, "_ask", ask)
    generate.main()
    lines = [json.loads(line) for line in (tmp_path / "rl.answers.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["/b 答"] * 3
    assert ["latency_ms" in line for line in lines] == [True, True, False]
    assert sizes == [1, 1, 1, 1, 1, 3] * 2, (
        "three to warm up, two timed before anything of them is cached, all at once"
    )
    assert min(line["share_s"] for line in lines) > 0
    assert list(tmp_path.glob("*.partial")) == []
    assert Engine.alive == 0, "a model is freed before the next one is loaded"
