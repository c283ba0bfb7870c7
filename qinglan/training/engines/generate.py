"""Greedy answers of a student model, and how long one takes: a script for the trainer's environment.

    python -m qinglan.training.engines.generate --model sft=DIR --model rl=DIR --prompts FILE --output-dir DIR …

Runs on ms-swift's inference engines (transformers on the CPU, vLLM on GPUs) with the template of the training.
`prompts.jsonl` holds {"id", "messages"}; NAME.answers.jsonl {"id", "text", "completion_tokens", "prompt_tokens"} and,
for the first `--latency-queries` prompts, "latency_ms": one question at a time, after a warm-up.
The orchestrator imports `generate_commands` from here, so torch and swift are imported inside functions.
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
from qinglan.training.engines.swift import absolute_or_hub_id, engine_env, engine_python

Name = TypeVar("Name", bound=str)
_WARM_UP = 3
"""Single questions before the timed ones: an engine compiles or allocates for a batch of one at first."""


def generate_commands(profile: Profile, folders: Mapping[Name, str], prompts: Path, output_dir: Path) -> list[Command]:
    """The commands that answer all prompts with each model, one after the other.

    On GPUs each model has a process of its own, as vLLM frees its memory only when its process ends. On the CPU one
    process runs all models, as starting takes longer than answering.
    """
    on_cpu, tensor_parallel_size = profile.trainer.device == "cpu", profile.rl.tensor_model_parallel_size
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
        "tensor-parallel-size": tensor_parallel_size,
    }
    models = list(folders.items())
    commands = []
    for group in [models] if on_cpu else [[model] for model in models]:
        argv = [engine_python(profile), "-m", "qinglan.training.engines.generate"]
        argv += [f"--model={name}={absolute_or_hub_id(folder)}" for name, folder in group]
        argv += [f"--{name}={value}" for name, value in options.items()]
        commands.append(Command(argv, engine_env(profile, group[0][1]), 0 if on_cpu else tensor_parallel_size))
    return commands


def main() -> None:
    """Answer all prompts with each `--model NAME=DIR`; NAME.answers.jsonl is written whole or not at all."""
    arguments = _parse()
    prompts = [json.loads(line) for line in Path(arguments.prompts).read_text(encoding="utf-8").splitlines()]
    for named in arguments.model:
        name, _, folder = named.partition("=")
        answers = _answer_all(folder, prompts, arguments)
        gc.collect()  # free the model before the next one is loaded
        path = Path(arguments.output_dir) / f"{name}.answers.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(a, ensure_ascii=False) + "\n" for a in answers), encoding="utf-8")
        partial.replace(path)
        print(f"{name}: {len(answers)} answers", flush=True)  # noqa: T201 (the log file)


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


def _answer_all(folder: str, prompts: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    engine = _engine(folder, arguments)
    answers = [
        {
            "id": prompt["id"],
            "text": response.choices[0].message.content,
            "prompt_tokens": response.usage.prompt_tokens,
            "completion_tokens": response.usage.completion_tokens,
        }
        for prompt, response in zip(prompts, _ask(engine, prompts, arguments.max_new_tokens), strict=True)
    ]
    for prompt in prompts[: min(_WARM_UP, arguments.latency_queries)]:
        _ask(engine, [prompt], arguments.max_new_tokens)
    for prompt, answer in list(zip(prompts, answers, strict=True))[: arguments.latency_queries]:
        start = time.perf_counter()
        _ask(engine, [prompt], arguments.max_new_tokens)
        answer["latency_ms"] = 1000 * (time.perf_counter() - start)
    return answers


if __name__ == "__main__":
    main()
