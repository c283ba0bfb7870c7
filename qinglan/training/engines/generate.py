"""Greedy answers of a student model, and how long one takes: a script for the trainer's
environment.

Runs on ms-swift's inference engines (transformers on the CPU, vLLM on GPUs) with the template of
the training. `prompts.jsonl` holds {"id", "messages"}. NAME.answers.jsonl holds {"id", "text",
"completion_tokens", "prompt_tokens", "share_s"}, where `share_s` is the answer's part, by tokens,
of the time that all answers together took. The first answers also have "latency_ms", measured by
one question at a time after a warm-up, and "start" and "logprobs": the first tokens' text and
log-probabilities.

The script's one argument is JSON, as `generate_commands` makes it. The orchestrator imports this
module, so torch and swift are imported inside functions.
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
Prompt = dict[str, Any]
Answer = dict[str, Any]
UNMERGED = "_unmerged"
"""Suffix of a model's name for the model as it was trained, by transformers: its base model with
the adapter, if it has one."""
_PARITY_TOKENS = 16
_WARM_UP = 3
"""Single questions before the timed ones: an engine compiles or allocates for a batch of one at
first."""


def generate_commands(
    profile: Profile,
    folders: Mapping[Name, str],
    prompts: Path,
    output_dir: Path,
    adapters: Mapping[Name, str],
) -> list[Command]:
    """The commands that answer all prompts with each model in turn; those of `adapters` ("" for
    none) answer the first prompts alone.

    With vLLM each model has a process of its own, as it frees its memory only when its process
    ends. Without, one process runs all models, as starting takes longer than answering.
    """
    on_cpu = profile.trainer.device == "cpu"
    gpus = 0 if on_cpu else profile.rl.tensor_model_parallel_size
    vllm_arguments = {"tensor_parallel_size": profile.rl.tensor_model_parallel_size}
    options = profile.student.model_dump(
        include={"model_type", "template", "revision", "max_new_tokens"}
    )
    options |= {
        "prompts": str(prompts.resolve()),
        "output_dir": str(output_dir.resolve()),
        "adapters": dict(adapters),
        "parity_prompts": profile.evaluate.parity_prompts if adapters else 0,
        "device_map": "cpu" if on_cpu else None,
        "torch_dtype": profile.sft.torch_dtype,
        "batch_size": profile.evaluate.batch_size,
        "latency_queries": profile.evaluate.latency_queries,
        "vllm": vllm_arguments | profile.serve.vllm_arguments,
    }
    models = [(name, absolute_or_hub_id(folder)) for name, folder in folders.items()]
    groups = [models]
    if profile.answer_engine == "vllm":
        groups = [[model] for model in models]
    commands = []
    for group in groups:
        first_name, first_folder = group[0]
        # Only transformers runs a base model with an adapter as the training did.
        engine = "transformers" if first_name in adapters else profile.answer_engine
        group_options = options | {"models": dict(group), "backend": engine}
        argument = json.dumps(group_options, ensure_ascii=False)
        argv = [engine_python(profile), "-m", "qinglan.training.engines.generate", argument]
        commands.append(Command(argv, engine_env(profile, first_folder), gpus))
    return commands


def main() -> None:
    """Answer all prompts with each of the models; NAME.answers.jsonl is written whole or not at
    all."""
    options = json.loads(sys.argv[1])
    prompts = [json.loads(line) for line in Path(options["prompts"]).read_bytes().splitlines()]
    for name, folder in options["models"].items():
        adapter = options["adapters"].get(name)
        own_prompts = prompts if adapter is None else prompts[: options["parity_prompts"]]
        answers = _answer_all(folder, adapter, own_prompts, options)
        # Free the model before the next one is loaded.
        gc.collect()
        write_jsonl(Path(options["output_dir"]) / f"{name}.answers.jsonl", answers)
        print(f"{name}: {len(answers)} answers", flush=True)  # noqa: T201 (the log file)


def _engine(folder: str, adapter: str | None, options: dict[str, Any]) -> Any:
    import torch

    common = {
        "model_type": options["model_type"],
        "template_type": options["template"],
        # Read for a model on a hub, not for a folder.
        "revision": options["revision"],
        "torch_dtype": getattr(torch, options["torch_dtype"]),
    }
    if options["backend"] == "vllm":
        from swift.infer_engine import VllmEngine

        return VllmEngine(folder, **common, **options["vllm"])
    from swift.infer_engine import TransformersEngine

    return TransformersEngine(
        folder,
        max_batch_size=options["batch_size"],
        attn_impl="sdpa",
        adapters=[adapter] if adapter else [],
        device_map=options["device_map"],
        **common,
    )


def _ask(
    engine: Any, prompts: list[Prompt], max_new_tokens: int, *, logprobs: bool = False
) -> list[Any]:
    from swift.infer_engine import InferRequest, RequestConfig

    requests = [InferRequest(messages=prompt["messages"]) for prompt in prompts]
    config = RequestConfig(max_tokens=max_new_tokens, temperature=0.0, logprobs=logprobs)
    # Asked for all at once, swift writes into the log how many are answered.
    return list(engine.infer(requests, config))


def _answer_all(
    folder: str, adapter: str | None, prompts: list[Prompt], options: dict[str, Any]
) -> list[Answer]:
    engine = _engine(folder, adapter, options)
    max_new_tokens = options["max_new_tokens"]
    # A model that is only compared with its merged form is never served.
    timed_count = options["latency_queries"] if adapter is None else 0
    # Timed first, as vLLM keeps what it has read of a prompt.
    latencies_ms = _measure_latencies(engine, prompts, timed_count, max_new_tokens)
    start = time.perf_counter()
    responses = _ask(engine, prompts, max_new_tokens)
    answers = _answers_of(prompts, responses, time.perf_counter() - start)
    for answer, latency_ms in zip(answers, latencies_ms, strict=False):
        answer["latency_ms"] = latency_ms
    _add_log_probs(engine, answers, prompts[: options["parity_prompts"]], max_new_tokens)
    return answers


def _measure_latencies(
    engine: Any, prompts: list[Prompt], count: int, max_new_tokens: int
) -> list[float]:
    """Milliseconds that each of the first prompts takes by itself, after a warm-up."""
    if not count:
        return []
    for prompt in prompts[-_WARM_UP:]:
        _ask(engine, [prompt], max_new_tokens)
    latencies_ms = []
    for number, prompt in enumerate(prompts[:count], 1):
        start = time.perf_counter()
        _ask(engine, [prompt], max_new_tokens)
        latencies_ms.append(1000 * (time.perf_counter() - start))
        print(f"timed {number} of {count}", flush=True)  # noqa: T201 (the log file, which shows that it goes on)
    return latencies_ms


def _answers_of(prompts: list[Prompt], responses: list[Any], took_s: float) -> list[Answer]:
    """Lines of the answers' file, of responses that together took `took_s` seconds."""
    token_counts = [
        response.usage.prompt_tokens + response.usage.completion_tokens for response in responses
    ]
    all_tokens = max(1, sum(token_counts))
    answers = []
    for prompt, response, tokens in zip(prompts, responses, token_counts, strict=True):
        answer = {
            "id": prompt["id"],
            "text": response.choices[0].message.content,
            "prompt_tokens": response.usage.prompt_tokens,
            "completion_tokens": response.usage.completion_tokens,
            "share_s": took_s * tokens / all_tokens,
        }
        answers.append(answer)
    return answers


def _add_log_probs(
    engine: Any, answers: list[Answer], prompts: list[Prompt], max_new_tokens: int
) -> None:
    """Ask the first prompts again, and add the first tokens' text and log-probabilities to their
    answers."""
    if not prompts:
        return
    responses = _ask(engine, prompts, min(_PARITY_TOKENS, max_new_tokens), logprobs=True)
    for answer, response in zip(answers, responses, strict=False):
        choice = response.choices[0]
        # An answer without any token has no log-probabilities at all.
        tokens = (choice.logprobs or {}).get("content", ())
        answer["start"] = choice.message.content
        answer["logprobs"] = [token["logprob"] for token in tokens]


if __name__ == "__main__":
    main()
