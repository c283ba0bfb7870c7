"""Greedy answers of a student model, and how long one takes: a script for the trainer's environment.

    python -m qinglan.training.engines.generate --model sft=DIR --model rl=DIR --prompts FILE --output-dir DIR …

Runs on ms-swift's inference engines (transformers on the CPU, vLLM on GPUs) with the template of the training.
`prompts.jsonl` holds {"id", "messages"}; NAME.answers.jsonl {"id", "text", "completion_tokens", "prompt_tokens"} and,
for the first `--latency-queries` prompts, "latency_ms": one question at a time, after all have been answered once and
the first few a second time, one by one, uncounted.
The orchestrator imports `generate_commands` from here, so torch and swift are imported inside the functions that run
over there.
"""

import argparse
import gc
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from qinglan.config import Profile
from qinglan.runs.command import Command
from qinglan.training.engines.swift import engine_env, engine_python, located

Name = TypeVar("Name", bound=str)
_WARM_UP = 3
"""Single questions that are not timed: an engine prepares itself for a batch of one."""


def generate_commands(profile: Profile, folders: Mapping[Name, str], prompts: Path, output_dir: Path) -> list[Command]:
    """The commands that answer all prompts with each model, one after the other.

    A model a process on GPUs, where vLLM gives its memory back only with its process; all in one on the CPU, where
    starting takes longer than answering.
    """
    models = list(folders.items())
    groups = [models] if profile.trainer.device == "cpu" else [[model] for model in models]
    return [_command(profile, dict(group), prompts, output_dir) for group in groups]


def _command(profile: Profile, folders: Mapping[Name, str], prompts: Path, output_dir: Path) -> Command:
    on_cpu = profile.trainer.device == "cpu"
    options = {
        "prompts": prompts.resolve(),
        "output-dir": output_dir.resolve(),
        "backend": "transformers" if on_cpu else "vllm",
        "model-type": profile.student.model_type,
        "template": profile.student.template,
        "torch-dtype": profile.sft.torch_dtype,
        "max-new-tokens": profile.student.max_new_tokens,
        "batch-size": profile.evaluate.batch_size,
        "latency-queries": profile.evaluate.latency_queries,
        "tensor-parallel-size": profile.rl.tensor_model_parallel_size,
    }
    argv = [engine_python(profile), "-m", "qinglan.training.engines.generate"]
    argv += [f"--model={name}={located(folder)}" for name, folder in folders.items()]
    argv += [f"--{name}={value}" for name, value in options.items()]
    gpus = 0 if on_cpu else profile.rl.tensor_model_parallel_size
    return Command(argv, engine_env(profile, next(iter(folders.values()))), gpus)


def main() -> None:
    """Answer all prompts with each `--model NAME=DIR`; NAME.answers.jsonl is written whole or not at all."""
    arguments = _parse()
    prompts = [json.loads(line) for line in Path(arguments.prompts).read_text(encoding="utf-8").splitlines()]
    for named in arguments.model:
        name, _, folder = named.partition("=")
        answers = _answers(folder, prompts, arguments)
        gc.collect()  # the model is gone before the next one is loaded
        path = Path(arguments.output_dir) / f"{name}.answers.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers), encoding="utf-8")
        partial.replace(path)
        print(f"{name}: {len(answers)} answers", flush=True)  # noqa: T201 (the log file)


def _answers(folder: str, prompts: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    engine = _engine(folder, arguments)
    answers = _answer_all(engine, prompts, arguments)
    _time_single(engine, prompts, answers, arguments)
    return answers


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--backend", choices=["transformers", "vllm"], required=True)
    parser.add_argument("--model-type", required=True)
    parser.add_argument("--template", required=True)
    parser.add_argument("--torch-dtype", required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--latency-queries", type=int, required=True)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    return parser.parse_args()


def _engine(folder: str, arguments: argparse.Namespace) -> Any:
    import torch

    common = {
        "model_type": arguments.model_type,
        "template_type": arguments.template,
        "torch_dtype": getattr(torch, arguments.torch_dtype),
    }
    if arguments.backend == "vllm":
        from swift.infer_engine import VllmEngine

        return VllmEngine(folder, tensor_parallel_size=arguments.tensor_parallel_size, **common)
    from swift.infer_engine import TransformersEngine

    return TransformersEngine(folder, max_batch_size=arguments.batch_size, device_map="cpu", attn_impl="sdpa", **common)


def _ask(engine: Any, prompts: list[dict[str, Any]], max_new_tokens: int) -> list[Any]:
    from swift.infer_engine import InferRequest, RequestConfig

    requests = [InferRequest(messages=prompt["messages"]) for prompt in prompts]
    config = RequestConfig(max_tokens=max_new_tokens, temperature=0.0)
    return list(engine.infer(requests, config, use_tqdm=False))


def _answer_all(engine: Any, prompts: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    responses = _ask(engine, prompts, arguments.max_new_tokens)
    return [
        {
            "id": prompt["id"],
            "text": response.choices[0].message.content,
            "prompt_tokens": response.usage.prompt_tokens,
            "completion_tokens": response.usage.completion_tokens,
        }
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def _time_single(
    engine: Any, prompts: list[dict[str, Any]], answers: list[dict[str, Any]], arguments: argparse.Namespace
) -> None:
    for prompt in prompts[: min(_WARM_UP, arguments.latency_queries)]:
        _ask(engine, [prompt], arguments.max_new_tokens)
    for prompt, answer in list(zip(prompts, answers, strict=True))[: arguments.latency_queries]:
        start = time.perf_counter()
        _ask(engine, [prompt], arguments.max_new_tokens)
        answer["latency_ms"] = 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
