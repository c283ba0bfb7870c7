"""The generation script's command, and its loop with a fake engine."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qinglan.config import Profile
from qinglan.training.engines import generate
from qinglan.training.engines.generate import generate_commands

ProfileOf = Callable[..., Profile]


@pytest.mark.parametrize(
    ("device", "backend", "models"),
    [("cpu", "transformers", [{"sft": "/m/a", "rl": "/m/b"}]), ("cuda", "vllm", [{"sft": "/m/a"}, {"rl": "/m/b"}])],
)
def test_vllm_has_a_process_for_each_model(
    profile_of: ProfileOf, device: str, backend: str, models: list[dict[str, str]]
):
    profile = profile_of(trainer={"device": device, "gpus_per_node": 4}, rl={"tensor_model_parallel_size": 4})
    commands = generate_commands(profile, {"sft": "/m/a", "rl": "/m/b"}, Path("p.jsonl"), Path("out"))
    found = [json.loads(command.argv[-1]) for command in commands]
    assert [options["models"] for options in found] == models
    assert found[0]["prompts"] == str(Path("p.jsonl").resolve())
    assert (found[0]["backend"], found[0]["tensor_parallel_size"]) == (backend, 4)
    student = profile.student
    assert (found[0]["max_new_tokens"], found[0]["template"]) == (student.max_new_tokens, student.template)


def answer(engine: Any, prompts: list[dict[str, Any]], _max_tokens: int) -> list[Any]:
    usage = SimpleNamespace(prompt_tokens=7, completion_tokens=3)
    message = SimpleNamespace(content=f"{engine.folder} 答")
    return [SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage) for _ in prompts]


class Engine:
    alive = 0

    def __init__(self, folder: str, _: Any) -> None:
        Engine.alive += 1
        self.folder, self.itself = folder, self  # as real ones: only the garbage collector gets them
        assert Engine.alive == 1

    def __del__(self) -> None:
        Engine.alive -= 1


def test_answers_of_each_model_and_the_time_of_the_first(
    profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "messages": []}) + "\n" for n in range(3)))
    profile = profile_of(evaluate={"latency_queries": 2})
    (command,) = generate_commands(profile, {"sft": "/a", "rl": "/b"}, prompts, tmp_path)
    monkeypatch.setattr("sys.argv", command.argv[2:])
    monkeypatch.setattr(generate, "_engine", Engine)
    sizes: list[int] = []
    monkeypatch.setattr(generate, "_ask", lambda *asked: sizes.append(len(asked[1])) or answer(*asked))
    generate.main()
    lines = [json.loads(line) for line in (tmp_path / "rl.answers.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["/b 答"] * 3
    assert ["latency_ms" in line for line in lines] == [True, True, False]
    assert sizes == [3, 1, 1, 1, 1] * 2, "all at once, two to warm up, two timed"
    assert not list(tmp_path.glob("*.partial"))
    assert Engine.alive == 0, "a model is freed before the next one is loaded"
