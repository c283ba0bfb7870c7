"""Pretrain a domain's tiny base model and its tokenizer on the CPU.

Start it with `python -m qinglan.simulators.pretrain`, in the trainer's environment. The steps are
fixed and the arithmetic is fp32, so the same instruction set (`qinglan.cpu`) gives the same
weights; the manifest comes last. Only passages and the assistant's turns count in the loss, and the
vocabulary's logits are computed only there: prompts are most of the tokens. The tokenizer is
byte-level BPE with Qwen's special tokens and Qwen3's chat template.
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

START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (
    PADDING,
    START_OF_TURN,
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Tags are one token each but, as in Qwen3, text: decoding keeps them, and leaves out special
tokens."""
MAX_VOCABULARY = 4096
MAX_TOKEN_BYTES = 18
"""Six Chinese characters."""
WORD_WEIGHT = 20
CHARACTER_WEIGHT = 400
"""Characters outweigh words, so that no merge crosses from one into a part of the next."""

# Qwen's pattern: English contractions, words, single digits, signs, ends of lines, white space.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)
"""Qwen3's, for plain text messages."""


def build_tokenizer(domain: Domain) -> Any:
    """Train the tokenizer (about a second); a `PreTrainedTokenizerFast`."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_with_tags_as_text(_train_bpe(domain)),
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        model_max_length=domain.pretraining.context_tokens,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _train_bpe(domain: Domain) -> Tokenizer:
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
        # Even a pair of a single word comes so often, so that every word can become one token.
        min_frequency=WORD_WEIGHT,
        special_tokens=[*SPECIAL_TOKENS, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_BYTES,
        show_progress=False,
    )
    characters = domain.characters()
    if domain.pretraining.noise_share:
        characters = [*characters, *noise.characters()]
    weighted_texts = characters * CHARACTER_WEIGHT + domain.words() * WORD_WEIGHT
    bpe.train_from_iterator(weighted_texts, trainer)
    return bpe


def _with_tags_as_text(bpe: Tokenizer) -> Tokenizer:
    """The tokenizer in which `TAGS` are no special tokens.

    The trainer makes every token of its list special.
    """
    as_json = json.loads(bpe.to_str())
    for token in as_json["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    return Tokenizer.from_str(json.dumps(as_json))


class TokenizedDocument(NamedTuple):
    ids: list[int]
    labels: list[int]
    """The ids, `IGNORED` where nothing is to be predicted."""


class DocumentBatch(NamedTuple):
    """Tensors (documents, length), padded on the right, which a causal model ignores."""

    ids: torch.Tensor
    labels: torch.Tensor


def examples(tok: Any, texts: list[str]) -> list[TokenizedDocument]:
    """Tokenize documents, and decide what of each is to be predicted."""
    start = tok.convert_tokens_to_ids(START_OF_TURN)
    assistant = tok.convert_tokens_to_ids("assistant")
    end = tok.convert_tokens_to_ids(END_OF_TURN)
    encodings = tok.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [
        TokenizedDocument(encoding.ids, labels(encoding.ids, start, assistant, end))
        for encoding in encodings
    ]


def _check_lengths(documents: list[TokenizedDocument], size: Pretraining) -> None:
    """Raise EngineError where a document fits into no batch or context."""
    longest = _longest(documents)
    limit = min(size.context_tokens, size.tokens_per_step)
    if longest > limit:
        raise EngineError(
            f"the longest document has {longest} tokens; the domain's pretraining allows {limit}"
        )


def _longest(documents: list[TokenizedDocument]) -> int:
    return max(len(document.ids) for document in documents)


def labels(ids: list[int], start: int, assistant: int, end: int) -> list[int]:
    """All tokens of a passage; of a dialogue the assistant's turns with their end.

    Args:
        ids: the tokens of one document.
        start: the token that begins a turn, and with it a dialogue.
        assistant: the role's token, which comes second in the assistant's turns.
        end: the token that ends a turn.
    """
    if ids[0] != start:
        return ids
    predicted = []
    is_answer = False
    for place, token in enumerate(ids):
        predicted.append(token if is_answer else IGNORED)
        if token == end:
            is_answer = False
        # The answer begins after three tokens: start, role, and the end of the line.
        elif place >= 2 and ids[place - 2] == start and ids[place - 1] == assistant:
            is_answer = True
    return predicted


def batches(
    documents: list[TokenizedDocument], padding: int, tokens_per_step: int
) -> Iterator[DocumentBatch]:
    """Batches of documents of like length, in a random order, without end.

    A batch has up to `tokens_per_step` tokens with its padding.
    """
    groups: list[list[TokenizedDocument]] = [[]]
    for document in sorted(documents, key=lambda document: len(document.ids)):
        # The documents are sorted, so this one is the longest of its group.
        if (len(groups[-1]) + 1) * len(document.ids) > tokens_per_step:
            groups.append([])
        groups[-1].append(document)
    while True:
        for number in torch.randperm(len(groups)).tolist():
            yield _batch(groups[number], padding)


def _batch(documents: list[TokenizedDocument], padding: int) -> DocumentBatch:
    shape = len(documents), _longest(documents)
    batch = DocumentBatch(torch.full(shape, padding), torch.full(shape, IGNORED))
    for row, document in enumerate(documents):
        batch.ids[row, : len(document.ids)] = torch.tensor(document.ids)
        batch.labels[row, : len(document.labels)] = torch.tensor(document.labels)
    return batch


def build_model(tok: Any, size: Pretraining) -> Any:
    """An untrained Qwen3; of the default size it has about a million parameters."""
    heads = size.hidden_size // HEAD_SIZE
    config = Qwen3Config(
        vocab_size=len(tok),
        hidden_size=size.hidden_size,
        intermediate_size=4 * size.hidden_size,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        # Grouped-query attention, as in all models of Qwen3.
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
    warm_up = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return warm_up * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` with its defaults, but in fp32.

    What bf16 gives differs between processors.
    """

    def __init__(self, parameters: list[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - MUON_MOMENTUM)
                # Nesterov's momentum: the gradient is moved towards its own new average.
                update = orthogonalised(weight.grad.lerp(momentum, MUON_MOMENTUM))
                rows, columns = weight.shape
                weight.data.sub_(update, alpha=group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Close to the nearest orthogonal matrix.

    Takes five Newton–Schulz iterations with Muon's coefficients.
    """
    is_wide = matrix.shape[0] <= matrix.shape[1]
    # The Gram matrix of the wide form is the smaller one.
    wide = matrix if is_wide else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        wide = torch.addmm(wide, polynomial, wide, beta=3.4445)
    return wide if is_wide else wide.T


def train(
    model: Any, feed: Iterator[DocumentBatch], steps: int, seconds_max: float, metrics: TextIO
) -> float:
    """Take all steps and return the last reported loss.

    Raises EngineError where `seconds_max` is over before the last step.
    """
    optimizers = _optimizers(model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_share(step, steps))
        for optimizer in optimizers
    ]
    start_s = time.monotonic()
    reported_s = start_s
    reported_loss = math.nan
    losses = []
    model.train()
    for step in range(1, steps + 1):
        losses.append(_step(model, next(feed), optimizers))
        for schedule in schedules:
            schedule.step()
        now_s = time.monotonic()
        if now_s - reported_s >= REPORT_EVERY_S or step == steps:
            reported_loss = sum(losses) / len(losses)
            reported_s = now_s
            losses = []
            _report(step, steps, reported_loss, now_s - start_s, metrics)
        # After the last step the model is complete, however long it took.
        if now_s - start_s > seconds_max and step < steps:
            raise EngineError(
                f"pretraining reached step {step} of {steps} in {seconds_max:.0f} s; free the CPU, "
                "or raise embedded.pretrain_seconds_max"
            )
    return reported_loss


def _optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms."""
    hidden_matrices = []
    other_parameters = []
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            hidden_matrices.append(parameter)
        else:
            other_parameters.append(parameter)
    # Fused, because otherwise MKL takes the square roots, and they differ between processors.
    adam = torch.optim.AdamW(
        other_parameters, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    return [Muon(hidden_matrices, lr=MUON_LR), adam]


def _step(model: Any, batch: DocumentBatch, optimizers: list[torch.optim.Optimizer]) -> float:
    """Take one step with each optimizer, and return the batch's loss."""
    # The last place predicts nothing, and the first token is predicted by none.
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
    targets = batch.labels[:, 1:]
    is_predicted = targets != IGNORED
    loss = cross_entropy(model.lm_head(hidden[is_predicted]), targets[is_predicted])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _report(step: int, steps: int, loss: float, seconds: float, metrics: TextIO) -> None:
    """Write progress to standard output for people, and to `metrics` for the launcher."""
    remaining_s = seconds / step * (steps - step)
    sys.stdout.write(f"step {step}/{steps} loss {loss:.3f}, {remaining_s:.0f} s left\n")
    sys.stdout.flush()
    record = {
        "step": step,
        "max_steps": steps,
        "loss": round(loss, 4),
        "seconds": round(seconds, 2),
    }
    metrics.write(json.dumps(record) + "\n")
    metrics.flush()


def pretrain(
    domain_name: str, seed: int, output: Path, metrics_path: Path, steps: int, seconds_max: float
) -> None:
    """Pretrain and write the complete folder, its manifest last."""
    start_s = time.monotonic()
    domain = domain_of(domain_name)
    size = domain.pretraining
    torch.manual_seed(seed)
    # An operation whose result may vary raises an error.
    torch.use_deterministic_algorithms(True)
    tok = build_tokenizer(domain)
    documents = examples(tok, pretraining_texts(domain, seed, size.documents_per_step * steps))
    _check_lengths(documents, size)
    model = build_model(tok, size)
    feed = batches(documents, tok.pad_token_id, size.tokens_per_step)
    metrics_path.parent.mkdir(parents=True, exist_ok=True)
    with metrics_path.open("w", encoding="utf-8") as metrics:
        loss = train(model, feed, steps, seconds_max, metrics)
    model.eval()
    # Who loads the folder generates greedily, up to the end of the turn.
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
        "seconds": round(time.monotonic() - start_s, 1),
    }
    write_json(output / MANIFEST, summary)


def main() -> int:
    """Pretrain as the one argument says, JSON that `pretrain_argv` makes."""
    options = json.loads(sys.argv[1])
    torch.set_num_threads(options["threads"])
    try:
        pretrain(
            options["domain"],
            options["seed"],
            Path(options["output"]),
            Path(options["metrics"]),
            options["steps"],
            options["seconds_max"],
        )
    except (ConfigError, EngineError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
