"""Context parallelism on two GPUs: the public call with its gradients, by the pass rule.

By itself: python -m pytest tests/test_context_parallel_on_gpu.py -n 0. Each of several workers would run all
cases, which share two processes.
"""

import datetime
import functools
import itertools
import os
import socket
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import context_reference, judging, reference
from hopper_attention import context_parallel_attention, enabled, production
from hopper_attention.integrations import block_gradients, packed_ring
from hopper_attention.integrations import context_parallel as cp
from hopper_attention.integrations.merging import merge
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

RANKS = 2
TORCHS_OWN = "PyTorch's own"
ENDS_S = 60.0  # in which a process has ended whose group has timed out
CASES = {  # tokens of a GPU, heads, key heads, head_dim, and what differs
    "whole tiles": (256, 4, 2, 128, {}),
    "one batch": (1536, 8, 4, 128, {"batch": 1}),
    "one batch, 64": (1024, 6, 3, 64, {"batch": 1, "causal": False}),
    "odd chunks": (202, 4, 2, 128, {}),
    "odd chunks, one batch": (330, 8, 4, 64, {"batch": 1}),
    "full": (1026, 4, 1, 128, {"causal": False}),
    "communicator": (1024, 4, 4, 128, {"communicator": True, "batch": 1}),
    "one chunk of one token": (2, 2, 1, 128, {}),
    "fp16": (322, 4, 2, 64, {"dtype": torch.float16, "softmax_scale": 0.2, "dlse": True}),
    "fp16, 128": (322, 4, 2, 128, {"dtype": torch.float16, "softmax_scale": 0.2, "dlse": True}),
    "scaled": (322, 4, 2, 128, {"softmax_scale": 0.2}),
    "deterministic": (322, 4, 2, 64, {"deterministic": True}),
    "256": (322, 2, 1, 256, {"causal": False}),
}
PACKED = {  # whole lengths, heads, key heads, head_dim, causal
    "packed": ((1024, 4, 0, 260, 2048), 4, 2, 128, True),
    "packed, full": ((64, 772, 1280), 4, 4, 64, False),
}


def run_case(rank: int, name: str) -> list[str]:
    """What is wrong, on rank 0."""
    tokens, heads, kv_heads, head_dim, options = CASES[name]
    options = {"causal": True, "dtype": torch.bfloat16, "dlse": False} | options
    dtype, wants_dlse, batch = options.pop("dtype"), options.pop("dlse"), options.pop("batch", 2)
    generator = torch.Generator("cuda").manual_seed(5)
    shape = RANKS * tokens, head_dim
    make = lambda h: torch.randn(batch, h, *shape, device="cuda", generator=generator).to(dtype)
    q, k, v, do = make(heads), make(kv_heads), make(kv_heads), make(heads)
    dlse = torch.randn(q.shape[:3], device="cuda", generator=generator) if wants_dlse else None
    mine = lambda x: cp.shard(x, rank, RANKS)
    inputs = [mine(x).requires_grad_() for x in (q, k, v)]
    before = cp.exchange_for
    if options.pop("communicator", False):
        cp.exchange_for = lambda group, k, v: cp.Exchange(group)
    try:
        o, lse = context_parallel_attention(*inputs, return_lse=True, **options)
        outputs = (o, lse) if wants_dlse else (o,)
        torch.autograd.backward(outputs, [mine(x) for x in (do, dlse) if x is not None])
    finally:
        cp.exchange_for = before
    whole = {}
    mine_of = {"o": o, "lse": lse} | {f"d{n}": x.grad for n, x in zip("qkv", inputs)}
    for key, x in mine_of.items():
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
        dist.all_gather(parts, x.detach().contiguous())
        whole[key] = cp.unshard(parts)
    if rank:
        return []
    causal, scale = options["causal"], options.get("softmax_scale")
    name_of = str(dtype).removeprefix("torch.")
    problem = Problem(batch, heads, kv_heads, q.shape[2], q.shape[2], head_dim, causal, name_of)
    x = {"q": q, "k": k, "v": v, "do": do} | whole
    rounded = options.get("deterministic", False) or head_dim not in block_gradients.HEAD_DIMS
    verdicts = context_reference.whole(x, causal, RANKS, *roundings(problem), scale, dlse, rounded)
    return [failure for verdict in verdicts.values() for failure in verdict.failures]


def run_packed(rank: int, name: str) -> list[str]:
    """What is wrong with packed sequences, on rank 0, judged one by one."""
    lengths, heads, kv_heads, head_dim, causal = PACKED[name]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    generator = torch.Generator("cuda").manual_seed(7)
    make = lambda h: torch.randn(sum(lengths), h, head_dim, device="cuda", generator=generator).bfloat16()
    made = {"q": make(heads), "k": make(kv_heads), "v": make(kv_heads), "do": make(heads)}
    mine = {key: packed_ring.shard(x, cu, rank, RANKS) for key, x in made.items()}
    inputs = [mine[x].requires_grad_() for x in "qkv"]
    o, lse = context_parallel_attention(*inputs, causal=causal, return_lse=True, cu_seqlens=cu)
    o.backward(mine["do"])
    found = {"o": o, "lse": lse.T} | {f"d{key}": x.grad for key, x in zip("qkv", inputs)}
    for key, x in found.items():
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
        dist.all_gather(parts, x.detach().contiguous())
        made[key] = torch.empty_like(torch.cat(parts))
        for r, part in enumerate(parts):
            made[key][packed_ring.places(cu, r, RANKS)] = part
    wrong = []
    for begin, end in itertools.pairwise(cu.tolist()):
        if begin == end or rank:
            continue
        x = {key: y[begin:end].transpose(0, 1)[None].contiguous() for key, y in made.items()}
        problem = Problem(1, heads, kv_heads, end - begin, end - begin, head_dim, causal)
        verdicts = context_reference.whole(x, causal, RANKS, *roundings(problem), block_by_block=True)
        wrong += [f"{end - begin}: {y}" for verdict in verdicts.values() for y in verdict.failures]
    return wrong


def roundings(problem: Problem) -> list[reference.Rounding]:
    """Of the forward and of the backward stage."""
    stages = ("k6", problem), ("bwd4", problem.with_(direction="bwd"))
    return [
        reference.rounding_of(*ladder.load(stage), x, **ladder.load(stage)[0].options) for stage, x in stages
    ]


def run_torchs_own(rank: int) -> list[str]:
    """What is wrong with PyTorch's `context_parallel` over these kernels, on rank 0. It adds gradients that
    are rounded block by block."""
    from torch.distributed.tensor.experimental import context_parallel as torchs_own

    generator = torch.Generator("cuda").manual_seed(6)
    made = [torch.randn(1, 4, 1024, 128, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    *buffers, do = (x.clone() for x in made)
    mesh, calls = init_device_mesh("cuda", (RANKS,)), []
    before = production.forward, production.backward
    production.forward = lambda *x: (calls.append("forward"), before[0](*x))[1]
    production.backward = lambda *x: (calls.append("backward"), before[1](*x))[1]
    try:
        parts = torchs_own(mesh, buffers=[*buffers, do], buffer_seq_dims=[2] * 4)
        with enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), parts:
            inputs = [x.detach().clone().requires_grad_() for x in buffers]
            o = F.scaled_dot_product_attention(*inputs, is_causal=True)
            found = o.detach(), *torch.autograd.grad(o, inputs, do.clone())
    finally:
        production.forward, production.backward = before
    whole = {}
    for name, x in zip(("o", "dq", "dk", "dv"), found):
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        whole[name] = cp.unshard(parts)
    if rank:
        return []
    wrong = [] if set(calls) == {"forward", "backward"} else [f"called were {calls}"]
    q, k, v, do = made
    expected = judging.Expected(q, k, v, True, do)
    exact = dict(zip(("o", "dq", "dk", "dv"), (expected.forward[0], *expected.gradients)))
    off = {name: float((whole[name].double() - x).norm() / x.norm()) for name, x in exact.items()}
    return wrong + [f"{name} is off by {x:.1e} of its norm" for name, x in off.items() if x > 2.0**-7]


def free_port() -> str:
    """Nobody's: processes of pytest-xdist may come here at the same time."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def rank_main(rank: int, port: str, names: list[str], found: dict[str, list[str]]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_NVLS_ENABLE": "0"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS, device_id=device)
    for name in names:
        wrong = run_case(rank, name)
        if rank == 0:
            found[name] = wrong
            print(name, wrong or "passes", flush=True)
    others = {TORCHS_OWN: run_torchs_own} | {x: functools.partial(run_packed, name=x) for x in PACKED}
    for name, run in others.items():
        wrong = run(rank)
        if rank == 0:
            found[name] = wrong
            print(name, wrong or "passes", flush=True)
    dist.destroy_process_group()


def dies(rank: int, port: str, when: str, seconds: float) -> None:
    """Rank 1 is gone at its second call; rank 0 must not wait for it longer than the group's timeout."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_NVLS_ENABLE": "0"}
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"  # four times so long before it ends, not 60 s
    device, timeout = torch.device("cuda", rank), datetime.timedelta(seconds=seconds)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS, device_id=device, timeout=timeout)
    if when == "by NCCL":
        cp.exchange_for = lambda group, k, v: cp.Exchange(group)
    q = torch.randn(1, 4, 512, 128, device=device, dtype=torch.bfloat16)
    context_parallel_attention(q, q, q)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(0)
    context_parallel_attention(q, q, q)
    torch.cuda.synchronize()  # which NCCL's watchdog ends, and when it has written why, the process
    time.sleep(2 * ENDS_S)
    os._exit(0)  # there was an answer


@pytest.mark.gpu
@pytest.mark.parametrize("when", ["by copy engines", "by NCCL"])
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_a_rank_that_dies(when: str) -> None:
    context, seconds = torch.multiprocessing.get_context("spawn"), 6.0
    port = free_port()
    ranks = [context.Process(target=dies, args=(rank, port, when, seconds)) for rank in range(RANKS)]
    for x in ranks:
        x.start()
    ranks[1].join()
    ranks[0].join(seconds + ENDS_S)
    ended = ranks[0].exitcode
    ranks[0].kill()
    assert ranks[1].exitcode == 0 and ended not in (None, 0)


@pytest.fixture(scope="module")
def found() -> Callable[[], dict[str, list[str]]]:
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(rank_main, (free_port(), list(CASES), results), nprocs=RANKS)
        return dict(results)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *PACKED, TORCHS_OWN])
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_numbers(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("wide_in", [False, True])
@pytest.mark.parametrize("wide_out", [False, True])
def test_merge(head_dim: int, wide_in: bool, wide_out: bool) -> None:
    """Against the formula in float64; rows that one side, or neither, sees; what lies around stays."""
    torch.manual_seed(0)
    for rows in (1, 63, 64, 65, 1000):
        of = lambda wide: torch.float32 if wide else torch.bfloat16
        make = lambda dtype: torch.randn(2, rows, 3, head_dim, device="cuda").to(dtype).transpose(1, 2)
        o, other = make(of(wide_in)), make(torch.bfloat16)
        around = 3 * torch.randn(2, 3, 2 * rows, device="cuda")
        lse, other_lse = around[:, :, rows:], 3 * torch.randn(2, 3, rows, device="cuda")
        lse[0, :2, 0] = other_lse[0, 0, 0] = -torch.inf
        kept = around[:, :, :rows].clone()
        exact = torch.logaddexp(lse.double(), other_lse.double())
        weigh = lambda x: (x.double() - exact.nan_to_num(neginf=0.0)).exp()[..., None]
        ref = o.double() * weigh(lse) + other.double() * weigh(other_lse)
        out = o if wide_in == wide_out else torch.full_like(o, torch.nan, dtype=of(wide_out))
        merge(o, lse, other, other_lse, out)
        assert ((out.double() - ref).abs() <= (1e-5 if wide_out else 2.0**-8) * (1 + ref.abs())).all()
        seen = exact.isfinite()
        assert torch.equal(lse.isfinite(), seen) and (lse - exact)[seen].abs().max() < 1e-5
        assert torch.equal(around[:, :, :rows], kept)
