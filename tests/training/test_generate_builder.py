"""The generation script's command, read back by its own parser, and its loop with a fake engine."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qinglan.config import Profile, load_profile
from qinglan.training.engines import generate
from qinglan.training.engines.generate import generate_commands

ProfileOf = Callable[..., Profile]
SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def parsed(command: list[str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr("sys.argv", command[2:])
    return generate._parse()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_script_understands_every_profiles_command(path: Path, monkeypatch: pytest.MonkeyPatch):
    profile = load_profile(str(path))
    commands = generate_commands(profile, {"sft": "/m/a=b", "rl": "/m/c"}, Path("p.jsonl"), Path("out"))
    models = [parsed(command.argv, monkeypatch).model for command in commands]
    found = parsed(commands[0].argv, monkeypatch)
    assert [model for group in models for model in group] == ["sft=/m/a=b", "rl=/m/c"]
    assert len(models) == (1 if profile.trainer.device == "cpu" else 2), "vLLM keeps its memory until its process ends"
    assert found.prompts == str(Path("p.jsonl").resolve())
    assert (found.max_new_tokens, found.template) == (profile.student.max_new_tokens, profile.student.template)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "transformers"), ("cuda", "vllm")])
def test_backend(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch, device: str, backend: str):
    profile = profile_of(trainer={"device": device, "gpus_per_node": 4}, rl={"tensor_model_parallel_size": 4})
    found = parsed(generate_commands(profile, {"rl": "/m"}, Path("p"), Path("o"))[0].argv, monkeypatch)
    assert (found.backend, found.tensor_parallel_size) == (backend, 4)


def answer(engine: str, prompts: list[dict[str, Any]], _max_tokens: int) -> list[Any]:
    usage = SimpleNamespace(prompt_tokens=7, completion_tokens=3)
    message = SimpleNamespace(content=f"{engine} 答")
    return [SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage) for _ in prompts]


def test_answers_of_each_model_and_the_time_of_the_first(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "messages": []}) + "\n" for n in range(3)))
    profile = profile_of(evaluate={"latency_queries": 2})
    (command,) = generate_commands(profile, {"sft": "/a", "rl": "/b"}, prompts, tmp_path)
    monkeypatch.setattr("sys.argv", command.argv[2:])
    monkeypatch.setattr(generate, "_engine", lambda folder, _: folder)
    sizes: list[int] = []
    monkeypatch.setattr(generate, "_ask", lambda *asked: sizes.append(len(asked[1])) or answer(*asked))
    generate.main()
    lines = [json.loads(line) for line in (tmp_path / "rl.answers.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["/b 答"] * 3
    assert ["latency_ms" in line for line in lines] == [True, True, False]
    assert sizes == [3, 1, 1, 1, 1] * 2, "all at once, two to warm up, two timed"
    assert not list(tmp_path.glob("*.partial"))


def test_a_model_is_gone_before_the_next_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Engine:
        alive = 0

        def __init__(self, *_: Any) -> None:
            Engine.alive += 1
            self.itself = self  # as real ones: only the garbage collector gets them
            assert Engine.alive == 1

        def __del__(self) -> None:
            Engine.alive -= 1

    (tmp_path / "p.jsonl").write_text("")
    options = {"prompts": tmp_path / "p.jsonl", "output-dir": tmp_path, "backend": "transformers", "model-type": "m"}
    options |= {"template": "t", "torch-dtype": "float32", "max-new-tokens": 1, "batch-size": 1, "latency-queries": 0}
    monkeypatch.setattr("sys.argv", ["x", "--model=a=/a", "--model=b=/b", *(f"--{k}={v}" for k, v in options.items())])
    monkeypatch.setattr(generate, "_engine", Engine)
    monkeypatch.setattr(generate, "_ask", lambda *_: [])
    generate.main()
    assert Engine.alive == 0
