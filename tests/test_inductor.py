"""What Inductor makes of the operators, without a GPU: it lowers for a CPU, with formulas for kernels."""

import re
from collections.abc import Callable, Iterator

import pytest
import test_ops
import test_ops_decode
import test_ops_policies
import torch
from torch._inductor import lowering
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from hopper_attention import (
    attention,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    ops,
    ops_decode,
    ops_policies,
)
from hopper_attention.integrations import inductor

on_cpu = test_ops.on_cpu
policies_on_cpu = test_ops_policies.on_cpu
decode_on_cpu = test_ops_decode.on_cpu


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


def plain_step():
    q, k, v = test_ops.inputs(grad=True)
    return lambda q, k, v: attention(q, k, v, causal=True, softmax_scale=0.3), (q, k, v)


def window_step():
    q, k, v = test_ops_policies.dense(grad=True)
    return lambda q, k, v: attention(q, k, v, window_size=(3, 2), softcap=2.0), (q, k, v)


def packed_step():
    (q, k, v), (cu_q, cu_k) = test_ops_policies.packed(grad=True)
    call = lambda q, k, v: flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 20, causal=True)
    return call, (q, k, v)


def differentiated(step: Callable) -> Callable:
    def run(*inputs: torch.Tensor):
        o = step(*inputs)
        return o, *torch.autograd.grad(o, inputs, torch.ones_like(o))

    return run


OURS = "hopper_attention."
OF_POLICIES = "ops_policies.forward_in_graph", "ops_policies.backward_in_graph"


def calls_of(codes: list[str]) -> set[str]:
    """What of ours generated code calls: operators, or functions in their place."""
    return set(re.findall(r"= ((?:torch\.ops\.)?hopper_attention\.[\w.]+)\(", "\n".join(codes)))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (plain_step, ("ops.forward_in_graph", "ops.backward_in_graph")),
        (window_step, OF_POLICIES),
        (packed_step, OF_POLICIES),
    ],
)
def test_generated_code_calls_past_the_dispatcher(make: Callable, names: tuple[str, ...]) -> None:
    step, inputs = make()
    compiled = torch.compile(step, fullgraph=True)
    found, codes = run_and_get_code(differentiated(compiled), *inputs)
    assert calls_of(codes) == {OURS + name for name in names}
    for x, y in zip(found, differentiated(step)(*inputs)):
        assert x.equal(y)


def test_a_decoding_step_too() -> None:
    def step(q, k_cache, v_cache, k, v, lengths):
        o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        return o, flash_attn_with_kvcache(q, k_cache, v_cache)

    q, k, v = test_ops_decode.random_inputs()
    lengths = torch.tensor([5, 38], dtype=torch.int32)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True)
    more = k[:, :2] + 1, v[:, :2] + 1, lengths
    with torch.no_grad():
        found, codes = run_and_get_code(compiled, q, *caches[0], *more)
        expected = step(q, *caches[1], *more)
    assert calls_of(codes) == {f"{OURS}ops_decode.{name}_in_graph" for name in ("decode", "append")}
    for x, y in zip((*found, *caches[0]), (*expected, *caches[1])):
        assert x.equal(y)


def test_who_looks_sees_the_operators() -> None:
    """A mode, for which a compiled graph is not compiled anew, and a profiler."""
    step, inputs = plain_step()
    compiled = differentiated(torch.compile(step))
    compiled(*inputs)
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(operator)
            return operator(*args, **(kwargs or {}))

    with Mode():
        compiled(*inputs)
    assert {ops.forward, ops.backward} <= set(seen)
    with torch.profiler.profile() as profile:
        compiled(*inputs)
    assert {"hopper_attention::forward", "hopper_attention::backward"} <= {
        x.key for x in profile.key_averages()
    }


# ---- what the functions do on a GPU ------------------------------------------------------------------------


class OnGPU(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def operators_of(call: Callable, *given: object) -> list[str]:
    with torch.profiler.profile() as profile, torch.no_grad():
        call(*given)
    return [x.key for x in profile.key_averages() if x.key.startswith("hopper_attention::")]


@pytest.mark.parametrize("watched", [False, True])
def test_on_a_gpu_nothing_is_dispatched_unless_somebody_looks(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = test_ops.inputs()
    o, lse = attention(q, k, v, return_lse=True)
    cache = [x.transpose(1, 2) for x in (q, k, v)]
    on_gpu = lambda x: x.as_subclass(OnGPU)
    plain = 0.3, True, False, False
    of_policies = *(None,) * 5, 0.3, False, False, 3, 2, 0.0, False, 0, 0
    of_decoding = None, None, None, None, 0.3, True, -1, False
    new = *(x[:, :2] for x in cache[1:]), torch.tensor([5, 7], dtype=torch.int32)
    calls = (
        (ops.forward_in_graph, "forward", (q, k, v, *plain)),
        (ops.backward_in_graph, "backward", (o, q, k, v, o, lse, None, *plain)),
        (ops_policies.forward_in_graph, "attend", (q, k, v, *of_policies)),
        (ops_policies.backward_in_graph, "attend_backward", (o, q, k, v, o, lse, None, *of_policies)),
        (ops_decode.decode_in_graph, "decode", (*cache, *of_decoding)),
        (ops_decode.append_in_graph, "decode_append", (*cache, *new, *of_decoding[1:])),
    )
    monkeypatch.setattr(ops, "is_plain", lambda x: True)
    if not watched:
        monkeypatch.setattr(ops, "profiles", lambda: False)
    for call, name, given in calls:
        with torch._C.DisableTorchFunctionSubclass():
            found = operators_of(
                call, *(on_gpu(x) if x is q or x is cache[0] or x is o else x for x in given)
            )
        assert found == ([f"hopper_attention::{name}"] if watched else [])
        assert operators_of(call, *given) == [f"hopper_attention::{name}"]


def test_whose_lowering_there_is_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = object()
    monkeypatch.delitem(inductor.IN_PLACE, ops.forward, raising=False)
    monkeypatch.setitem(lowering.lowerings, ops.forward, theirs)
    lowering.fallbacks.discard(ops.forward)
    try:
        inductor.call_in_place_of(ops.forward, ops.forward_in_graph)
        assert lowering.lowerings[ops.forward] is theirs
        assert ops.forward not in inductor.IN_PLACE
    finally:
        lowering.fallbacks.add(ops.forward)
