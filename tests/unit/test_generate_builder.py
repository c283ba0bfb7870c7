"""The generation script's command, read back by its own parser, and its loop with a fake engine."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qinglan.config import Profile, load_profile
from qinglan.engines import generate
from qinglan.engines.generate import generate_command

ProfileOf = Callable[..., Profile]
SHIPPED = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def parsed(command: list[str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    monkeypatch.setattr("sys.argv", command[2:])
    return generate._parse()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_script_understands_every_profiles_command(path: Path, monkeypatch: pytest.MonkeyPatch):
    profile = load_profile(str(path))
    command = generate_command(profile, {"sft": "/m/a=b", "rl": "/m/c"}, Path("p.jsonl"), Path("out"))
    found = parsed(command.argv, monkeypatch)
    assert found.model == ["sft=/m/a=b", "rl=/m/c"]
    assert found.prompts == str(Path("p.jsonl").resolve())
    assert (found.max_new_tokens, found.template) == (profile.student.max_new_tokens, profile.student.template)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "transformers"), ("cuda", "vllm")])
def test_backend(profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch, device: str, backend: str):
    profile = profile_of(trainer={"device": device}, rl={"tensor_model_parallel_size": 4})
    found = parsed(generate_command(profile, {"rl": "/m"}, Path("p"), Path("o")).argv, monkeypatch)
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
    command = generate_command(profile, {"sft": "/a", "rl": "/b"}, prompts, tmp_path)
    monkeypatch.setattr("sys.argv", command.argv[2:])
    monkeypatch.setattr(generate, "_engine", lambda folder, _: folder)
    monkeypatch.setattr(generate, "_ask", answer)
    generate.main()
    lines = [json.loads(line) for line in (tmp_path / "rl.answers.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == ["/b 答"] * 3
    assert ["latency_ms" in line for line in lines] == [True, True, False]
    assert not list(tmp_path.glob("*.partial"))
