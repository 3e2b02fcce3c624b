"""Hugging Face models through the registered implementation, the kernels stood in for by the reference."""

import pytest
import torch

from hopper_attention import choice, production
from hopper_attention.integrations import huggingface

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_ops import on_cpu  # noqa: E402, F401

SMALL = {"num_hidden_layers": 2, "vocab_size": 99}
CONFIGS = {
    "Llama": transformers.LlamaConfig(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, **SMALL
    ),
    "GPT-2": transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=99, n_positions=64),
    "BERT": transformers.BertConfig(hidden_size=256, intermediate_size=256, num_attention_heads=4, **SMALL),
}


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that the kernels took."""
    found: list[str] = []
    attention = huggingface.attention
    monkeypatch.setattr(huggingface, "attention", lambda *x, **y: found.append("k6") or attention(*x, **y))
    monkeypatch.setattr(production, "check_device", lambda stage_id, q: None)
    monkeypatch.setattr(production, "_reasons", {})
    monkeypatch.setattr(huggingface, "slower", lambda problem: None)
    huggingface.register()
    return found


def model_of(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    kind = transformers.AutoModel if name == "BERT" else transformers.AutoModelForCausalLM
    return kind.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()


def outputs(model: torch.nn.Module, implementation: str, **inputs: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs)[0].float()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_as_sdpa(name: str, padded: bool, taken: list[str]) -> None:
    model = model_of(name)
    tokens = torch.randint(99, (2, 33), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :5] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    plain = outputs(model, "sdpa", **inputs)
    found = outputs(model, "hopper_attention", **inputs)
    seen = mask.bool()
    assert torch.allclose(found[seen], plain[seen], atol=2**-5 * plain.abs().max().item())
    assert taken == ([] if padded else ["k6"] * 2)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_generation(name: str, taken: list[str]) -> None:
    model = model_of(name)
    tokens = torch.randint(1, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("hopper_attention")
    text = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 17)
    assert len(taken) == 2 * 8  # layers, and steps: the prompt, then token by token


def test_what_would_be_slower_is_left_to_sdpa(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of generation the steps after the prompt; nothing of training, however few key heads."""
    monkeypatch.setattr(huggingface, "slower", choice.slower)
    model = model_of("Llama")
    tokens = torch.randint(1, 99, (2, 9), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("hopper_attention")
    model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert len(taken) == 2
    model.train()(input_ids=tokens, labels=tokens).loss.backward()
    assert len(taken) == 4


def test_gradients(taken: list[str]) -> None:
    model = model_of("Llama").train()
    tokens = torch.randint(99, (2, 33), generator=torch.Generator().manual_seed(1))
    grads = {}
    for implementation in ("sdpa", "hopper_attention"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        grads[implementation] = model.model.layers[0].self_attn.q_proj.weight.grad.float()
    plain = grads["sdpa"]
    assert torch.allclose(grads["hopper_attention"], plain, atol=0.1 * plain.abs().max().item())
    assert len(taken) == 2


def test_what_neither_has_is_refused_by_name() -> None:
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="does not take softcap"):
        huggingface.hopper_attention_forward(torch.nn.Identity(), q, q, q, None, softcap=50.0)
