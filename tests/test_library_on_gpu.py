"""The public calls on a Hopper GPU."""

import functools
import threading

import pytest
import torch
from packaging.version import Version
from public_calls import every_head_dim, every_mask, problem, verdicts, verdicts_with_lse
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from harness import logits
from harness.inputs import random_inputs
from hopper_attention import attention, attention_backward, enabled, production
from hopper_attention.integrations import huggingface

pytestmark = pytest.mark.gpu


@every_mask
@every_head_dim
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_and_gradients(mask: dict, head_dim: int, dtype: str) -> None:
    q, k, v, do = random_inputs(problem(head_dim, dtype=dtype))
    assert verdicts(q, k, v, do, **mask) == []
    assert verdicts(q, k, v, do, None, 1.5 * head_dim**-0.5, **mask) == []
    assert verdicts_with_lse(q, k, v, do, **mask) == []


@every_head_dim
def test_layouts_give_the_same_bits(head_dim: int) -> None:
    q, k, v, do = random_inputs(problem(head_dim, seqlen_kv=257, kv_heads=4))
    plain = attention(q, k, v, causal=True, return_lse=True)
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2)
    slices = [x.transpose(1, 2) for x in packed.unbind(2)]
    grads = attention_backward(do, q, k, v, *plain, causal=True, deterministic=True)
    for inputs in (rows_first, slices):
        o, lse = attention(*inputs, causal=True, return_lse=True)
        assert o.equal(plain[0])
        assert lse.equal(plain[1])
        assert o.transpose(1, 2).is_contiguous()
        found = attention_backward(do, *inputs, o, lse, causal=True, deterministic=True)
        for x, y in zip(found, grads):
            assert x.equal(y)
            assert x.transpose(1, 2).is_contiguous()


def test_deterministic_gradients_and_the_global_switch() -> None:
    q, k, v, do = random_inputs(problem(128, seqlen_q=2048, seqlen_kv=2048))
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    first = attention_backward(do, q, k, v, o, lse, causal=True, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(20):
            again = attention_backward(do, q, k, v, o, lse, causal=True)
            assert all(x.equal(y) for x, y in zip(first, again))
    finally:
        torch.use_deterministic_algorithms(False)


def test_more_batches_than_a_grid_has() -> None:
    """Windows of a vision model: batch 70000, as many heads as fit."""
    q, k, v, do = (torch.randn(70000, 3, 49, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    o, lse = attention(q, k, v, return_lse=True)
    found = attention_backward(do, q, k, v, o, lse, deterministic=True)
    for at in (slice(0, 64), slice(65500, 65600), slice(69900, 70000)):
        part = attention_backward(*(x[at] for x in (do, q, k, v, o, lse)), deterministic=True)
        for x, y in zip(found, part):
            assert x[at].equal(y)


def test_graphs() -> None:
    """Captured and replayed on other inputs, forward and backward; two graphs may replay side by side."""
    q, k, v, do = random_inputs(problem(128, seqlen_q=1024, seqlen_kv=1024))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step():
        o = attention(*leaves, causal=True, deterministic=True)
        return o, *torch.autograd.grad(o, leaves, do)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        graphs.append((graph, outputs))
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for stream, (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    expected = step()
    for _, outputs in graphs:
        assert all(x.equal(y) for x, y in zip(outputs, expected))


def test_streams_and_threads() -> None:
    """Eight threads, each on a stream of its own, forward and backward."""
    sets = [random_inputs(problem(64, seqlen_q=1000 + i, seqlen_kv=1000 + i), seed=i) for i in range(8)]

    def both(q, k, v, do):
        o, lse = attention(q, k, v, causal=True, return_lse=True)
        return o, *attention_backward(do, q, k, v, o, lse, causal=True, deterministic=True)

    expected = [both(*inputs) for inputs in sets]
    torch.cuda.synchronize()
    found: list = [None] * 8

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                found[i] = both(*sets[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for x, y in zip(found, expected):
        assert all(a.equal(b) for a, b in zip(x, y))


def test_threads_on_one_stream() -> None:
    """They share what a stream keeps: nobody's launch may come between the kernels of a backward pass."""
    sets = [random_inputs(problem(64, seqlen_q=500 + i, seqlen_kv=500 + i), seed=i) for i in range(8)]

    def both(q, k, v, do):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        alone = attention(q, k, v, causal=True)  # its LSE is scratch
        o = attention(*leaves, causal=True, deterministic=True)
        return alone, o.detach(), *torch.autograd.grad(o, leaves, do)

    expected = [both(*inputs) for inputs in sets]
    torch.cuda.synchronize()
    wrong: list = []

    def work(i: int) -> None:
        for _ in range(50):
            found = both(*sets[i])
            torch.cuda.current_stream().synchronize()
            wrong.extend(i for x, y in zip(found, expected[i]) if not x.equal(y))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_gpus_in_a_process() -> None:
    q, k, v, do = random_inputs(problem(64))
    here = attention(q, k, v, return_lse=True)
    grads = attention_backward(do, q, k, v, *here, deterministic=True)
    q, k, v, do = (x.to("cuda:1") for x in (q, k, v, do))
    there = attention(q, k, v, return_lse=True)  # the current device stays the first
    assert there[0].device == q.device
    assert there[0].cpu().equal(here[0].cpu())
    for x, y in zip(attention_backward(do, q, k, v, *there, deterministic=True), grads):
        assert x.cpu().equal(y.cpu())


@every_mask
@pytest.mark.parametrize("backend", ["inductor"])
def test_compiled(mask: dict, backend: str) -> None:
    """Whole graphs; other lengths and batches without a recompile; gradients; wrong inputs by name."""
    torch._dynamo.reset()

    def step(q, k, v):
        return attention(q.mul(1.5), k, v, **mask, deterministic=True).sin()

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for batch, n in ((2, 256), (3, 320), (4, 513)):
        q, k, v, do = random_inputs(problem(64, batch=batch, seqlen_q=n, seqlen_kv=n))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.compiler.set_stance("fail_on_recompile" if n == 513 else "default"):
            o = compiled(*leaves)
        outputs = o, step(*leaves)
        assert torch.allclose(*outputs, atol=2**-6)
        for x, y in zip(*(torch.autograd.grad(o, leaves, do) for o in outputs)):
            assert torch.allclose(x, y, atol=2**-5 * y.abs().max().item())
    with pytest.raises(TypeError, match="q, k and v must have one dtype"):
        torch.compile(attention, fullgraph=True)(q, k.half(), v)


def test_autocast_and_opcheck() -> None:
    q, k, v, _ = random_inputs(problem(64))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert attention(q.float(), k.float(), v.float()).equal(attention(q, k, v))
    torch.library.opcheck(torch.ops.hopper_attention.forward.default, (q, k, v), {"causal": True})


def kernels_of(call) -> list[str]:
    """Names of the attention kernels that a call launches."""
    from torch.profiler import ProfilerActivity, profile

    call()  # compiled, and its scratch zeroed
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    words = "attention", "flash", "fmha", "cudnn"
    return [x.name for x in seen.events() if any(word in x.name.lower() for word in words)]


def test_a_plain_sdpa_call_runs_our_kernels() -> None:
    """Forward and backward, with no backend asked for; and PyTorch's again when it is over."""
    q, k, v, do = random_inputs(problem(128, seqlen_q=1024, seqlen_kv=1024, kv_heads=4, batch=8))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step():
        return torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True), leaves, do)

    plain, theirs = step(), kernels_of(step)
    with enabled():
        found, ours = step(), kernels_of(step)
    assert theirs
    assert not any("hopper_attention" in name for name in (*theirs, *kernels_of(step)))
    assert ours
    assert all("hopper_attention" in name for name in ours)
    for x, y in zip(found, plain):
        assert torch.allclose(x, y, atol=2**-5 * y.abs().max().item())


@pytest.mark.parametrize("head_dim", [128, 100])
def test_sdpas_mask_at_the_bottom_right(head_dim: int) -> None:
    """The one way in which SDPA has one, to its flash operator, which it pads 100 columns for."""
    draw = lambda seqlen: torch.randn(4, 8, seqlen, head_dim, dtype=torch.bfloat16, device="cuda")
    leaves, do = [draw(n).requires_grad_() for n in (1024, 3000, 3000)], draw(1024)

    def step():
        o = scaled_dot_product_attention(*leaves, attn_mask=causal_lower_right(1024, 3000))
        return [o, *torch.autograd.grad(o, leaves, do)]

    plain = step()
    with enabled():
        found, ours = step(), kernels_of(step)
    assert any("hopper_attention" in name for name in ours)
    for x, y in zip(found, plain):
        assert torch.allclose(x, y, atol=2**-5 * y.abs().max().item())


def test_checkpointing() -> None:
    """Recomputed in the backward pass, or by policy kept: the same gradients."""
    q, k, v, do = random_inputs(problem(64, seqlen_kv=257))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    op = torch.ops.hopper_attention.forward.default
    keep = lambda ctx, which, *x, **y: (
        CheckpointPolicy.MUST_SAVE if which == op else CheckpointPolicy.PREFER_RECOMPUTE
    )
    selective = functools.partial(create_selective_checkpoint_contexts, keep)
    call = lambda *x: attention(*x, causal=True, deterministic=True)
    plain = torch.autograd.grad(call(*leaves), leaves, do)
    for more in ({}, {"context_fn": selective}):
        o = checkpoint(call, *leaves, use_reentrant=False, **more)
        assert all(x.equal(y) for x, y in zip(torch.autograd.grad(o, leaves, do), plain))


def test_beside_sdpa() -> None:
    q, k, v, _ = random_inputs(problem(128, kv_heads=4, seqlen_kv=257))
    o = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.allclose(attention(q, k, v, causal=True), o, atol=2**-5)


@pytest.mark.parametrize("name", logits.MODELS)
def test_hugging_face_models_give_the_same_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 positions, in one pass and, with a cache, token by token: as far from float32 as SDPA's are; and
    where SDPA is sure of the next token, the same token."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    taken = []
    call = huggingface.attention
    monkeypatch.setattr(huggingface, "attention", lambda *x, **y: taken.append(1) or call(*x, **y))
    rows = logits.measure(name)
    # By each layer: of the pass, and with either cache of the prompt; steps of transformers' are SDPA's.
    assert len(taken) == logits.LAYERS * (1 if name == "BERT" else 3)
    assert len(rows) == (1 if name == "BERT" else 3)
    assert [x for row in rows for x in logits.failures(row)] == []


def test_continuous_batching_decodes_from_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through transformers' own FlashAttention path; every step's attention against fp32, of the pages that
    its table names. Captured in CUDA graphs the same tokens."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import modeling_flash_attention_utils as utils

    huggingface.register()
    if not huggingface._lend_functions() or Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this transformers batches under names of its own")
    call, steps = huggingface.flash_attn_with_kvcache, []

    @functools.wraps(call)
    def checked(q, k_cache, v_cache, k, v, **options):
        o = call(q, k_cache, v_cache, k, v, **options)
        table, lengths = options["block_table"], options["cache_seqlens"].tolist()
        steps.append(len(q))
        for b, length in enumerate(lengths):
            keys, values = (x[table[b].clamp(min=0)].flatten(0, 1)[: length + 1] for x in (k_cache, v_cache))
            assert keys[-1].equal(k[b, 0]) and values[-1].equal(v[b, 0])
            rows = [x.float().transpose(0, 1)[None] for x in (q[b], keys, values)]
            plain = scaled_dot_product_attention(*rows, scale=options["softmax_scale"], enable_gqa=True)
            within = 2**-6 * plain.abs().max().item()
            assert torch.allclose(o[b].float(), plain[0].transpose(0, 1), atol=within)
        return o

    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        num_hidden_layers=2, vocab_size=99,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    prompts = [torch.randint(1, 99, (n,)).tolist() for n in (3, 40, 700)]
    options = transformers.GenerationConfig(
        max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    found = []
    for function, graphs in ((checked, False), (call, True)):
        monkeypatch.setattr(huggingface, "flash_attn_with_kvcache", function)
        monkeypatch.setattr(utils, "_loaded_implementation", None)
        model.set_attn_implementation("sdpa")
        model.set_attn_implementation(huggingface.FLASH)
        batching = transformers.ContinuousBatchingConfig(
            use_cuda_graph=graphs, num_blocks=64, max_batch_tokens=1024
        )
        answers = model.generate_batch(
            inputs=prompts, generation_config=options, continuous_batching_config=batching
        )
        assert all(x.error is None for x in answers.values())
        found.append([answers[x].generated_tokens for x in sorted(answers)])
    assert len(steps) >= 2 * 7  # layers, and steps behind the prompts
    assert found[0] == found[1] and {*map(len, found[0])} == {9}


def test_nothing_is_asked_of_a_gpu_twice() -> None:
    """What makes a call fast: the second of a kind plans nothing."""
    q, k, v, _ = random_inputs(problem(64))
    attention(q, k, v)
    known = len(production.plans)
    attention(q.clone(), k.clone(), v.clone())
    assert len(production.plans) == known
