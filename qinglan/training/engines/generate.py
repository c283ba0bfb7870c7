"""Greedy answers of a student model, and how long one takes: a script for the trainer's
environment.

Runs on ms-swift's inference engines (transformers on the CPU, vLLM on GPUs) with the template of
the training. `prompts.jsonl` holds {"id", "messages"}; NAME.answers.jsonl {"id", "text",
"completion_tokens", "prompt_tokens", "share_s"}, which is its part, by tokens, of the time that all
answers together took; and, for the first prompts, "latency_ms": one question at a time, after a
warm-up; and "logprobs" of the tokens. The script's one argument is JSON, as `generate_commands`
makes it. The orchestrator imports this module, so torch and swift are imported inside functions.
"""

import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from qinglan.config import Profile
from qinglan.runs.artifacts import write_jsonl
from qinglan.runs.launcher import Command
from qinglan.training.engines.swift import absolute_or_hub_id, engine_env, engine_python

Name = TypeVar("Name", bound=str)
UNMERGED = "_unmerged"
"""After a model's name: as it was trained, by transformers: its base model with the adapter, if it
has one."""
_PARITY_TOKENS = 16
_WARM_UP = 3  # single questions before the timed ones: an engine compiles or allocates for a batch of one at first


def generate_commands(
    profile: Profile,
    folders: Mapping[Name, str],
    prompts: Path,
    output_dir: Path,
    adapters: Mapping[Name, str],
) -> list[Command]:
    """The commands that answer all prompts with each model in turn; those of `adapters` ("" for
    none) the first ones.

    With vLLM each model has a process of its own, as it frees its memory only when its process
    ends. Without, one process runs all models, as starting takes longer than answering.
    """
    on_cpu = profile.trainer.device == "cpu"
    options = profile.student.model_dump(
        include={"model_type", "template", "revision", "max_new_tokens"}
    ) | {
        "prompts": str(prompts.resolve()),
        "output_dir": str(output_dir.resolve()),
        "adapters": dict(adapters),
        "parity_prompts": profile.evaluate.parity_prompts if adapters else 0,
        "device_map": "cpu" if on_cpu else None,
        "torch_dtype": profile.sft.torch_dtype,
        "batch_size": profile.evaluate.batch_size,
        "latency_queries": profile.evaluate.latency_queries,
        "vllm": {"tensor_parallel_size": profile.rl.tensor_model_parallel_size}
        | profile.serve.vllm_arguments,
    }
    models = [(name, absolute_or_hub_id(folder)) for name, folder in folders.items()]
    commands = []
    for group in [[model] for model in models] if profile.answer_engine == "vllm" else [models]:
        engine = "transformers" if group[0][0] in adapters else profile.answer_engine
        argument = json.dumps(
            options | {"models": dict(group), "backend": engine}, ensure_ascii=False
        )
        argv = [engine_python(profile), "-m", "qinglan.training.engines.generate", argument]
        gpus = 0 if on_cpu else profile.rl.tensor_model_parallel_size
        commands.append(Command(argv, engine_env(profile, group[0][1]), gpus))
    return commands


def main() -> None:
    """Answer all prompts with each of the models; NAME.answers.jsonl is written whole or not at
    all."""
    options = json.loads(sys.argv[1])
    prompts = [json.loads(line) for line in Path(options["prompts"]).read_bytes().splitlines()]
    for name, folder in options["models"].items():
        adapter = options["adapters"].get(name)
        asked = prompts if adapter is None else prompts[: options["parity_prompts"]]
        answers = _answer_all(folder, adapter, asked, options)
        gc.collect()  # free the model before the next one is loaded
        write_jsonl(Path(options["output_dir"]) / f"{name}.answers.jsonl", answers)
        print(f"{name}: {len(answers)} answers", flush=True)  # noqa: T201 (the log file)


def _engine(folder: str, adapter: str | None, options: dict[str, Any]) -> Any:
    import torch

    common = {
        "model_type": options["model_type"],
        "template_type": options["template"],
        "revision": options["revision"],  # of a folder's model it is not read
        "torch_dtype": getattr(torch, options["torch_dtype"]),
    }
    if options["backend"] == "vllm":
        from swift.infer_engine import VllmEngine

        return VllmEngine(folder, **common, **options["vllm"])
    from swift.infer_engine import TransformersEngine

    common |= {"adapters": [adapter] if adapter else [], "device_map": options["device_map"]}
    return TransformersEngine(
        folder, max_batch_size=options["batch_size"], attn_impl="sdpa", **common
    )


def _ask(
    engine: Any, prompts: list[dict[str, Any]], max_new_tokens: int, *, logprobs: bool = False
) -> list[Any]:
    from swift.infer_engine import InferRequest, RequestConfig

    requests = [InferRequest(messages=prompt["messages"]) for prompt in prompts]
    config = RequestConfig(max_tokens=max_new_tokens, temperature=0.0, logprobs=logprobs)
    return list(engine.infer(requests, config))  # of several, the log shows how many are answered


def _answer_all(
    folder: str, adapter: str | None, prompts: list[dict[str, Any]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    engine, max_new_tokens = _engine(folder, adapter, options), options["max_new_tokens"]
    timed, compared = (
        options["latency_queries"] if adapter is None else 0,
        prompts[: options["parity_prompts"]],
    )
    for prompt in prompts[-_WARM_UP:] if timed else ():
        _ask(engine, [prompt], max_new_tokens)
    latencies_ms = []
    for number, prompt in enumerate(
        prompts[:timed], 1
    ):  # first, as vLLM keeps what it has read of a prompt
        start = time.perf_counter()
        _ask(engine, [prompt], max_new_tokens)
        latencies_ms.append(1000 * (time.perf_counter() - start))
        print(f"timed {number} of {timed}", flush=True)  # noqa: T201 (the log file, which shows that it goes on)
    start = time.perf_counter()
    responses = _ask(engine, prompts, max_new_tokens)
    took_s = time.perf_counter() - start
    tokens = [each.usage.prompt_tokens + each.usage.completion_tokens for each in responses]
    answers = [
        {
            "id": prompt["id"],
            "text": response.choices[0].message.content,
            "prompt_tokens": response.usage.prompt_tokens,
            "completion_tokens": response.usage.completion_tokens,
            "share_s": took_s * count / max(1, sum(tokens)),
        }
        for prompt, response, count in zip(prompts, responses, tokens, strict=True)
    ]
    for answer, latency_ms in zip(answers, latencies_ms, strict=False):
        answer["latency_ms"] = latency_ms
    responses = (
        _ask(engine, compared, min(_PARITY_TOKENS, max_new_tokens), logprobs=True)
        if compared
        else []
    )
    for answer, response in zip(answers, responses, strict=False):
        choice = response.choices[0]
        answer["start"], logged = (
            choice.message.content,
            (choice.logprobs or {}).get("content", ()),
        )  # of no token none
        answer["logprobs"] = [token["logprob"] for token in logged]
    return answers


if __name__ == "__main__":
    main()
