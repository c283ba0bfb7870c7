"""The tiny base model's tokenizer: byte-level BPE with Qwen's special tokens and Qwen3's chat template.

A small vocabulary keeps the softmax cheap, whole words keep answers short; anything else falls back to bytes.
"""

import json
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from qinglan.simulators.domains import Domain

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = (PADDING, "<|im_start|>", END_OF_TURN, "<|object_ref_start|>", "<|object_ref_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One token each, but, as in Qwen3, text: decoding keeps them where it leaves out special tokens."""
MAX_VOCABULARY = 4096
MAX_TOKEN_BYTES = 18
"""Six Chinese characters."""
WORD_WEIGHT = 20
CHARACTER_WEIGHT = 400
"""Characters outweigh words, so that no merge crosses from one into a part of the next."""

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Qwen3's, for plain text messages."""


def build(domain: Domain) -> Any:
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
    bpe.train_from_iterator(domain.characters() * CHARACTER_WEIGHT + domain.words() * WORD_WEIGHT, trainer)
    as_json = json.loads(bpe.to_str())
    for token in as_json["added_tokens"]:  # the trainer makes every token of its list special; tags must stay text
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
