"""Hugging Face generation with the library's cache, the kernel stood in for by its definition."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_huggingface import SMALL, model_of, taken  # noqa: E402, F401
from test_ops import on_cpu  # noqa: E402, F401

from hopper_attention.integrations import huggingface_cache  # noqa: E402
from hopper_attention.integrations.huggingface_cache import KeyValueCache  # noqa: E402


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


def test_drafts_are_forgotten(decoded: list[int]) -> None:
    """As prompt lookup has them: several tokens at once, some of which are then cut off."""
    model = model_of("Llama").float()
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    tokens = torch.cat([prompt(6)[:1], prompt(6)[:1], prompt(6)[:1]], 1)
    model.set_attn_implementation("sdpa")
    wanted = model.generate(tokens, **options)
    model.set_attn_implementation("hopper_attention")
    cache = KeyValueCache(model, 40)
    found = model.generate(tokens, past_key_values=cache, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(found, wanted)
    assert cache.lengths.tolist() == [cache.get_seq_length()]
    stored = cache.get_seq_length()
    cache.crop(-2)
    cache.crop(0)
    assert cache.lengths.tolist() == [stored - 2] == [cache.get_seq_length()]
    with pytest.raises(ValueError, match="as a negative number, not 5"):
        cache.crop(5)
    cache.crop(-100)
    assert cache.lengths.tolist() == [0] == [cache.get_seq_length()]
    KeyValueCache(model, 40).crop(-1)  # nothing is there


def test_a_cache_keeps_its_batch(decoded: list[int]) -> None:
    model = model_of("Llama")
    model.set_attn_implementation("hopper_attention")
    cache = KeyValueCache(model, 32)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        cache.reset()
        for batch in (1, 4):
            tokens = prompt()[:1].expand(batch, -1)
            with pytest.raises(ValueError, match=f"begun with a batch of 2, not of {batch}"):
                model(tokens, past_key_values=cache)
        assert cache.get_seq_length() == 0
    with pytest.raises(NotImplementedError, match="does not select sequences"):
        cache.batch_select_indices(torch.tensor([0]))
    with pytest.raises(NotImplementedError, match="does not repeat sequences"):
        cache.batch_repeat_interleave(2)
    other = KeyValueCache(model, 32)
    key = torch.zeros(2, 2, 4, 64)
    with pytest.raises(ValueError, match="values like keys"):
        other.layers[0].update(key, key[..., :32])
    other.layers[0].update(key, key)
    with pytest.raises(ValueError, match="a model on one GPU, not layers on cpu and meta"):
        other.layers[1].update(key.to("meta"), key.to("meta"))


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
