"""Q, K and V in 8 bits: the reference, the kernels' own arithmetic of places, their machine code."""

import math
from unittest import mock

import pytest
import torch
from of_codes import values_of
from untraced import kernels

from harness import machine_code
from harness.inputs import as_read, random_inputs
from harness.quantized import (
    codes,
    hadamard,
    held,
    operands,
    power_of_two,
    quantize_reference,
    rotated,
    transposed,
)
from hopper_attention.kernels import quantize
from hopper_attention.kernels.contract import DTYPES, Problem
from hopper_attention.kernels.device.fp8 import (
    BLOCK,
    E4M3_MAX,
    EXPONENT_MAX,
    EXPONENT_MIN,
    LARGEST_V,
    ONES_ROWS,
    OWN_ROTATED,
    SMALLEST_MAXIMUM,
    TOKEN_ORDER,
    TOKENS,
    quantized_shapes,
)

untraced, untraced_ahead = kernels("quantize_rows"), kernels("quantize_ahead")
columns_to_rows, transform = kernels("device.columns_to_rows"), kernels("device.hadamard")
HEAD_DIMS = (64, 128, 256)
LENGTHS = (1, 3, 15, 16, 63, 64, 65, 203)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def inputs(seqlen_q: int, seqlen_kv: int, head_dim: int = 64, dtype=torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q)
    shapes = (2, 2, seqlen_q, head_dim), *[(2, 1, seqlen_kv, head_dim)] * 2
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def random_signs(head_dim: int) -> torch.Tensor:
    return torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(0)).float() * 2 - 1


# The order of tokens


def test_p_in_its_registers_is_operand_a_of_transposed_v() -> None:
    """Fragments as the PTX ISA has them: D of wgmma.m64nN, A of wgmma.m64nNk32 in 8 bits; one warp's rows."""
    p, v = torch.randint(-8, 9, (16, 32)).float(), torch.randint(-8, 9, (32, 64)).float()
    a = torch.zeros(16, 32)
    for lane in range(32):
        row, t = lane // 4, lane % 4
        # Registers of the accumulator: of each 8 columns two of this row, then two of the row 8 below.
        registers = [
            p[row + 8 * half, 8 * group + 2 * t + pair]
            for group in range(4) for half in range(2) for pair in range(2)
        ]  # fmt: skip
        # Operand A: of each 16 of K four bytes of this row, then of the row 8 below. Byte b of them is the
        # register that was converted to it: the pair of one group of 8, then that of the next.
        for k16 in range(2):
            for half in range(2):
                for b in range(4):
                    register = registers[8 * k16 + 4 * (b // 2) + 2 * half + b % 2]
                    a[row + 8 * half, 16 * k16 + 4 * t + b] = register
    vt8 = transposed(codes(v)[None, None], codes(torch.ones(1, 1, 32)))[0, 0].float()
    assert torch.equal(a @ vt8[:64].T, p @ v)
    assert torch.equal((a @ vt8[64:].T), p.sum(1, keepdim=True).expand(16, ONES_ROWS))


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_each_token_is_in_its_place_and_padding_is_zero(seqlen: int) -> None:
    q, k, v = inputs(seqlen, seqlen)
    found = quantize_reference(q, k, v)
    vt8, padded = found.vt8.float(), found.vt8.shape[-1]
    assert padded % 16 == 0 and 0 <= padded - seqlen < 16
    v8 = v.float() * 2.0 ** -found.v_exponent.repeat_interleave(BLOCK, -1)[..., :seqlen, None]
    for place in range(padded):
        token = place // TOKENS * TOKENS + TOKEN_ORDER[place % TOKENS]
        if token < seqlen:
            assert torch.equal(vt8[..., :64, place], codes(v8[:, :, token]).float())
            weight = 2.0 ** -found.v_exponent[..., token // BLOCK]
            assert torch.equal(vt8[..., 64:, place], weight[..., None].expand(2, 1, ONES_ROWS))
        else:
            assert not vt8[..., place].any()


# Scales


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("rotate", [False, True])
def test_scales_are_those_of_blocks(seqlen: int, rotate: bool) -> None:
    q, k, v = inputs(seqlen, 64)
    signs = random_signs(64)
    found = quantize_reference(q, k, v, rotate, signs)
    exact = (q.double() * signs) @ hadamard(torch.eye(64)).double() / 8 if rotate else q.double()
    for block in range(math.ceil(seqlen / BLOCK)):
        largest = exact[:, :, BLOCK * block : BLOCK * (block + 1)].abs().amax((-1, -2))
        torch.testing.assert_close(found.q_scale[..., block].double(), largest / E4M3_MAX, rtol=1e-6, atol=0)
    error = (found.dequantized[0] - exact).abs()
    steps = found.q_scale.repeat_interleave(BLOCK, -1)[..., :seqlen, None]
    assert (error <= 1.0001 * torch.maximum(exact.abs() / 16, steps * 2.0**-10)).all(), "half a step"


def test_shapes_are_the_references() -> None:
    q, k, v = inputs(65, 203, 128)
    problem = Problem(2, 2, 1, 65, 203, 128, causal=False)
    outputs = quantize_reference(q, k, v).outputs
    assert {n: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for n, x in outputs.items()} == (
        quantized_shapes(problem)
    )
    assert set(quantized_shapes(problem, given_scales=True)) == {"q8", "k8", "vt8"}


@every_head_dim
def test_rotation_leaves_the_scores(head_dim: int) -> None:
    q, k, _ = (x.double() for x in inputs(65, 65, head_dim))
    turned = [rotated(x, random_signs(head_dim)) for x in (q, k)]
    torch.testing.assert_close(turned[0] @ turned[1].mT, q @ k.mT)


@pytest.mark.parametrize("largest", [1e-30, 0.1, 1.75, 1.7578125, 448.0, 450.0, LARGEST_V])
def test_exponent_of_v_is_the_least_that_holds_it(largest: float) -> None:
    q, k, v = inputs(64, 64)
    v = (v / v.abs().max() * largest).to(torch.bfloat16)
    found = quantize_reference(q, k, v)
    largest = v[1].abs().max().item()
    exponent = found.v_exponent[1, 0, 0].item()
    assert largest <= E4M3_MAX * 2.0**exponent
    assert exponent == EXPONENT_MIN or largest > E4M3_MAX * 2.0 ** (exponent - 1)
    bits = torch.tensor(largest).view(torch.int32).item()  # as the kernel finds it
    assert exponent == max(EXPONENT_MIN, min(EXPONENT_MAX, ((bits + 0x1FFFFF) >> 23) - 135))


def test_blocks_of_zeros_have_scale_one() -> None:
    q, k, v = inputs(128, 128)
    for x in (q, k, v):
        x[:, :, :BLOCK] = 0
    found = quantize_reference(q, k, v)
    assert (found.q_scale[..., 0] == 1).all() and (found.k_scale[..., 0] == 1).all()
    assert (found.v_exponent[..., 0] == EXPONENT_MIN).all()
    assert not any(x[:, :, :BLOCK].any() for x in found.dequantized)


def test_a_tiny_block_has_a_normal_scale() -> None:
    q, k, v = inputs(64, 64)
    found = quantize_reference(q * 1e-38, k, v)
    assert (found.q_scale == torch.tensor(SMALLEST_MAXIMUM) * (1 / E4M3_MAX)).all()
    assert found.dequantized[0].isfinite().all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rotate", [False, True])
def test_what_is_not_finite_is_nan_and_changes_no_other_row(value: float, rotate: bool) -> None:
    q, k, v = inputs(65, 65)
    clean = quantize_reference(q, k, v, rotate, random_signs(64))
    for x in (q, k, v):
        x[0, 0, 5, 7] = value
        x[0, 0, 6] = 0
    without = quantize_reference(*[x.nan_to_num(0.0, 0.0, 0.0) for x in (q, k, v)], rotate, random_signs(64))
    found = quantize_reference(q, k, v, rotate, random_signs(64))
    q8 = found.q8.view(torch.uint8)
    row = q8[0, 0, 5] == 0x7F
    assert row.all() if rotate else row[7] and row.sum() == 1
    assert found.vt8.view(torch.uint8)[0, 0, 7, TOKEN_ORDER.index(5)] == 0x7F
    assert found.q_scale.isfinite().all() and found.v_exponent.isfinite().all()
    others = [r for r in range(65) if r != 5]
    if not rotate:
        assert torch.equal(q8[:, :, others], without.q8.view(torch.uint8)[:, :, others])
    assert torch.equal(q8[1], clean.q8.view(torch.uint8)[1]), "another batch"


def test_v_that_no_exponent_reaches_is_nan() -> None:
    q, k, v = inputs(64, 64)
    v[0, 0, 0, 0] = 2 * LARGEST_V
    found = quantize_reference(q, k, v)
    assert found.vt8[0, 0, 0, 0].isnan() and found.vt8.float().isnan().sum() == 1


def test_given_scales_saturate() -> None:
    q, k, v = inputs(64, 64)
    scales = [torch.full(x.shape[:2], 1 / 448) for x in (q, k, v)]
    q[0, 0, 0, 0], q[0, 0, 0, 1], q[0, 0, 0, 2] = math.inf, 100.0, -100.0
    found = quantize_reference(q, k, v, given_scales=scales)
    assert found.q8[0, 0, 0, 0].isnan()
    assert found.q8[0, 0, 0, 1:3].float().tolist() == [E4M3_MAX, -E4M3_MAX]
    assert (found.vt8[..., 64:, :].float() == 1).all() and found.q_scale is None


# What k7 is given


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([], 1.0),
        ([0.0, -0.0], 1.0),
        ([math.nan], 1.0),
        ([math.inf, -math.inf, 1.0], 1.0),
        ([448.0, math.nan], 1.0),
        ([450.0, math.inf], 2.0),
        ([-896.0], 2.0),
        ([-900.0], 4.0),
        ([1e-5], 1.0),
    ],
)
def test_a_power_of_two_holds_what_is_finite(values: list[float], scale: float) -> None:
    assert power_of_two(torch.tensor(values)) == scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 1e4])
def test_what_is_held_stays(size: float, dtype: torch.dtype) -> None:
    x = (torch.randn(2, 3, 65, 64) * size).to(dtype)
    once = held(x)
    assert once.dtype == dtype and torch.equal(held(once), once)
    assert ((once - x).float().abs() <= x.float().abs() / 16 + power_of_two(x) * 2.0**-10).all()


def test_every_code_is_held() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert every.isnan().sum() == 2
    torch.testing.assert_close(held(every), every, rtol=0, atol=0, equal_nan=True)
    assert power_of_two(every * 8) == 8.0
    torch.testing.assert_close(held(every * 8), every * 8, rtol=0, atol=0, equal_nan=True)


def storage_around(x8: torch.Tensor) -> torch.Tensor:
    """Everything in the memory that x8 is in, as bytes."""
    return torch.tensor(x8.untyped_storage().tolist(), dtype=torch.uint8)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (3, 16), (65, 17), (64, 203)])
@pytest.mark.parametrize("size", [1.0, 2000.0])
def test_operands_are_what_was_held(size: float, seqlen_q: int, seqlen_kv: int) -> None:
    q, k, v = (held(x * s) for x, s in zip(inputs(seqlen_q, seqlen_kv), (1.0, size, 4 * size)))
    q8, k8, vt8, scales = operands(q, k, v)
    for x8, x, scale in zip((q8, k8, values_of(vt8, seqlen_kv)), (q, k, v), scales, strict=True):
        assert torch.equal(x8.float() * scale[..., None], x.float())
    assert [tuple(scale.shape) for scale in scales] == [(2, 1, 1)] * 3
    assert [scale[0].item() for scale in scales] == [power_of_two(x) for x in (q, k, v)]
    ones = vt8[:, :, -ONES_ROWS:].float()
    real = torch.tensor(TOKEN_ORDER).repeat(ones.shape[-1] // TOKENS)
    real += torch.arange(ones.shape[-1]) // TOKENS * TOKENS
    assert torch.equal(ones, (real < seqlen_kv).float().expand_as(ones))
    # Nothing but NaN around them, which a load past the end would bring in.
    for x8, dim in ((q8, 2), (k8, 2), (vt8, 3)):
        bytes_of = x8.contiguous().view(torch.uint8)
        assert not (bytes_of & 0x7F == 0x7F).any()
        around = storage_around(x8)
        outside = around.numel() - bytes_of.numel()
        assert outside == 128 * bytes_of.numel() // x8.shape[dim]
        assert (around == 0x7F).sum() == outside
        assert all(stride % 16 == 0 for stride in x8.stride()[:-1]), "as the TMA asks"


def test_operands_keep_a_layout_that_is_given() -> None:
    q, k, v = (held(x).transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(65, 33))
    q8, _, vt8, _ = operands(q, k, v)
    assert q8.stride() == q.stride()
    assert torch.equal(q8.float(), q.float()) and torch.equal(values_of(vt8, 33), v.float())


def test_inputs_of_other_directions_are_left_alone() -> None:
    x = torch.randn(3)
    assert as_read("fwd", x)[0] is x and as_read("bwd", x)[0] is x
    problem = Problem.square(1, 2, 65, 64, True)
    for plain, of_codes in zip(
        random_inputs(problem, "cpu"), random_inputs(problem.with_(direction="fp8"), "cpu"), strict=True
    ):
        assert torch.equal(held(plain), of_codes) and not torch.equal(plain, of_codes)


# The kernels' places


def transpose_by_kernel(head_dim: int, columns: int) -> torch.Tensor:
    """Number 1000·token + column of each place in Vt8's first 64 tokens, as the kernel's threads move them;
    on the way, that none of their accesses to shared memory meet in a bank."""
    threads = BLOCK * head_dim // (4 * columns)
    shared = torch.full((head_dim * 4, 4, 4), -1)  # unit, word, token
    steps = [[] for _ in range(columns)]
    for thread in range(threads):
        with mock.patch.object(untraced.cute.arch, "thread_idx", lambda: (thread, 0, 0)):
            group, word, chunk = columns_to_rows.own_words(head_dim // columns)
        for j in range(columns):
            column = chunk * columns + j
            unit = columns_to_rows.unit_of(column, group, head_dim, columns)
            assert shared[unit, word, 0] == -1, "written twice"
            for i in range(4):
                shared[unit, word, i] = 1000 * (16 * group + columns_to_rows.token_of(word, i)) + column
            steps[j].append(4 * unit + word)
    for step in steps:
        for warp in range(0, threads, 32):
            assert len({address % 32 for address in step[warp : warp + 32]}) == 32
    out = torch.full((head_dim, 64), -1)
    for i in range(head_dim * 4 // threads):
        units = []
        for thread in range(threads):
            group, column = thread % 4, thread // 4 + threads // 4 * i
            units.append(columns_to_rows.unit_of(column, group, head_dim, columns))
            out[column, 16 * group : 16 * group + 16] = shared[units[-1]].flatten()
        for phase in range(0, threads, 8):  # of a 16-byte access
            assert len({unit % 8 for unit in units[phase : phase + 8]}) == 8
    return out


@pytest.mark.parametrize("columns", [8, 16])
@every_head_dim
def test_threads_transpose_v_and_share_no_bank(head_dim: int, columns: int) -> None:
    tokens = torch.tensor(TOKEN_ORDER) + 16 * torch.arange(4)[:, None]
    expected = 1000 * tokens.flatten() + torch.arange(head_dim)[:, None]
    assert torch.equal(transpose_by_kernel(head_dim, columns), expected)


def test_bytes_are_transposed() -> None:
    def prmt(a: list, b: list, selector: int) -> list:
        return [(a + b)[selector >> 4 * i & 7] for i in range(4)]

    rows = [[(i, j) for j in range(4)] for i in range(4)]
    with mock.patch.object(untraced.cute.arch, "prmt", prmt):
        found = columns_to_rows.transposed_bytes(rows)
    assert found == [[(i, j) for i in range(4)] for j in range(4)]


@every_head_dim
def test_threads_transform_a_row(head_dim: int) -> None:
    """Bit for bit as the reference: the same sums in the same order; and where they are said to be."""
    own = OWN_ROTATED[head_dim]
    row, lanes = torch.randn(head_dim), head_dim // own
    of_lane = row.view(own // 16, lanes, 16).transpose(0, 1).reshape(lanes, own)
    lane = torch.arange(lanes)
    shuffle = lambda x, bit: x[lane ^ bit]
    with (
        mock.patch.object(transform, "minus_if", lambda odd: 1.0 - 2.0 * (odd & 1)),
        mock.patch.object(untraced.cute.arch, "lane_idx", lambda: lane),
        mock.patch.object(untraced.cute.arch, "shuffle_sync_bfly", shuffle),
    ):
        found = torch.stack(transform.hadamard(list(of_lane.T), lanes), dim=1).view(lanes, -1, 16)
        chunks = transform.transformed_chunks(lane, lanes, own // 16)
        signs = [sign for sign in transform.transformed_signs(lane, lanes) for _ in range(own // 32)]
    transformed = torch.full((head_dim // 16, 16), torch.nan)
    for i, (chunk, sign) in enumerate(zip(chunks, signs, strict=True)):
        transformed[chunk] = found[:, i] * sign[:, None]
    assert torch.equal(transformed.flatten(), hadamard(row))


@every_head_dim
def test_signs_of_a_thread_are_bits(head_dim: int) -> None:
    """Of two columns in a word, bits 15 and 31 of its chunks' masks, shifted by the word's number."""
    signs, own = random_signs(head_dim), OWN_ROTATED[head_dim]
    lanes = head_dim // own
    for lane in range(lanes):
        chunks = [lane + lanes * i for i in range(own // 16)]
        drawn = [signs[16 * chunk + i] for chunk in chunks for i in range(16)]
        with mock.patch.multiple(
            untraced_ahead,
            load_fp32=lambda m, chunk: [Bits(x) for x in m[16 * chunk : 16 * chunk + 16]],
            Uint32=int,
            Int32=int,
        ):
            masks = untraced_ahead.sign_masks(signs, chunks)
        words = [masks[i // 16] << i % 16 & 0x80008000 for i in range(own // 2)]
        negative = [bool(word >> bit & 1) for word in words for bit in (15, 31)]
        assert negative == [bool(sign < 0) for sign in drawn]


class Bits:
    """An fp32 whose bits are asked for."""

    def __init__(self, value: torch.Tensor):
        self.value = value

    def bitcast(self, _: type) -> int:
        return self.value.view(torch.int32).item() & 0xFFFFFFFF


# Machine code

OPTIONS = {
    "plain": {},
    "rotated": {"rotate": True},
    "rope": {"rotate": True, "rope": True},
    "rope alone": {"rope": True},
    "rope given": {"rope": True, "given_scales": True},
    "given": {"given_scales": True},
    "rotated given": {"rotate": True, "given_scales": True},
}


def refuse_spills(code: machine_code.KernelCode) -> None:
    assert code.frame_bytes == 0 and code.count("LDL|STL") == 0
    assert code.count("STG.E.128") == code.count("STG") - code.count(r"STG\.E$"), "codes 16 bytes at a time"


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@every_head_dim
def test_quantizing_compiles_without_spills(head_dim: int, dtype: str, option: str) -> None:
    compiled = quantize.compile_quantize(head_dim, dtype, **OPTIONS[option])
    (code,) = machine_code.disassemble(machine_code.cubin_of(compiled))
    refuse_spills(code)
    rotated = OPTIONS[option].get("rope") or OPTIONS[option].get("rotate")
    own = OWN_ROTATED[head_dim] if rotated else 32
    threads = BLOCK * head_dim // own
    elements = 65536 // (code.registers + -code.registers % 8) // threads * threads * own
    assert elements >= 512 * 32, "on their way in an SM"
    assert code.count("F2FP.SATFINITE.E4M3") == 3 * own // 2 + 1, "one for two values, and the weight"
    assert code.count(r"LDG\.E$") == (3 if "given" in option else 0), "all else 16 bytes at a time"


@pytest.mark.parametrize("parts", ["q", "v", "kv"])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_parts_compile(parts: str, head_dim: int) -> None:
    rotated = {"rotate": True}
    for options in ({}, rotated, rotated | {"rope": True}):
        compiled = quantize.compile_quantize(head_dim, "bfloat16", parts=parts, **options)
        refuse_spills(*machine_code.disassemble(compiled.__cubin__))


@every_head_dim
def test_relayout_compiles_without_spills(head_dim: int) -> None:
    (code,) = machine_code.disassemble(quantize.compile_relayout(head_dim).__cubin__)
    refuse_spills(code)
    assert code.count("PRMT") == 32, "two for four bytes"
