"""`attend`, `flash_attn_varlen_func` and the policies of `attention` on a CPU, where the reference stands in
for the kernels."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo.testing
from torch.utils.flop_counter import FlopCounterMode

from harness import reference
from harness.policies import Given
from hopper_attention import attention, flash_attn_func, flash_attn_varlen_func, ops, ops_policies
from hopper_attention.kernels.contract import Problem

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LENGTHS = ((9, 13), (0, 4), (5, 0), (1, 1), (20, 20))
CHECKED = ops_policies.run_forward  # not stood in for


def given_of(q, k, v, more, do=None, dlse=None) -> Given:
    """The reference's problem of an operator's arguments."""
    tensors, (scale, causal, top_left, left, right, softcap, *_) = ops_policies._complete(more)
    sink, cu_q, cu_k, used_q, used_k = tensors
    fields = {
        "causal": causal,
        "top_left": top_left,
        "window": None if (left, right) == (-1, -1) else (left, right),
        "softcap": softcap,
        "sink": sink is not None,
    }
    if cu_q is None:
        (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
        return Given(
            Problem(batch, heads, kv_heads, queries, keys, head_dim, **fields), q, k, v, do, dlse, scale, sink
        )
    lengths = [
        (cu.diff() if used is None else used).tolist() for cu, used in ((cu_q, used_q), (cu_k, used_k))
    ]
    (queries, heads, head_dim), (keys, kv_heads, _) = q.shape, k.shape
    problem = Problem(1, heads, kv_heads, queries, keys, head_dim, **fields, sequences=tuple(zip(*lengths)))
    batched = [x if x is None else x.transpose(0, 1)[None] for x in (q, k, v, do)]
    starts = cu_q.tolist(), cu_k.tolist()
    return Given(problem, *batched, None if dlse is None else dlse[None], scale, sink, starts)


def as_given(x: torch.Tensor, given: Given) -> torch.Tensor:
    return x if given.problem.sequences is None else x[0].transpose(0, 1)


hints: list[tuple[str, int, int]] = []  # the pass, and of each that runs the longest of queries and keys


def run_forward(q, k, v, *more):
    hints.append(("fwd", *ops_policies._complete(more)[1][-2:]))
    given = given_of(q, k, v, more)
    o, lse = zip(*(one.forward for one in given.expected)) if given.groups else ((), ())
    like = torch.empty(given.q.shape[:3])
    found = given.spread("o", o, given.q).nan_to_num(0.0), given.spread("lse", lse, like)
    return (
        torch.empty_like(q).copy_(as_given(found[0], given)),
        (found[1] if given.problem.sequences is None else found[1][0]).clone(),
    )


def run_backward(do, q, k, v, o, lse, dlse=None, *more):
    hints.append(("bwd", *ops_policies._complete(more)[1][-2:]))
    given = given_of(q, k, v, more, do, dlse)
    grads = list(zip(*(one.gradients for one in given.expected)))
    found = [
        torch.empty_like(x).copy_(as_given(given.spread(name, parts, y).nan_to_num(0.0), given))
        for name, x, y, parts in zip(("dq", "dk", "dv"), (q, k, v), (given.q, given.k, given.v), grads)
    ]
    if given.sink is None:
        return *found, torch.empty(0)
    packed = given.problem.sequences is not None
    rows = {"o": o.transpose(0, 1)[None], "lse": lse[None]} if packed else {"o": o, "lse": lse}
    rows |= {"do": given.do, "dlse": given.dlse}
    rows = {name: None if x is None else given.own_rows(name, x) for name, x in rows.items()}
    dsink, _ = reference.sink_gradient(rows["o"], rows["lse"], rows["do"], given.sink, rows["dlse"])
    return *found, dsink.float()


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    hints.clear()
    for name, stand_in in (("run_forward", run_forward), ("run_backward", run_backward)):
        monkeypatch.setattr(ops_policies, name, stand_in)
    library = torch.library.Library("hopper_attention", "IMPL")
    library.impl("attend", run_forward, "CPU")
    library.impl("attend_backward", run_backward, "CPU")
    library.impl("attend", ops.autocast_on("cpu", ops_policies.forward), "AutocastCPU")
    yield
    library._destroy()


def random(*shape: int, seed: int = 1, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(grad: bool = False) -> list[torch.Tensor]:
    shapes = (2, HEADS, 9, HEAD_DIM), (2, KV_HEADS, 13, HEAD_DIM), (2, KV_HEADS, 13, HEAD_DIM)
    return [random(*shape, seed=i).requires_grad_(grad) for i, shape in enumerate(shapes)]


def cu(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(grad: bool = False, lengths=LENGTHS) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    queries, keys = (sum(x) for x in zip(*lengths))
    shapes = (queries, HEADS, HEAD_DIM), (keys, KV_HEADS, HEAD_DIM), (keys, KV_HEADS, HEAD_DIM)
    tensors = [random(*shape, seed=i).requires_grad_(grad) for i, shape in enumerate(shapes)]
    return tensors, [cu(x) for x in zip(*lengths)]


def sink(grad: bool = False) -> torch.Tensor:
    return random(HEADS, seed=7, dtype=torch.float32).requires_grad_(grad)


POLICIES = (
    {"window_left": 3, "window_right": 0},
    {"softcap": 2.0, "causal": True},
    {"softmax_scale": 0.3, "window_left": 2, "window_right": 5, "softcap": 1.0},
)


# ---- what PyTorch asks of an operator ---------------------------------------------------------------------


@pytest.mark.parametrize("options", POLICIES, ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_opcheck(options: dict, with_sink: bool, grad: bool) -> None:
    own = {"sink": sink(grad)} if with_sink else {}
    torch.library.opcheck(ops_policies.forward, dense(grad), own | options)
    tensors, (cu_q, cu_k) = packed(grad)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    torch.library.opcheck(ops_policies.forward, tensors, own | lengths | options)
    own = {name: x.detach() for name, x in own.items()}
    for inputs, more in ((dense(), {}), (packed()[0], lengths)):
        o, lse = ops_policies.forward(*inputs, **own, **more, **options)
        for dlse in (None, torch.randn_like(lse)):
            given = torch.randn_like(o), *inputs, o, lse, dlse
            torch.library.opcheck(ops_policies.backward, given, own | more | options)


def exact_gradients(call: Callable, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    o, lse = call(*leaves)
    do, dlse = random(*o.shape, seed=11), random(*lse.shape, seed=12, dtype=torch.float32)
    return torch.autograd.grad((o, lse), leaves, (do, dlse))


def test_a_sinks_gradient_is_that_of_finite_differences() -> None:
    (q, k, v), leaf = dense(), sink(True)
    loss = lambda s: attention(
        *(x.float() for x in (q, k, v)), window_size=(4, 0), learnable_sink=s, return_lse=True
    )
    o, lse = loss(leaf)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    (found,) = torch.autograd.grad((o, lse), leaf, (do, dlse))
    with torch.no_grad():
        for head in range(HEADS):
            step = torch.zeros(HEADS).index_fill_(0, torch.tensor(head), 1e-2)
            value = lambda s: sum((x.double() * d).sum() for x, d in zip(loss(s), (do, dlse)))
            slope = (value(leaf + step) - value(leaf - step)) / 2e-2
            assert math.isclose(found[head], slope, rel_tol=2e-2, abs_tol=2e-2)


def test_a_sink_in_16_bits_gets_its_gradient_in_16_bits() -> None:
    leaf = sink().bfloat16().requires_grad_()
    attention(*dense(), learnable_sink=leaf).sum().backward()
    assert leaf.grad.dtype == torch.bfloat16 and leaf.grad.any()


def test_packed_sequences_are_those_alone() -> None:
    (q, k, v), (cu_q, cu_k) = packed(grad=True)
    for options in ({"softcap": 50.0}, {"causal": True, "softcap": 9.0}, {"window_size": (3, 0)}):
        o, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, return_lse=True, **options)
        assert o.shape == q.shape and lse.shape == (HEADS, q.shape[0])
        do = torch.randn_like(o)
        grads = torch.autograd.grad(o, (q, k, v), do)
        for i, (queries, keys) in enumerate(LENGTHS):
            rows, of_keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
            if not queries or not keys:
                assert not o[rows].any() and lse[:, rows].isneginf().all()
                assert not any(x.any() for x in (grads[0][rows], grads[1][of_keys], grads[2][of_keys]))
                continue
            alone = [
                x[at][None].detach().requires_grad_() for x, at in ((q, rows), (k, of_keys), (v, of_keys))
            ]
            same, same_lse = flash_attn_func(*alone, return_lse=True, **options)
            assert torch.allclose(o[rows].float(), same[0].float(), atol=2e-2)
            assert torch.allclose(lse[:, rows], same_lse[0], atol=1e-4)
            for x, y in zip(grads, torch.autograd.grad(same, alone, do[rows][None])):
                at = rows if x is grads[0] else of_keys
                assert torch.allclose(x[at].float(), y[0].float(), atol=3e-2)


def test_lengths_are_values_and_no_part_of_a_graph() -> None:
    """One graph serves every packing of as many sequences, and more, whatever their longest is said to be."""
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    call = lambda q, k, v, a, b, most: flash_attn_varlen_func(q, k, v, a, b, most, most, causal=True)
    compiled = torch.compile(call, fullgraph=True, backend=count, dynamic=True)
    for lengths in (LENGTHS, ((9, 9), (20, 20), (8, 8)), ((5, 5), (6, 6), (7, 7), (3, 3))):
        tensors, starts = packed(lengths=lengths)
        most = max(map(max, lengths))
        assert compiled(*tensors, *starts, most).equal(call(*tensors, *starts, most))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("most", "told"), [(20, 20), (None, 0), (-1, 0), (torch.tensor(20), 0), (True, 0), (10**9, 10**9)]
)
def test_who_is_told_the_longest(most: object, told: int) -> None:
    """Of numbers alone: what a tensor holds is not read. Forward and backward pass, of queries and keys."""
    tensors, starts = packed(grad=True)
    flash_attn_varlen_func(*tensors, *starts, most, 7, causal=True).sum().backward()
    flash_attn_varlen_func(*tensors, *starts, 7, most, causal=True)
    assert hints == [("fwd", told, 7), ("bwd", told, 7), ("fwd", 7, told)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_is_told_a_bound_of_the_longest(backend: str, dynamic: bool | None) -> None:
    """One that serves all numbers up to it: so few that PyTorch, which compiles a function anew 8 times at
    most, has a graph for each. In both directions."""
    call = lambda q, k, v, a, b, most: flash_attn_varlen_func(q, k, v, a, b, most, most, causal=True)
    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    told = {20: 128, 31: 128, 128: 128, 129: 256, 257: 512, 1024: 1024, 1025: 0, 10**6: 0, -3: 0, 0: 0}
    for most in (*told, *reversed(told)):
        tensors, starts = packed(grad=True)
        hints.clear()
        o = compiled(*tensors, *starts, most)
        grads = torch.autograd.grad(o, tensors, torch.ones_like(o))
        assert hints == [("fwd", told[most], told[most]), ("bwd", told[most], told[most])]
        eager = call(*tensors, *starts, None)
        for x, y in zip(grads, torch.autograd.grad(eager, tensors, torch.ones_like(o))):
            assert o.equal(eager) and x.equal(y)


@pytest.mark.parametrize("none", [lambda cu: None, lambda cu: cu.diff().max()], ids=["none", "a tensor"])
def test_a_graph_is_told_nothing_of_what_is_no_number(none: Callable) -> None:
    def call(q, k, v, a, b):
        return flash_attn_varlen_func(q, k, v, a, b, none(a), none(b), causal=True)

    tensors, starts = packed()
    torch.compile(call, fullgraph=True, backend="eager")(*tensors, *starts)
    assert hints == [("fwd", 0, 0)]


def test_a_number_that_only_data_have_is_no_guard() -> None:
    call = lambda q, k, v, a, b: flash_attn_varlen_func(q, k, v, a, b, a.diff().max().item(), None)
    tensors, starts = packed()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        torch.compile(call, fullgraph=True, backend="eager")(*tensors, *starts)
    assert hints == [("fwd", 0, 0)]


def test_compiled_gradients_are_the_eager_ones() -> None:
    def step(q, k, v, sinks, cu_q, cu_k):
        options = {"window_size": (6, 0), "softcap": 4.0, "learnable_sink": sinks, "return_lse": True}
        o, lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, **options)
        return o.float().square().sum() + lse.sin().sum()

    tensors, starts = packed(grad=True)
    leaves = [*tensors, sink(True)]
    eager = torch.autograd.grad(step(*leaves, *starts), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for x, y in zip(torch.autograd.grad(compiled(*leaves, *starts), leaves), eager):
        assert x.equal(y)


def test_autocast() -> None:
    q, k, v = (x.float() for x in dense())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = attention(q, k, v, window_size=(4, 4), learnable_sink=sink())
    assert o.dtype == torch.bfloat16


def test_flops_are_those_of_the_pairs_that_are_seen() -> None:
    (q, k, v), (cu_q, cu_k) = packed(grad=True)
    with FlopCounterMode(display=False) as counter:
        flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=True).sum().backward()
    alone = [Problem(1, HEADS, KV_HEADS, *x, HEAD_DIM, True).flops for x in LENGTHS]
    assert counter.get_total_flops() == int(sum(alone)) + int(2.5 * sum(alone))
    q, k, v = dense()
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, window_size=(2, 1))
    assert (
        counter.get_total_flops() == Problem(2, HEADS, KV_HEADS, 9, 13, HEAD_DIM, False, window=(2, 1)).flops
    )


def test_second_derivatives_and_tangents_are_refused_by_name() -> None:
    q, k, v = dense(grad=True)
    (grad,) = torch.autograd.grad(attention(q, k, v, softcap=9.0).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="hopper_attention has no second derivatives"):
        grad.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="hopper_attention has no forward-mode derivatives"):
            attention(dual, k, v, softcap=9.0)


# ---- what reaches which operator --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window_size": (-1, 0)}, {"causal": True}),
        ({"window_size": (-1, 5), "causal": True}, {"causal": True}),
        ({"window_size": (None, None), "causal": True}, {"causal": True}),
    ],
)
def test_a_window_that_is_a_causal_mask_or_none_takes_the_plain_kernel(
    options: dict, expected: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(ops, "call_forward", lambda *x: seen.append(x[3:]) or (x[0], x[0]))
    attention(*dense(), **options)
    assert seen == [(None, expected["causal"], False, False, False)]


def test_a_causal_window_ends_at_the_query() -> None:
    q, k, v = dense()
    windows = {"window_size": (3, 7), "causal": True}, {"window_size": (3, 0)}, {"window_size": [3, 0]}
    first, *others = (attention(q, k, v, **window) for window in windows)
    assert all(x.equal(first) for x in others)


# ---- pages ------------------------------------------------------------------------------------------------

PAGE = 4  # keys


def in_pages(seed: int = 7) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """`packed`, keys and values as shuffled pages, what holds no key NaN, and the table: pages beyond a
    sequence's keys have numbers that there are not."""
    (q, k, v), starts = packed()
    keys = [n for _, n in LENGTHS]
    longest, count = max(-(-n // PAGE) for n in keys), sum(-(-n // PAGE) for n in keys)
    order = iter(torch.randperm(count + 1, generator=torch.Generator().manual_seed(seed)).tolist())
    table = torch.full((len(keys), longest), -1, dtype=torch.int32)
    pages = [torch.full((count + 1, PAGE, *x.shape[1:]), math.nan, dtype=x.dtype) for x in (k, v)]
    for i, n in enumerate(keys):
        for j in range(-(-n // PAGE)):
            table[i, j] = page = next(order)
            begin, rows = starts[1][i] + j * PAGE, min(PAGE, n - j * PAGE)
            for x, of in zip((k, v), pages):
                of[page, :rows] = x[begin : begin + rows]
    return [q, *pages], starts, table


@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (5, 0)}, {"softcap": 3.0}])
def test_pages_are_packed_rows(options: dict, name: str) -> None:
    tensors, starts = packed()
    expected = flash_attn_varlen_func(*tensors, *starts, return_lse=True, **options)
    paged, starts, table = in_pages()
    found = flash_attn_varlen_func(*paged, *starts, return_lse=True, **options, **{name: table})
    assert all(x.equal(y) for x, y in zip(found, expected))
    used = starts[1].diff()  # as who keeps a cache knows them; what cu_seqlens_k says does not count then
    found = flash_attn_varlen_func(
        *paged, starts[0], starts[1] * 0, seqused_k=used, return_lse=True, **options, **{name: table}
    )
    assert all(x.equal(y) for x, y in zip(found, expected))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: {"block_table": x.long()}, TypeError, "block_table must be int32, not int64"),
        (lambda x: {"block_table": x[:2]}, ValueError, "block_table must be (5, pages) on cpu, not (2, 5)"),
        (lambda x: {"block_table": x[0]}, ValueError, "block_table must be (5, pages) on cpu, not (5,)"),
        (lambda x: {"block_table": x, "page_table": x}, ValueError, "two names of one argument"),
        (lambda x: {"block_table": 3}, TypeError, "block_table must be a torch.Tensor, not int"),
    ],
)
def test_wrong_pages_are_refused(change, error: type, message: str) -> None:
    tensors, starts, table = in_pages()
    with pytest.raises(error) as raised:
        flash_attn_varlen_func(*tensors, *starts, **change(table))
    assert message in str(raised.value)


def test_rows_beside_a_table_are_refused() -> None:
    (q, k, v), starts, table = in_pages()
    for tensors, message in (
        ((q, k[0], v), "k must have 4 dimensions (page, page_size, heads, head_dim) beside a block_table"),
        ((q, k, v[:-1]), "must agree in pages, page_size and heads"),
        ((q, k[:0], v[:0]), "k and v have no page, but block_table names some"),
    ):
        with pytest.raises(ValueError) as raised:
            flash_attn_varlen_func(*tensors, *starts, block_table=table)
        assert message in str(raised.value)


# ---- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"qv": torch.zeros(1)}, NotImplementedError, "does not take qv = 'a tensor'"),
        ({"dropout_p": 0.5}, NotImplementedError, "does not take dropout_p = 0.5"),
        ({"num_splits": 3}, NotImplementedError, "does not take num_splits = 3"),
        ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "does not take alibi_slopes = 'a tensor'"),
        ({"k_descale": torch.ones(1)}, NotImplementedError, "does not take k_descale = 'a tensor'"),
        ({"max_seqlen": 3}, TypeError, "unexpected keyword argument 'max_seqlen'"),
        ({"window_size": 4}, TypeError, "window_size must be (left, right), not 4"),
        (
            {"window_size": (4.0, 1)},
            TypeError,
            "window_size must be two integers (left, right), not (4.0, 1)",
        ),
        ({"window_size": (-7, 1)}, ValueError, "window_size must be from −1, no bound, on, not (-7, 1)"),
        ({"learnable_sink": 3.0}, TypeError, "learnable_sink must be a torch.Tensor, not float"),
        ({"learnable_sink": torch.zeros(4).double()}, TypeError, "learnable_sink must be float32, bfloat16"),
    ],
)
def test_wrong_arguments_of_the_call(options: dict, error: type, message: str) -> None:
    tensors, starts = packed()
    with pytest.raises(error) as raised:
        flash_attn_varlen_func(*tensors, *starts, **options)
    assert message in str(raised.value)


def test_everything_else_is_by_name_only() -> None:
    tensors, starts = packed()
    with pytest.raises(TypeError, match="positional"):
        flash_attn_varlen_func(*tensors, *starts, 20, 20, 0.0)


OTHERS = {
    "cu_seqlens_q": cu([9, 5]),
    "cu_seqlens_k": torch.zeros(6, dtype=torch.int64),
    "seqused_q": torch.zeros(4, dtype=torch.int32),
    "seqused_k": torch.zeros(5, dtype=torch.float32),
}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"cu_seqlens_q": cu([9, 5])},
            ValueError,
            "cu_seqlens_k must have 3 elements, as cu_seqlens_q has 3",
        ),
        ({"cu_seqlens_k": cu([9]).long()}, TypeError, "cu_seqlens_k must be int32, not int64"),
        ({"cu_seqlens_q": torch.zeros(0).int()}, ValueError, "cu_seqlens_q must have an element for each"),
        ({"cu_seqlens_q": torch.zeros(6, 1).int()}, ValueError, "cu_seqlens_q must have one dimension"),
        ({"cu_seqlens_q": cu([1] * 11)[::2]}, ValueError, "cu_seqlens_q must be contiguous in its last"),
        ({"seqused_q": torch.zeros(4).int()}, ValueError, "seqused_q must have 5 elements"),
        ({"seqused_k": torch.zeros(5)}, TypeError, "seqused_k must be int32, not float32"),
        ({"sink": torch.zeros(3)}, ValueError, "learnable_sink must be (heads,) = (4,) on cpu, not (3,)"),
        ({"sink": torch.zeros(4).half()}, TypeError, "learnable_sink must be float32, not float16"),
        ({"softcap": -1.0}, ValueError, "softcap must be positive and finite, or 0 for none, not -1.0"),
        ({"softcap": math.inf}, ValueError, "softcap must be positive and finite, or 0 for none, not inf"),
        ({"softmax_scale": -2.0}, ValueError, "softmax_scale must be positive and finite, not -2.0"),
        ({"window_left": 3, "causal": True}, ValueError, "a causal window is (left, 0)"),
        ({}, ValueError, "q, k and v must be on a CUDA device, not cpu"),
    ],
    ids=lambda x: str(x)[:40],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_inputs_of_the_operator(
    wrong: dict, error: type, message: str, compiled: bool, monkeypatch
) -> None:
    """The same refusals from a compiled graph: the operator itself makes them."""
    monkeypatch.setattr(ops_policies, "run_forward", CHECKED)
    library = torch.library.Library("hopper_attention", "IMPL")
    library.impl("attend", CHECKED, "CPU", allow_override=True)
    tensors, (cu_q, cu_k) = packed()
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k} | wrong
    call = lambda: ops_policies.forward(*tensors, **given)
    try:
        if compiled:
            call = torch.compile(call, backend="eager", fullgraph=True)
        with pytest.raises(error) as raised:
            call()
    finally:
        library._destroy()
    assert message in str(raised.value)


def test_packed_tensors_of_another_rank_are_refused() -> None:
    (q, k, v), (cu_q, cu_k) = packed()
    with pytest.raises(ValueError, match="q of packed sequences must have 3 dimensions"):
        CHECKED(q[None], k, v, None, cu_q, cu_k)
    with pytest.raises(TypeError, match=r"cu_seqlens_k must be a torch\.Tensor, not NoneType"):
        CHECKED(q, k, v, None, cu_q)


def test_a_window_that_follows_the_length_is_one_graph() -> None:
    counter = torch._dynamo.testing.CompileCounter()
    half = lambda q, k, v: attention(q, k, v, window_size=(k.shape[2] // 2, 0))
    compiled = torch.compile(half, backend=counter, fullgraph=True)
    for n in range(20, 40, 3):
        x = random(2, HEADS, n, HEAD_DIM)
        assert compiled(x, x, x).equal(half(x, x, x))
    assert counter.frame_count <= 2
