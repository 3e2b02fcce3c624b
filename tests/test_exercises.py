"""What notes/exercises.md marks as verified: each change is made, and its effect is as told."""

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from untraced import kernels

from harness import edits, machine_code, models
from harness.draw import timelines
from harness.results import Results, repository
from hopper_attention.integrations import zigzag
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.fp8 import TOKEN_ORDER


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., ModuleType]:
    """A kernel file of a copy of kernels/ with edits (file, old, new); what it has no more of is to be told
    notes/exercises.md."""
    return functools.partial(edits.edited, folder=tmp_path)


def opcodes(module: ModuleType, head_dim: int, causal: bool = False, direction: str = "fwd") -> list[str]:
    """The main loop of a file's longest kernel, without what a vote skips."""
    problem = Problem.square(1, 1, 512, head_dim, causal, direction=direction)
    code = max(compiled(module, problem), key=lambda code: len(code.instructions))
    return [instruction.opcode for instruction in code.usual(machine_code.main_loop(code))]


def compiled(module: ModuleType, problem: Problem) -> list[machine_code.KernelCode]:
    return machine_code.disassemble(machine_code.cubin_of(module.compile_kernel(problem)))


def behind_the_last_wait(loop: list[str]) -> int:
    waits = [at for at, opcode in enumerate(loop) if opcode.startswith("WARPGROUP.DEPBAR")]
    return sum(opcode.startswith("MUFU.EX2") for opcode in loop[waits[-1] :])


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(O, LSE) in float64."""
    s = q @ k.T / math.sqrt(q.shape[1])
    m = s.max(1, keepdims=True)
    p = np.exp(s - m)
    return p @ v / p.sum(1, keepdims=True), (m + np.log(p.sum(1, keepdims=True)))[:, 0]


@pytest.fixture
def qkv() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((n, 64)) for n in (32, 256, 256)]


# The mathematics


def test_without_the_maximum_large_scores_overflow() -> None:
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(np.float32(89.0)))
    assert np.isfinite(np.exp(np.float32(88.7)))


def test_the_inverse_of_algorithm_1_is_nan_at_once() -> None:
    with np.errstate(divide="ignore", invalid="ignore"):
        assert np.isnan(np.float32(0.0) / np.exp(np.float32(-np.inf)))


def test_the_plain_mean_of_two_halves(qkv: list[np.ndarray]) -> None:
    q, k, v = qkv
    halves = [attention(q, k[at], v[at]) for at in (slice(0, 128), slice(128, 256))]
    mean = (halves[0][0] + halves[1][0]) / 2
    assert np.abs(mean - attention(q, k, v)[0]).max() > 0.01
    same = [attention(q, k[:128], v[at]) for at in (slice(0, 128), slice(128, 256))]
    exact = attention(q, np.concatenate([k[:128]] * 2), v)[0]
    assert np.allclose((same[0][0] + same[1][0]) / 2, exact)


# k1, fa1, k2


@pytest.mark.parametrize(("queries", "keys", "lines"), [(2, 16, 18), (16, 2, 18), (1, 32, 33), (8, 4, 12)])
def test_lines_that_a_warp_of_k1_touches(queries: int, keys: int, lines: int) -> None:
    assert queries * keys == 32
    row = 128 * 2  # bytes of head_dim 128: every row is in lines of its own
    touched = {("q", i * row // 128) for i in range(queries)} | {("k", j * row // 128) for j in range(keys)}
    assert len(touched) == lines


def test_turns_of_a_read_of_eight_rows() -> None:
    swizzle = kernels("device.cuda_cores").swizzle
    for where, turns in ((lambda row, chunk: chunk, 8), (swizzle, 1)):
        for chunk in range(8):
            places = [where(row, chunk) for row in range(8)]
            assert max(places.count(place) for place in places) == turns


def test_plain_widening_lengthens_k2(edited: Callable[..., ModuleType]) -> None:
    plain = (
        "    words = x.bitcast(Int32)\n",
        "    words = x.bitcast(Int32)\n"
        "    plain = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)\n"
        "    plain.store(x.to(Float32))\n",
    )
    file = "device/cuda_cores.py"
    module = edited("k2", (file, *plain), (file, "    return wide", "    return plain"))
    assert len(opcodes(module, 128)) == 1568


# k3


def test_one_bit_does_not_tell_three_rounds_apart() -> None:
    """A consumer that skips a stage waits for its next place there by the parity of that round alone."""
    completed = 1  # rounds whose load of a stage has come: the phase is 1
    passes = lambda round_: completed % 2 != round_ % 2  # what try_wait.parity answers
    assert passes(0)  # it has come
    assert not passes(1)  # it has not: the consumer waits, as it should
    assert passes(2)  # nor has this, but the bit says so


# k4


def test_a_mask_of_branches_is_hundreds_of_selects(edited: Callable[..., ModuleType]) -> None:
    value = "S[r, c] = S[r, c] if first_S[0, c][1] <= visible else -Float32.inf"
    branch = f"if first_S[0, c][1] > visible:\n{' ' * 28}S[r, c] = -Float32.inf"
    loop = opcodes(edited("k4", ("k4.py", value, branch)), 128, causal=True)
    assert sum("SEL" in opcode for opcode in loop) == 477


@pytest.mark.parametrize(("head_dim", "agree"), [(64, True), (128, False)])
def test_a_fresh_layout_of_v(head_dim: int, agree: bool) -> None:
    """Blocks of 8 keys × 64 columns: as the TMA wrote them, keys first, and in tile_to_shape's order."""
    keys, columns = 64 // 8, head_dim // 64
    written = {(key, column): key + keys * column for key in range(keys) for column in range(columns)}
    afresh = {(key, column): column + columns * key for key in range(keys) for column in range(columns)}
    assert (written == afresh) == agree


# k5, k6_1: the simulation that the timelines are drawn from


def share(programs: list) -> float:
    until = timelines.WARM_UP + timelines.COUNTED
    return timelines.simulate(programs, until).behind_warm_up().tensor_share


def test_consumers_that_begin_apart_stay_apart() -> None:
    together, (first, second) = share(timelines.programs_of("k5")), timelines.programs_of("k5")
    late = itertools.chain([("work", "late", 1024)], second)
    assert share([first, late]) > 1.2 * together


def test_without_a_first_turn_nobody_begins() -> None:
    first, second = timelines.programs_of("k6_1")
    assert next(first) == ("turn",)
    assert share([itertools.chain([("turn",), ("turn",)], first), second]) == 0


# k6_2


def test_a_vote_keeps_the_exponentials_before_the_wait(edited: Callable[..., ModuleType]) -> None:
    wait = "                rescale = self.softmax(S, row_max, row_sum)\n\n"
    vote = (
        f"{wait.rstrip()}\n                if cute.arch.vote_any_sync(row_sum[0] + row_sum[1] < -1.0):\n"
        f"                    cute.arch.sync_warp()\n"
    )
    loop = opcodes(edited("k6_2", ("k6_2.py", wait, vote)), 128)
    assert (behind_the_last_wait(loop), len(loop)) == (0, 547)


def test_an_ordinary_conversion_spills(edited: Callable[..., ModuleType]) -> None:
    plain = (
        "cute.make_tensor(cute.recast_ptr(rP.iterator, None, BFloat16), rS.layout)"
        ".store(rS.load().to(BFloat16))\n"
    )
    module = edited("k6_2", ("k6_2.py", "round_fragment(rS, rP, BFloat16)\n", plain))
    (code,) = compiled(module, Problem.square(1, 1, 512, 64, False))
    assert code.count("LDL|STL") == 207


# k6


def test_two_stages_are_refused(edited: Callable[..., ModuleType]) -> None:
    four = "128: Config(consumers=3, tile_kv=64, stages=4"
    module = edited("k6", ("device/forward_shapes.py", four, four.replace("stages=4", "stages=2")))
    with pytest.raises(AssertionError):
        module.kernel_for(Problem.square(1, 1, 512, 128, False))


# k7, k8, decode


def test_tokens_in_their_natural_order(qkv: list[np.ndarray]) -> None:
    q, k, v = qkv
    order = np.concatenate([16 * block + np.array(TOKEN_ORDER) for block in range(len(k) // 16)])
    exact, _ = attention(3 * q, k, v)
    # P's k-th weight meets the k-th row of V, which should have been token order[k]
    wrong, _ = attention(3 * q, k[order], v)
    error = np.sqrt(((wrong - exact) ** 2).mean() / (exact**2).mean())
    assert 1.2 < error < 1.4
    assert np.allclose(attention(0 * q, k[order], v)[0], attention(0 * q, k, v)[0])


def test_rotating_q_alone(qkv: list[np.ndarray]) -> None:
    q, k, v = qkv
    rotation, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((64, 64)))
    exact = attention(q, k, v)[0]
    assert np.allclose(attention(q @ rotation, k @ rotation, v)[0], exact)
    wrong = attention(q @ rotation, k, v)[0]
    assert np.sqrt(((wrong - exact) ** 2).mean() / (exact**2).mean()) > 0.5


def test_pieces_weighed_by_their_keys(qkv: list[np.ndarray]) -> None:
    q, k, v = qkv
    cut = 64
    for scaled, right in ((q, False), (0 * q, True)):
        (o_a, _), (o_b, _) = attention(scaled, k[:cut], v[:cut]), attention(scaled, k[cut:], v[cut:])
        merged = (cut * o_a + (len(k) - cut) * o_b) / len(k)
        assert np.allclose(merged, attention(scaled, k, v)[0]) == right


# Policies, and several GPUs


def test_a_backward_pass_without_the_sink(qkv: list[np.ndarray]) -> None:
    q, k, v = qkv
    scale, sink = 1 / math.sqrt(q.shape[1]), 2.0
    do = np.random.default_rng(2).standard_normal(q.shape)
    plain = attention(q, k, v)[1]
    lse = np.logaddexp(plain, sink)
    o = np.exp(scale * q @ k.T - lse[:, None]) @ v
    right = models.flash_attention_2_backward(q, k, v, o, lse, do)
    loss = lambda k: (
        np.exp(scale * q @ k.T - np.logaddexp(attention(q, k, v)[1], sink)[:, None]) @ v * do
    ).sum()
    step = np.zeros_like(k)
    step[3, 5] = 1e-5
    assert np.isclose((loss(k + step) - loss(k - step)) / 2e-5, right[1][3, 5], rtol=1e-6)
    wrong = models.flash_attention_2_backward(q, k, v, o, plain, do)
    assert not any(np.allclose(x, y, rtol=1e-2) for x, y in zip(right, wrong))


def test_halves_and_zigzag() -> None:
    n = 64
    pairs = np.arange(1, n + 1)  # keys that each query sees
    chunks = pairs.reshape(4, n // 4).sum(1)
    assert chunks[:2].sum() / pairs.sum() == pytest.approx(0.25, abs=0.01)
    held = [chunks[list(zigzag.chunks_of(rank, 2))].sum() for rank in range(2)]
    assert held[0] == held[1]


# The backward pass


def test_ds_before_dv_spoils_dv_alone() -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((64, 16)) for _ in range(4))
    o, lse = attention(q, k, v)
    dq, dk, dv = models.flash_attention_2_backward(q, k, v, o, lse, do)
    matrix = np.exp(q @ k.T / 4 - lse[:, None])  # in global memory: P
    matrix *= do @ v.T - (do * o).sum(1, keepdims=True)  # grad_score: dS in P's place
    assert not np.allclose(matrix.T @ do, dv)  # grad_v, too late
    assert np.allclose(matrix @ k / 4, dq)
    assert np.allclose(matrix.T @ q / 4, dk)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sectors_of_a_red_of_dq(head_dim: int) -> None:
    chunks = head_dim // 8  # a lane has 8 columns of a row; instruction x adds column x of each lane
    lanes = [(lane // chunks, lane % chunks) for lane in range(32)]
    sectors = lambda addresses: len({4 * address // 32 for address in addresses})
    for x in range(8):
        assert sectors([row * head_dim + 8 * chunk + x for row, chunk in lanes]) == 32
        assert sectors([row * head_dim + x * chunks + chunk for row, chunk in lanes]) == 4


def test_without_d_only_dv_is_right() -> None:
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((64, 16)) for _ in range(4))
    scale = 1 / math.sqrt(16)
    o, lse = attention(q, k, v)
    p = np.exp(scale * q @ k.T - lse[:, None])
    dq, dk, dv = models.flash_attention_2_backward(q, k, v, o, lse, do)
    ds = p * (do @ v.T)
    assert np.allclose(p.T @ do, dv)
    assert not np.allclose(scale * ds @ k, dq)
    assert not np.allclose(scale * ds.T @ q, dk)
    ds = ds - p * (do * o).sum(1, keepdims=True)
    assert np.allclose(scale * ds @ k, dq)
    assert np.allclose(scale * ds.T @ q, dk)


def test_turns_order_products_and_not_data() -> None:
    """Rows of a kernel without turns passed their check; how much slower they are is told in a range, and of
    heads of 64."""
    measured = Results.load(repository() / "results" / "h200" / "ablations" / "bwd4.json")
    rate = lambda label, problem: measured.find(label, problem).tflops
    problems = {row.problem for row in measured.rows if row.provider == "no turns" and row.seqlen_q == 4096}
    losses = {x: 1 - rate("no turns", x) / rate(edits.WHOLE, x) for x in problems}
    assert len(losses) == 4
    assert (round(100 * min(losses.values())), round(100 * max(losses.values()))) == (9, 12)
    (of_64,) = (loss for x, loss in losses.items() if x.head_dim == 64 and not x.causal)
    assert round(100 * of_64) == 12


def test_dv_early_at_head_dim_64_spills_and_serialises(edited: Callable[..., ModuleType]) -> None:
    config = "64: Config(TILE_Q[64], False, True)"
    module = edited("bwd4", ("bwd4_operands.py", config, "64: Config(TILE_Q[64], True, False)"))
    problem = Problem.square(1, 1, 512, 64, False, direction="bwd")
    code = max(compiled(module, problem), key=lambda code: len(code.instructions))
    loop = [instruction.opcode for instruction in code.usual(machine_code.main_loop(code))]
    waits = sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in loop)
    assert (code.frame_bytes, waits) == (48, 96)
