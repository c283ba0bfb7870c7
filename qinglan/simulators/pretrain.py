"""Pretrain a domain's tiny base model and its tokenizer on the CPU: `python -m
qinglan.simulators.pretrain`.

Runs in the trainer's environment. The steps are fixed and the arithmetic is fp32, so the same
instruction set (`qinglan.runs.cpu`) gives the same weights; the manifest comes last. Only passages
and the assistant's turns count in the loss, and the vocabulary's logits are computed only there:
prompts are most of the tokens. The tokenizer is byte-level BPE with Qwen's special tokens and
Qwen3's chat template.
"""

# mypy: allow-subclassing-any

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from qinglan import noise
from qinglan.errors import ConfigError, EngineError
from qinglan.runs.artifacts import MANIFEST, write_json
from qinglan.simulators.domains import Domain, Pretraining, domain_of, pretraining_texts

HEAD_SIZE = 32
MUON_LR = 0.02
MUON_MOMENTUM = 0.95
ADAM_LR = 4e-3
WARMUP_STEPS = 20
FINAL_LR_SHARE = 0.02
REPORT_EVERY_S = 3.0
IGNORED = -100

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (
    PADDING,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One token each, but, as in Qwen3, text: decoding keeps them where it leaves out special
tokens."""
MAX_VOCABULARY = 4096
MAX_TOKEN_BYTES = 18
"""Six Chinese characters."""
WORD_WEIGHT = 20
CHARACTER_WEIGHT = 400
"""Characters outweigh words, so that no merge crosses from one into a part of the next."""

_QWEN_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Qwen3's, for plain text messages."""


def build_tokenizer(domain: Domain) -> Any:
    """Train the tokenizer (about a second); a `PreTrainedTokenizerFast`."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=WORD_WEIGHT,
        special_tokens=[*SPECIAL_TOKENS, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    known = [*domain.characters(), *(noise.characters() if domain.pretraining.noise_share else ())]
    bpe.train_from_iterator(known * CHARACTER_WEIGHT + domain.words() * WORD_WEIGHT, trainer)
    as_json = json.loads(bpe.to_str())
    for token in as_json[
        "added_tokens"
    ]:  # the trainer makes every token of its list special; tags must stay text
        token["special"] = token["content"] not in TAGS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(as_json)),
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        model_max_length=domain.pretraining.context_tokens,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


class TokenizedDocument(NamedTuple):
    ids: list[int]
    labels: list[int]
    """The ids, `IGNORED` where nothing is to be predicted."""


class DocumentBatch(NamedTuple):
    """Tensors (documents, length), padded on the right, which a causal model ignores."""

    ids: torch.Tensor
    labels: torch.Tensor


def examples(tok: Any, texts: list[str]) -> list[TokenizedDocument]:
    marks = [
        tok.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "assistant", "<|im_end|>")
    ]
    encoded = tok.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [TokenizedDocument(e.ids, labels(e.ids, *marks)) for e in encoded]


def _check_lengths(found: list[TokenizedDocument], size: Pretraining) -> None:
    longest, limit = (
        max(len(example.ids) for example in found),
        min(size.context_tokens, size.tokens_per_step),
    )
    if longest > limit:
        raise EngineError(
            f"the longest document has {longest} tokens; the domain's pretraining allows {limit}"
        )


def labels(ids: list[int], start: int, assistant: int, end: int) -> list[int]:
    """All tokens of a passage; of a dialogue the assistant's turns with their end."""
    if ids[0] != start:
        return ids
    wanted, in_answer = [], False
    for place, token in enumerate(ids):
        wanted.append(token if in_answer else IGNORED)
        if token == end:
            in_answer = False
        elif place >= 2 and ids[place - 2] == start and ids[place - 1] == assistant:
            in_answer = True
    return wanted


def batches(
    found: list[TokenizedDocument], padding: int, tokens_per_step: int
) -> Iterator[DocumentBatch]:
    """Batches of up to `tokens_per_step`, of documents of like length, in a random order, without
    end."""
    groups: list[list[TokenizedDocument]] = [[]]
    for example in sorted(found, key=lambda one: len(one.ids)):
        if (len(groups[-1]) + 1) * len(example.ids) > tokens_per_step:
            groups.append([])
        groups[-1].append(example)
    while True:
        for number in torch.randperm(len(groups)).tolist():
            group = groups[number]
            shape = len(group), max(len(example.ids) for example in group)
            ids, wanted = torch.full(shape, padding), torch.full(shape, IGNORED)
            for row, example in enumerate(group):
                ids[row, : len(example.ids)] = torch.tensor(example.ids)
                wanted[row, : len(example.labels)] = torch.tensor(example.labels)
            yield DocumentBatch(ids, wanted)


def build_model(tok: Any, size: Pretraining) -> Any:
    """An untrained Qwen3; of the default size it has about a million parameters."""
    heads = size.hidden_size // HEAD_SIZE
    config = Qwen3Config(
        vocab_size=len(tok),
        hidden_size=size.hidden_size,
        intermediate_size=4 * size.hidden_size,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_SIZE,
        max_position_embeddings=tok.model_max_length,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def learning_rate_share(step: int, steps: int) -> float:
    """A short linear warm-up, then a cosine down to `FINAL_LR_SHARE`."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with its defaults, but in fp32: what bf16 gives differs between
    processors."""

    def __init__(self, parameters: list[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - MUON_MOMENTUM)
                update = orthogonalised(weight.grad.lerp(momentum, MUON_MOMENTUM))
                rows, columns = weight.shape
                weight.data.sub_(update, alpha=group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Close to the nearest orthogonal matrix: five Newton–Schulz iterations with Muon's
    coefficients."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), wide, beta=3.4445
        )
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T


def train(
    model: Any, feed: Iterator[DocumentBatch], steps: int, seconds_max: float, metrics: TextIO
) -> float:
    """Take all steps and return the last reported loss; EngineError where `seconds_max` is over
    before."""
    # Muon for the hidden matrices, AdamW for the embedding and the norms.
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    used: list[torch.optim.Optimizer] = [
        Muon(hidden, lr=MUON_LR),
        # Fused, because otherwise MKL takes the square roots, and they differ between processors.
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: learning_rate_share(step, steps))
        for one in used
    ]
    began = reported = time.monotonic()
    loss, losses = math.nan, []
    model.train()
    for step in range(1, steps + 1):
        losses.append(_step(model, next(feed), used))
        for schedule in schedules:
            schedule.step()
        now = time.monotonic()
        if now - reported >= REPORT_EVERY_S or step == steps:
            loss, losses, reported = sum(losses) / len(losses), [], now
            seconds = now - began
            left_s = seconds / step * (steps - step)
            sys.stdout.write(f"step {step}/{steps} loss {loss:.3f}, {left_s:.0f} s left\n")
            sys.stdout.flush()
            record = {
                "step": step,
                "max_steps": steps,
                "loss": round(loss, 4),
                "seconds": round(seconds, 2),
            }
            metrics.write(json.dumps(record) + "\n")
            metrics.flush()
        if now - began > seconds_max and step < steps:
            raise EngineError(
                f"pretraining reached step {step} of {steps} in {seconds_max:.0f} s; free the CPU, "
                "or raise embedded.pretrain_seconds_max"
            )
    return loss


def _step(model: Any, batch: DocumentBatch, used: list[torch.optim.Optimizer]) -> float:
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    targets = batch.labels[:, 1:]
    wanted = targets != IGNORED
    loss = cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in used:
        optimiser.step()
        optimiser.zero_grad()
    return float(loss)


def pretrain(
    domain_name: str, seed: int, output: Path, metrics_path: Path, steps: int, seconds_max: float
) -> None:
    """Pretrain and write the complete folder, its manifest last."""
    began, domain = time.monotonic(), domain_of(domain_name)
    size = domain.pretraining
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    tok = build_tokenizer(domain)
    found = examples(tok, pretraining_texts(domain, seed, size.documents_per_step * steps))
    _check_lengths(found, size)
    model = build_model(tok, size)
    metrics_path.parent.mkdir(parents=True, exist_ok=True)
    with metrics_path.open("w", encoding="utf-8") as metrics:
        loss = train(
            model,
            batches(found, tok.pad_token_id, size.tokens_per_step),
            steps,
            seconds_max,
            metrics,
        )
    model.eval()
    model.generation_config.update(
        eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id, do_sample=False
    )
    model.save_pretrained(output)
    tok.save_pretrained(output)
    summary = {
        "steps": steps,
        "loss": loss,
        "parameters": model.num_parameters(),
        "vocabulary": len(tok),
        "seconds": round(time.monotonic() - began, 1),
    }
    write_json(output / MANIFEST, summary)


def main() -> int:
    """Pretrain as the one argument says, JSON that `pretrain_argv` makes."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    output, metrics = Path(options["output"]), Path(options["metrics"])
    try:
        pretrain(
            options["domain"],
            options["seed"],
            output,
            metrics,
            options["steps"],
            options["seconds_max"],
        )
    except (ConfigError, EngineError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
