"""Pretrain the tiny base model from scratch on the CPU: ``python -m qinglan.embedded.pretrain``.

Runs in the trainer's environment. A fixed number of steps, so the same machine gives the same model; if they would
take longer than ``--seconds-max``, it gives up early. The loss counts passages and the assistant's turns only.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from qinglan.embedded import corpus, tokenizer

HIDDEN_SIZE = 128
LAYERS = 4
HEAD_SIZE = 32
TOKENS_PER_STEP = 3072
DOCUMENTS = 40_000
MUON_LR = 0.02
ADAM_LR = 4e-3
WARMUP_STEPS = 20
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Token ids and labels, (documents, length); padding and prompts are `IGNORED` in the labels."""

    ids: torch.Tensor
    labels: torch.Tensor


def build_model(vocabulary: int, end_of_turn: int, padding: int) -> Any:
    """A Qwen3 with 4 layers of 128, about a million parameters."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HIDDEN_SIZE // HEAD_SIZE,
        num_key_value_heads=HIDDEN_SIZE // HEAD_SIZE // 2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=end_of_turn,
        pad_token_id=padding,
    )
    return Qwen3ForCausalLM(config).float()


def labels_of(ids: list[int], start: int, assistant: int, end: int) -> list[int]:
    """The ids that are to be predicted: all of a passage, but only the assistant's turns of a dialogue."""
    if ids[0] != start:
        return ids
    labels, speaking = [], False
    for place, token in enumerate(ids):
        labels.append(token if speaking else IGNORED)
        if token == end:
            speaking = False
        elif place >= 2 and ids[place - 2] == start and ids[place - 1] == assistant:
            speaking = True
    return labels


def batches(encoded: list[tuple[list[int], list[int]]], padding: int, seed: int) -> Iterator[Batch]:
    """Endless batches of about `TOKENS_PER_STEP`, of documents of like length, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    encoded = sorted(encoded, key=lambda pair: len(pair[0]))
    groups, group, width = [], [], 0
    for pair in encoded:
        width = len(pair[0])
        if (len(group) + 1) * width > TOKENS_PER_STEP:
            groups.append(group)
            group = []
        group.append(pair)
    while True:
        for number in torch.randperm(len(groups), generator=generator).tolist():
            yield _pad(groups[number], padding)


def _pad(group: list[tuple[list[int], list[int]]], padding: int) -> Batch:
    width = max(len(ids) for ids, _ in group)
    ids = torch.full((len(group), width), padding)
    labels = torch.full((len(group), width), IGNORED)
    for row, (tokens, targets) in enumerate(group):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(targets)] = torch.tensor(targets)
    return Batch(ids, labels)


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """Mean cross entropy; the vocabulary's logits are computed only where something is to be predicted."""
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    targets = batch.labels[:, 1:]
    wanted = targets != IGNORED
    return cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


def optimisers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=MUON_LR, weight_decay=0.0),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: a short warm-up, then a cosine to 2%."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: Any, feed: Iterator[Batch], steps: int, seconds_max: float, metrics: TextIO) -> None:
    """Run all steps, a line of progress at least every 5 s."""
    torch.manual_seed(0)
    used = optimisers(model)
    model.train()
    began = reported = time.monotonic()
    losses = []
    for step in range(steps):
        for optimiser in used:
            for group in optimiser.param_groups:
                group["lr"] = group.setdefault("full_lr", group["lr"]) * schedule(step, steps)
        loss = loss_of(model, next(feed))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in used:
            optimiser.step()
            optimiser.zero_grad()
        losses.append(loss.item())
        now = time.monotonic()
        if now - reported > 3 or step + 1 == steps:
            reported = now
            mean = sum(losses) / len(losses)
            losses = []
            seconds = now - began
            eta = seconds / (step + 1) * (steps - step - 1)
            print(f"step {step + 1}/{steps} loss {mean:.3f} eta {eta:.0f} s", flush=True)
            metrics.write(json.dumps({"step": step + 1, "max_steps": steps, "loss": mean, "seconds": seconds}) + "\n")
            metrics.flush()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds-max", type=float, default=240)
    args = parser.parse_args(argv)
    t0 = time.monotonic()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tok = tokenizer.build()
    t1 = time.monotonic()
    texts = list(corpus.documents(1, DOCUMENTS))
    t2 = time.monotonic()
    ids = tok(texts, add_special_tokens=False)["input_ids"]
    t3 = time.monotonic()
    start, end, assistant = (tok.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>", "assistant"))
    enc = [(x, labels_of(x, start, assistant, end)) for x in ids]
    print(
        "tok",
        t1 - t0,
        "docs",
        t2 - t1,
        "enc",
        t3 - t2,
        "labels",
        time.monotonic() - t3,
        "vocab",
        len(tok),
        "mean len",
        sum(map(len, ids)) / len(ids),
        "labels/doc",
        sum(sum(t >= 0 for t in l) for _, l in enc) / len(enc),
    )
    model = build_model(len(tok), end, tok.pad_token_id)
    print("params", model.num_parameters())
    with args.metrics.open("w") as metrics:
        train(model, batches(enc, tok.pad_token_id, 0), args.steps, args.seconds_max, metrics)
    model.eval()
    model.generation_config.update(eos_token_id=[end, tok.pad_token_id], pad_token_id=tok.pad_token_id, do_sample=False)
    model.save_pretrained(args.output)
    tok.save_pretrained(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
