"""Hugging Face models through the registered implementation, the kernels stood in for by the reference."""

import functools
from types import SimpleNamespace

import pytest
import torch

from hopper_attention import choice, production
from hopper_attention.integrations import huggingface

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from test_ops import on_cpu  # noqa: E402, F401
from test_ops_policies import on_cpu as policies_on_cpu  # noqa: E402, F401

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
    for options in ({"dropout": 0.1}, {"attention_mask": torch.ones(8, 8, dtype=torch.bool)}):
        given = {"attention_mask": None, "softcap": 50.0} | options
        with pytest.raises(NotImplementedError, match="does not take softcap beside a mask, dropout"):
            huggingface.hopper_attention_forward(torch.nn.Identity(), q, q, q, **given)


# ---- windows, soft caps, sinks, sequences without padding -------------------------------------------------

WINDOWED = {
    "Mistral": transformers.MistralConfig(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=9, **SMALL,
    ),
    "Gemma 2": transformers.Gemma2Config(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        sliding_window=9, attn_logit_softcapping=3.0, **SMALL,
    ),
    "gpt-oss": transformers.GptOssConfig(
        hidden_size=256, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_local_experts=2, num_experts_per_tok=1, sliding_window=9, **SMALL,
    ),
}  # fmt: skip


def windowed(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(WINDOWED[name], dtype=torch.bfloat16).eval()
    for name, x in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(x, 1.0)
    return model


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_caps_and_sinks_are_those_of_eager(name: str, taken: list[str]) -> None:
    model = windowed(name)
    tokens = torch.randint(99, (2, 33), generator=torch.Generator().manual_seed(1))
    plain = outputs(model, "eager", input_ids=tokens)
    found = outputs(model, "hopper_attention", input_ids=tokens)
    assert torch.allclose(found, plain, atol=2**-5 * plain.abs().max().item())
    assert taken == ["k6"] * 2


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_that_the_kernels_leave_to_sdpa(
    padded: bool, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are refused, or beside padding, with the mask it needs."""
    model = windowed("Mistral")
    tokens = torch.randint(99, (2, 33), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, : 5 * padded] = 0
    if not padded:
        monkeypatch.setattr(huggingface, "_takes", lambda *x, **y: False)
    inputs = {"input_ids": tokens, "attention_mask": mask}
    seen = mask.bool()
    plain = outputs(model, "sdpa", **inputs)[seen]
    found = outputs(model, "hopper_attention", **inputs)[seen]
    assert torch.allclose(found, plain, atol=2**-5 * plain.abs().max().item())
    assert taken == []


@pytest.mark.parametrize("name", ["Mistral", "gpt-oss"])
@pytest.mark.parametrize("left_to_sdpa", [False, True])
def test_generation_with_a_window(
    name: str, left_to_sdpa: bool, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if left_to_sdpa and name == "Mistral":
        monkeypatch.setattr(huggingface, "slower", choice.slower)
    model = windowed(name)
    tokens = torch.randint(1, 99, (2, 20), generator=torch.Generator().manual_seed(1))
    texts = {}
    for implementation in ("eager", "hopper_attention"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        texts[implementation] = model.generate(
            tokens, **options, output_logits=True, return_dict_in_generate=True
        )
    plain, found = (torch.stack(texts[x].logits).float() for x in texts)
    assert torch.allclose(found[0], plain[0], atol=2**-5 * plain.abs().max().item())
    assert len(taken) == (2 if left_to_sdpa and name == "Mistral" else 12)


@pytest.mark.parametrize("name", ["Llama", *WINDOWED])
def test_training_without_padding(name: str, taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences in one row: the loss and the gradients are those of the two alone."""
    packed: list[object] = []
    call = huggingface.flash_attn_varlen_func
    told = lambda y: (y["max_seqlen_q"], y["max_seqlen_k"])
    monkeypatch.setattr(
        huggingface, "flash_attn_varlen_func", lambda *x, **y: packed.append(told(y)) or call(*x, **y)
    )
    model = (model_of(name) if name == "Llama" else windowed(name)).train()
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(99, (1, n), generator=generator) for n in (21, 12))
    model.set_attn_implementation("hopper_attention")
    cu = torch.tensor([0, 21, 33], dtype=torch.int32)
    together = model(
        input_ids=torch.cat([first, second], 1),
        position_ids=torch.cat([torch.arange(21), torch.arange(12)])[None],
        cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=21, max_length_k=21,
    ).logits  # fmt: skip
    assert packed == [(21, 21)] * 2
    model.set_attn_implementation("eager")
    alone = torch.cat([model(input_ids=x).logits for x in (first, second)], 1)
    assert torch.allclose(together, alone, atol=2**-5 * alone.abs().max().item())
    weight = model.model.layers[0].self_attn.q_proj.weight
    found, plain = (torch.autograd.grad(x.float().square().mean(), weight)[0] for x in (together, alone))
    assert torch.allclose(found, plain, atol=0.1 * plain.abs().max().item())


def test_packed_calls_that_cannot_be_are_refused() -> None:
    q, cu = torch.zeros(2, 2, 8, 64, dtype=torch.bfloat16), torch.tensor([0, 8], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    with pytest.raises(ValueError, match="packed sequences lie in a batch of 1, not of 2"):
        huggingface.hopper_attention_forward(torch.nn.Identity(), q, q, q, None, **lengths)
    with pytest.raises(NotImplementedError, match=r"does not take dropout = 0\.5"):
        huggingface.hopper_attention_forward(torch.nn.Identity(), q, q, q, None, dropout=0.5, **lengths)


def test_packed_calls_whose_mask_says_more_are_refused(taken: list[str]) -> None:
    """By their layer's kind, and by what a mask was made of; and half of the lengths is none."""
    q = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    both = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    module = torch.nn.Identity()
    attend = lambda mask=None, **more: huggingface.hopper_attention_forward(
        module, q, q, q, mask, **(both | more)
    )
    masks = transformers.masking_utils
    make = lambda function: huggingface.hopper_attention_mask(
        1, 8, 8, 0, 0, mask_function=function, allow_is_causal_skip=False
    )
    packing = masks.packed_sequence_mask_function(torch.tensor([[0] * 3 + [1] * 5]))
    window = masks.sliding_window_causal_mask_function(4)
    for plain in (masks.causal_mask_function, window, masks.and_masks(packing, window)):
        attend(make(plain))
    chunks = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int))
    seen = masks.or_masks(masks.causal_mask_function, lambda b, h, q, kv: kv < 2)
    for more in (chunks, seen, masks.and_masks(packing, seen)):
        with pytest.raises(NotImplementedError, match="a mask that says more than they do beside packed"):
            attend(make(more))
    module.layer_idx = 1
    module.config = SimpleNamespace(layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(NotImplementedError, match="does not take chunked_attention beside packed sequences"):
        attend()
    module.layer_idx = 0
    attend()
    for name in both:
        with pytest.raises(TypeError, match=rf"{name} must be a torch\.Tensor, not NoneType"):
            attend(**{name: None})


def test_packed_sequences_of_a_module_that_is_not_causal(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window reaches to both sides there."""
    windows = []
    call = huggingface.flash_attn_varlen_func
    monkeypatch.setattr(
        huggingface,
        "flash_attn_varlen_func",
        lambda *x, **y: windows.append(y.get("window_size")) or call(*x, **y),
    )
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        hidden_size=256, intermediate_size=256, num_attention_heads=4, num_hidden_layers=3, vocab_size=99,
        local_attention=8, global_attn_every_n_layers=3, pad_token_id=0, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    for name, x in model.named_parameters():
        if "Wqkv" in name:
            torch.nn.init.normal_(x, std=0.15)
    tokens = torch.randint(3, 99, (1, 48), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([outputs(model, "sdpa", input_ids=x) for x in (tokens[:, :20], tokens[:, 20:])], 1)
    cu = torch.tensor([0, 20, 48], dtype=torch.int32)
    together = outputs(
        model, "hopper_attention", input_ids=tokens,
        position_ids=torch.cat([torch.arange(20), torch.arange(28)])[None],
        cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=28, max_length_k=28,
    )  # fmt: skip
    assert windows == [None, (4, 4), (4, 4)]
    assert torch.allclose(together, alone, atol=2**-5 * alone.abs().max().item())


# ---- what is handed on beside -----------------------------------------------------------------------------


def test_a_learned_bias_is_left_to_sdpa(taken: list[str]) -> None:
    config = transformers.T5Config(
        d_model=256, d_kv=64, d_ff=256, num_layers=2, num_heads=4, vocab_size=99, dropout_rate=0.0
    )
    torch.manual_seed(0)
    model = transformers.T5EncoderModel._from_config(config, dtype=torch.bfloat16).eval()
    for name, x in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(x, std=2.0)
    tokens = torch.randint(1, 99, (2, 33), generator=torch.Generator().manual_seed(1))
    plain, found = (outputs(model, x, input_ids=tokens) for x in ("sdpa", "hopper_attention"))
    assert torch.equal(found, plain) and taken == []


@pytest.mark.parametrize("queries", [1, 33])
def test_a_bias_beside_a_window(queries: int, taken: list[str]) -> None:
    """Without a mask: transformers' "sdpa" gets one, and the bias whole."""
    q, k, v = (torch.randn(1, 2, n, 64, dtype=torch.bfloat16) for n in (queries, 33, 33))
    bias = torch.randn(1, 2, queries, 33, dtype=torch.bfloat16)
    o, _ = huggingface.hopper_attention_forward(
        torch.nn.Identity(), q, k, v, None, sliding_window=9, position_bias=bias
    )
    behind = torch.arange(33 - queries, 33)[:, None] - torch.arange(33)
    mask = bias.float().masked_fill((behind < 0) | (behind >= 9), -torch.inf)
    wanted = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask)
    torch.testing.assert_close(o.float(), wanted.transpose(1, 2), atol=0.03, rtol=0.03)
    assert taken == []


def test_what_is_unknown_is_not_ignored(taken: list[str]) -> None:
    """A bias, chosen keys, a number: sdpa's, or with packed sequences refused. Flags and positions are
    neither."""
    q = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)
    call = lambda **more: huggingface.hopper_attention_forward(torch.nn.Identity(), q, q, q, None, **more)
    call(output_attentions=False, use_cache=True, position_ids=torch.arange(8)[None], some_bias=None)
    assert taken == ["k6"]
    call(block_indices=torch.arange(8))
    call(attention_chunk=4)
    assert taken == ["k6"]
    cu = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="does not take position_bias beside packed sequences"):
        call(cu_seq_lens_q=cu, cu_seq_lens_k=cu, position_bias=torch.zeros(1, 2, 8, 8))
    with pytest.raises(NotImplementedError, match="does not take softcap beside a mask, dropout, a bias"):
        call(softcap=50.0, position_bias=torch.zeros(1, 2, 8, 8))


def test_a_graph_takes_no_window_that_the_call_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other head dims than 64, 128 and 256 have no windows: compiled as eager, they are sdpa's."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for head_dim, taken in ((64, True), (96, False)):
        q = torch.empty(1, 2, 8, head_dim, dtype=torch.bfloat16)
        options = q, q, q, None, False, False
        assert huggingface._takes(*options, extras={})
        assert huggingface._takes(*options, extras={"window_size": (3, 0)}) == taken


# ---- transformers' own FlashAttention path ----------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_is_taken_out_and_put_back(
    name: str, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = lend(monkeypatch, "flash_attn_varlen_func")
    model = model_of(name)
    tokens = torch.randint(99, (2, 33), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    inputs, seen = {"input_ids": tokens, "attention_mask": mask}, mask.bool()
    plain, found = (outputs(model, x, **inputs)[seen] for x in ("sdpa", huggingface.FLASH))
    assert torch.allclose(found, plain, atol=2**-5 * plain.abs().max().item())
    assert len(packed) == 2


@pytest.mark.filterwarnings("ignore")
def test_continuous_batching(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other lengths in one batch: the tokens of each alone. (Pages are for a GPU alone:
    tests/test_library_on_gpu.py.)"""
    packed = lend(monkeypatch, "flash_attn_varlen_func")
    model, prompts = model_of("Llama").float(), [[1, 2, 3, 4, 5], [7, 8, 9]]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    model.set_attn_implementation("sdpa")
    wanted = [model.generate(torch.tensor([x]), **options)[0, len(x) :].tolist() for x in prompts]
    model.set_attn_implementation(huggingface.FLASH)
    found = model.generate_batch(
        inputs=prompts,
        generation_config=transformers.GenerationConfig(**options),
        # Where there is a GPU it would be for the GPU.
        continuous_batching_config=transformers.ContinuousBatchingConfig(use_async_batching=False),
    )
    assert sorted(x.generated_tokens for x in found.values()) == sorted(wanted)
    assert len(packed) >= 12


def lend(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Calls of one of the functions that transformers is lent, which it asks for once."""
    from transformers import modeling_flash_attention_utils as utils

    found: list[str] = []
    call = getattr(huggingface, name)

    @functools.wraps(call)
    def counted(*given: object, **named: object):
        found.append(name)
        return call(*given, **named)

    monkeypatch.setattr(huggingface, name, counted)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    return found


def test_lent_once_and_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_flash_attention_utils as utils

    asked = []
    monkeypatch.setattr(utils, "_lazy_imports", lambda *x, **y: asked.append((x, y)) or "theirs")
    assert huggingface._lend_functions() and huggingface._lend_functions()
    calls = utils._lazy_imports(huggingface.FLASH, None, allow_all_kernels=False)
    assert calls[:3] == (
        huggingface.flash_attn_func,
        huggingface.flash_attn_varlen_func,
        huggingface.flash_attn_with_kvcache,
    )
    assert utils._lazy_imports("flash_attention_2", None, allow_all_kernels=True) == "theirs"
    assert asked == [(("flash_attention_2", None), {"allow_all_kernels": True})]
    monkeypatch.delattr(utils, "_lazy_imports")
    assert not huggingface._lend_functions()
