"""Hugging Face models through the registered implementation, the kernels stood in for by the reference."""

import pytest
import torch

from hopper_attention import choice, production
from hopper_attention.integrations import huggingface

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_ops import on_cpu  # noqa: E402, F401

from hopper_attention.integrations import huggingface_cache  # noqa: E402
from hopper_attention.integrations.huggingface_cache import KeyValueCache  # noqa: E402

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


# ---- generation with a cache of the library's --------------------------------------------------------------


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths with which the kernel was called; it is stood in for by its definition."""
    found: list[int] = []

    def stand_in(q, k_cache, v_cache, k, v, *, cache_seqlens, softmax_scale):
        o = torch.empty_like(q)
        for b, before in enumerate(cache_seqlens.tolist()):
            k_cache[b, before : before + k.shape[1]], v_cache[b, before : before + k.shape[1]] = k[b], v[b]
            keys, values = (x[b : b + 1, : before + k.shape[1]].transpose(1, 2) for x in (k_cache, v_cache))
            one = q[b : b + 1].transpose(1, 2)
            o[b] = torch.nn.functional.scaled_dot_product_attention(
                one, keys, values, scale=softmax_scale, enable_gqa=True
            ).transpose(1, 2)
        found.append(int(cache_seqlens[0]))
        return o

    monkeypatch.setattr(huggingface_cache, "flash_attn_with_kvcache", stand_in)
    return found


def prompt(length: int = 9) -> torch.Tensor:
    return torch.randint(1, 99, (2, length), generator=torch.Generator().manual_seed(1))


def test_generation_with_the_cache_is_generation(decoded: list[int]) -> None:
    """The same tokens as transformers' own cache gives, in fp32 so that no rounding decides one; every layer
    of every step behind the prompt through the kernel."""
    model = model_of("Llama").float()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    model.set_attn_implementation("sdpa")
    wanted = model.generate(prompt(), **options)
    model.set_attn_implementation("hopper_attention")
    cache = KeyValueCache(model, 32)
    assert torch.equal(model.generate(prompt(), past_key_values=cache, **options), wanted)
    assert decoded == [n for n in range(9, 16) for _ in range(2)]
    assert cache.get_seq_length() == 16 and cache.lengths.tolist() == [16, 16]
    cache.reset()
    assert torch.equal(model.generate(prompt(), past_key_values=cache, **options), wanted)


def test_a_padded_batch_with_the_cache(decoded: list[int]) -> None:
    """Padding is a mask, which the kernel does not take: what is stored first, all the way."""
    model = model_of("Llama").float()
    mask = torch.ones_like(prompt())
    mask[0, :4] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    model.set_attn_implementation("sdpa")
    wanted = model.generate(prompt(), **options)
    model.set_attn_implementation("hopper_attention")
    cache = KeyValueCache(model, 32)
    assert torch.equal(model.generate(prompt(), past_key_values=cache, **options), wanted)
    assert decoded == []


def test_several_tokens_behind_a_prompt(decoded: list[int]) -> None:
    """As when a draft is judged: stored, attended to with the mask that transformers makes."""
    model = model_of("Llama").float()
    tokens = prompt(14)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = model(tokens).logits
        model.set_attn_implementation("hopper_attention")
        cache = KeyValueCache(model, 14)
        parts = [
            model(x, past_key_values=cache).logits for x in (tokens[:, :9], tokens[:, 9:13], tokens[:, 13:])
        ]
    torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-4, rtol=1e-4)
    assert decoded == [13, 13]
    with pytest.raises(ValueError, match="room for 14 tokens, not 15"):
        model(tokens[:, :1], past_key_values=cache)


def test_what_the_cache_is_not_for(decoded: list[int]) -> None:
    model = model_of("Llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="is for attn_implementation='hopper_attention', not 'sdpa'"):
        KeyValueCache(model, 32)
    model.set_attn_implementation("hopper_attention")
    with pytest.raises(ValueError, match="longest must be positive"):
        KeyValueCache(model, 0)
    cache = KeyValueCache(model, 32)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        model.set_attn_implementation("sdpa")  # which does not know that the key is not stored
        with pytest.raises(RuntimeError, match="to have the same device type"):
            model(prompt(1), past_key_values=cache)
        model.set_attn_implementation("hopper_attention")
        with pytest.raises(RuntimeError, match="did not end in 'hopper_attention'"):
            model(prompt(1), past_key_values=cache)
    windowed = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=8, **SMALL,
        )
    )  # fmt: skip
    windowed.set_attn_implementation("hopper_attention")
    with pytest.raises(ValueError, match="layers all see every key"):
        KeyValueCache(windowed, 32)
