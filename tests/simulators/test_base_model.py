"""The tiny base model: pretrained for a few steps, in its own process as the launcher does."""

import json
import os
import subprocess
import sys

import pytest

from qinglan.config import Embedded, Paths
from qinglan.cpu import cpu_env
from qinglan.errors import EngineError
from qinglan.runs.artifacts import sha256_of
from qinglan.simulators import base_model, domains
from qinglan.simulators.domains import Pretraining, domain_of

FEW = Embedded(pretrain_steps=3)
DOMAIN = domain_of("query_rewrite")


def pretrain(folder, embedded=FEW, threads=1):
    argv = base_model.pretrain_argv(
        sys.executable, embedded, DOMAIN, folder / "model", folder / "metrics.jsonl", threads
    )
    env = {**os.environ, **cpu_env(threads, "float32")}
    return subprocess.run(argv, capture_output=True, text=True, timeout=900, env=env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    process = pretrain(folder)
    assert process.returncode == 0, process.stderr
    assert "step 3/3 loss " in process.stdout
    return folder


def test_key_follows_what_the_weights_depend_on(monkeypatch: pytest.MonkeyPatch):
    key = base_model.cache_key(FEW, DOMAIN)
    assert base_model.cache_key(FEW, domain_of("medical")) != key
    monkeypatch.setattr(domains, "_names", lambda: ("another", "query_rewrite"))
    assert base_model.cache_key(FEW.model_copy(update={"rag_latency_ms": 5.0}), DOMAIN) == key
    assert base_model.cache_key(Embedded(pretrain_steps=4), DOMAIN) != key
    assert base_model.cache_key(FEW.model_copy(update={"pretrain_seed": 2}), DOMAIN) != key


def test_incomplete_without_manifest(tmp_path):
    path = base_model.cached_path(Paths(state=tmp_path), FEW, DOMAIN)
    path.mkdir(parents=True)
    (path / "model.safetensors").touch()
    assert not base_model.is_complete(path)


@pytest.mark.slow
def test_the_weights_do_not_depend_on_the_number_of_threads(folder, tmp_path):
    assert base_model.is_complete(folder / "model")
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3
    pretrain(tmp_path, threads=2)
    names = ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        assert sha256_of(folder / "model" / name) == sha256_of(tmp_path / "model" / name), name


@pytest.mark.slow
def test_transformers_loads_it_and_prompts_are_qwens(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.model_type == "qwen3"
    assert tokenizer.decode(model.generation_config.eos_token_id) == "<|im_end|>"
    messages = [
        {"role": "system", "content": "你好"},
        {"role": "user", "content": "磷虾油😀怎么吃"},
    ]
    prompt = (
        "<|im_start|>system\n你好<|im_end|>\n"
        "<|im_start|>user\n磷虾油😀怎么吃<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    options = {"tokenize": False, "add_generation_prompt": True}
    assert tokenizer.apply_chat_template(messages, **options) == prompt
    assert tokenizer.decode(tokenizer(prompt)["input_ids"]) == prompt


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 32), (32, 8)])
def test_muon_is_torchs_but_for_the_precision(shape):
    import torch

    from qinglan.simulators.pretrain import Muon

    start = torch.randn(shape)
    gradients = torch.randn(3, *shape)
    our_weight = torch.nn.Parameter(start.clone())
    torch_weight = torch.nn.Parameter(start.clone())
    our_optimizer = Muon([our_weight], 0.02)
    torch_optimizer = torch.optim.Muon([torch_weight], 0.02, weight_decay=0.0)
    for gradient in gradients:
        our_weight.grad = gradient.clone()
        our_optimizer.step()
        torch_weight.grad = gradient.clone()
        torch_optimizer.step()
    assert (our_weight - torch_weight).norm() < 0.02 * (our_weight - start).norm()


@pytest.mark.slow
def test_a_document_that_fits_no_batch_is_an_error():
    from qinglan.simulators import pretrain

    document = pretrain.TokenizedDocument([1] * 9, [1] * 9)
    problem = r"the longest document has 9 tokens; .* pretraining allows 8"
    with pytest.raises(EngineError, match=problem):
        pretrain._check_lengths([document], Pretraining(tokens_per_step=8))


@pytest.mark.slow
def test_too_slow_a_machine_is_an_error(tmp_path):
    process = pretrain(tmp_path, Embedded(pretrain_steps=3, pretrain_seconds_max=0.001))
    assert process.returncode == 2
    assert "pretrain_seconds_max" in process.stderr
    assert not base_model.is_complete(tmp_path / "model")
