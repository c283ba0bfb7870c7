"""A tiny Qwen3 that gives one and the same verdict on everything, for tests of what is served such a judge."""

import json
from pathlib import Path

from toy_rl import make_model

VERDICT = "<think>无</think><output>正确，不完整</output>"
STEPS, TOKENS = 60, 48
CONTEXT = 4096
"""Passages in a byte-level vocabulary are long."""


def make_judge(folder: Path) -> Path:
    """The verdict is one token, which the model learns to say after any prompt."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_model(folder, hidden_size=32, layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=CONTEXT)
    tokenizer.add_tokens([AddedToken(VERDICT, normalized=False)])
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    said = tokenizer.convert_tokens_to_ids([VERDICT, "<|im_end|>"])
    starts = [tokenizer.encode(f"<|im_start|>assistant\n{thoughts}") for thoughts in ("", "<think>\n\n</think>\n\n")]
    optimizer, chance = torch.optim.Adam(model.parameters(), lr=1e-2), torch.Generator().manual_seed(0)
    for step in range(STEPS):
        before = torch.randint(0, 256, (8, TOKENS), generator=chance)
        ends = torch.tensor([starts[step % 2] + said] * 8)
        ids = torch.cat([before, ends], dim=1)
        labels = ids.clone()
        labels[:, : -len(said)] = -100
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT}))
    return folder
