"""What every stage compiles to for sm_90a, and the reading of machine code it is judged by; without a GPU."""

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from rotating import recorded, sample, some

from harness import machine_code
from harness.hardware import H100_SXM
from harness.machine_code import Instruction, KernelCode, Loop, classify, cubin_of, demand, main_loop
from harness.sweep import HEAD_DIMS
from hopper_attention.kernels import k6, k7, ladder
from hopper_attention.kernels.contract import DTYPES, Problem, Work
from hopper_attention.launch import compile_kernel, compile_stage, compiled_for

STAGES = list(ladder.LADDER)
CUDA_CORES = ("k1", "fa1", "k2", "bwd1", "bwd2")  # what these compute with; tensor cores and TMA come later
TMA = ("k3_1", "k3_2", "k3_3")  # the same arithmetic, its loads by TMA
K6 = ("k6", "k6_r128", "k6_r64")
BWD4 = ("bwd4", "bwd4_det", "bwd4_parts", "bwd4_parts_det")
MIRRORED = tuple(stage_id for stage_id in BWD4 if stage_id.endswith("_det"))  # of these some heads
WGMMA = ("k4_qk", "k4", "k5", "k6_1", "k6_2", *K6, "bwd3", *BWD4)
# Products on tensor cores in the code, full and causal: k6_2 has a first Q·Kᵀ before its loop and a last P·V
# behind it, k6 a second loop for tiles with hidden keys and the next tile's first Q·Kᵀ; where heads may be
# mirrored, bwd4 has a third loop, since tiles with a hidden pair are its first or its last.
PRODUCTS = {
    "k4_qk": (1, 1),
    "k4": (2, 2),
    "k5": (2, 2),
    "k6_1": (2, 2),
    "k6_2": (4, 4),
    **dict.fromkeys(K6, (7, 7)),
    "bwd3": (5, 5),
    **dict.fromkeys(BWD4, (15, 15)),
    **dict.fromkeys(MIRRORED, (15, 20)),
}
# Waits where they are not one a product: k6 has branches that wait for P·V before they touch O, bwd3 waits
# for S and dP together, and for dV, dK and dQ.
WAITS = {"bwd3": (2, 2), **dict.fromkeys(K6, (9, 9)), **dict.fromkeys(BWD4, (13, 13))}
WAITS |= dict.fromkeys(MIRRORED, (13, 17))
WAITS |= {(stage_id, 64): (11, 11) for stage_id in K6} | {("k6_r64", 128): (11, 11)}  # a tile in two parts
SPECIALISED = ("k5", "k6_1", "k6_2", *K6, *BWD4)
# Instructions a thread issues for one score, in the loop over unmasked tiles, if no row's maximum has grown.
# May only fall. (At 64 it was 6.16 in tiles of 256×64 and 5.91 in 192×128, before a tile came in two parts,
# which is a vote more, and faster; and 6.28 before each row had a limit of its own, which is more accurate.)
INSTRUCTIONS_PER_SCORE = {64: 6.34, 128: 6.47, 256: 7.25}
BACKWARD_INSTRUCTIONS_PER_SCORE = {64: 9.13, 128: 13.88}
MASKED = [(d, causal) for d in HEAD_DIMS for causal in (False, True)]
INSPECTED = {stage_id: some(stage_id, MASKED) for stage_id in STAGES}
CONFIGS = [(stage_id, *config) for stage_id, configs in INSPECTED.items() for config in configs]
every_config = pytest.mark.parametrize(("stage_id", "head_dim", "causal"), CONFIGS)
FUSED = ("fa1", "k2", *TMA)


def problem_at(stage_id: str, head_dim: int, causal: bool) -> Problem:
    """The sweep's problem at N = 4096."""
    direction = ladder.load(stage_id)[0].direction
    return Problem.square(4, 2048 // head_dim, 4096, head_dim, causal, direction=direction)


def identity_of(stage_id: str, problem: Problem) -> str:
    """By the record, or where that is not current by compiling."""
    kernel = compiled_for(stage_id, problem)
    return recorded(stage_id).get(kernel) or machine_code.identity(compile_stage(stage_id, problem))


def kernels_of(stage_id: str, head_dim: int, causal: bool) -> list[KernelCode]:
    return machine_code.disassemble(cubin_of(compile_stage(stage_id, problem_at(stage_id, head_dim, causal))))


@pytest.fixture(scope="module", autouse=True)
def disassemble_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_code, "disassemble", functools.cache(machine_code.disassemble))
        yield


# Every stage


@every_config
def test_compiles_without_spills(stage_id: str, head_dim: int, causal: bool) -> None:
    found = kernels_of(stage_id, head_dim, causal)
    assert found
    for code in found:
        assert len(code.instructions) > 100
        assert 16 <= code.registers <= 255
        assert code.frame_bytes == 0, f"{code.symbol} has a stack frame"
        assert code.count("LDL|STL") == 0, f"{code.symbol} spills"


def works_of(stage_id: str, problem: Problem) -> list:
    stage, module = ladder.load(stage_id)
    return module.work(problem, **stage.options)


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in TMA])
def test_k3_loads_by_tma_and_still_multiplies_on_cuda_cores(
    stage_id: str, head_dim: int, causal: bool
) -> None:
    (code,) = kernels_of(stage_id, head_dim, causal)
    assert code.count("UTMALDG") >= 5, "Q, and K and V both before and inside the loop"
    assert code.count("SYNCS") > 0
    assert code.count("LDG") == 0
    assert code.count(r"[HIQDB]G?MMA") == 0


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in WGMMA])
def test_wgmma_is_used_and_never_serialised(stage_id: str, head_dim: int, causal: bool) -> None:
    found = kernels_of(stage_id, head_dim, causal)
    for code in [k for k in found if k.count("HGMMA")] or found:
        products = [i for i in code.instructions if i.opcode.startswith("HGMMA")]
        # A product ends in one commit group and one wait; a serialised one has them behind each instruction.
        assert sum("gsb0" in i.text for i in products) == PRODUCTS[stage_id][causal]
        waits = WAITS.get((stage_id, head_dim)) or WAITS.get(stage_id, PRODUCTS[stage_id])
        assert code.count("WARPGROUP.DEPBAR") == waits[causal]
        assert len(products) >= 4 * PRODUCTS[stage_id][causal]
        assert code.count("UTMALDG") >= 3
        # But for bwd4, whose CTAs read what others say: that there are zeros; in bwd4_det whose turn it is.
        words = 1 if stage_id in BWD4 else 0
        assert (code.count("LDG") > 0) == (words > 0)
        assert code.count("LDG") == code.count("LDG.*STRONG")
    for work in works_of(stage_id, problem_at(stage_id, head_dim, causal)):
        assert work.tensor_flops > 0


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in WGMMA])
def test_registers_move_to_the_consumers(stage_id: str, head_dim: int, causal: bool) -> None:
    for code in kernels_of(stage_id, head_dim, causal):
        specialised = stage_id in SPECIALISED and code.count("HGMMA") > 0
        assert code.count("USETMAXREG") == (2 if specialised else 0)


K6_WIDE = [(256, causal) for causal in (False, True)]
K6_FORMS = [(*form, dtype) for form in (*MASKED, *K6_WIDE) for dtype in DTYPES]


@pytest.mark.parametrize(("head_dim", "causal", "dtype"), some("k6", K6_FORMS, 2))
def test_k6_in_every_form(head_dim: int, causal: bool, dtype: str) -> None:
    problem = problem_at("k6", head_dim, causal).with_(dtype=dtype)
    kind = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    for seqlen in (512, 4096, 16384):
        works = works_of("k6", problem.with_(seqlen_q=seqlen, seqlen_kv=seqlen))
        (found,) = machine_code.inspect(compile_stage("k6", problem), works)
        code = found.code
        assert code.frame_bytes == 0
        assert code.count("LDL|STL") == 0
        assert code.count("UTMASTG") == head_dim // 64, "O leaves by TMA"
        assert code.count("STG") == 2, "the LSE, of two rows at once, and the counter's reset"
        products = [i.opcode for i in code.instructions if i.opcode.startswith("HGMMA")]
        assert all(opcode.endswith("F32.BF16" if kind == "BF16" else "F32") for opcode in products)


def test_the_number_of_sms_is_the_hosts_matter() -> None:
    """Of k6 only the launch knows it."""
    problem = problem_at("k6", 64, False)
    fewer = compile_kernel("k6", problem, sms=114)
    assert machine_code.identity(fewer) == machine_code.identity(compile_stage("k6", problem))


TOP_LEFT = [(stage_id, d) for stage_id in ("k6", "bwd4", "bwd4_det") for d in (*HEAD_DIMS, 256)]
TOP_LEFT.remove(("bwd4_det", 256))  # which is bwd4's


@pytest.mark.parametrize(("stage_id", "head_dim"), sample(TOP_LEFT, 1))
def test_a_mask_aligned_at_the_top_left(stage_id: str, head_dim: int) -> None:
    """Code of its own, with the products and waits of the other alignment's."""
    square = problem_at(stage_id, head_dim, True)
    compiled = compile_stage(stage_id, square.with_(top_left=True))
    assert machine_code.identity(compiled) != machine_code.identity(compile_stage(stage_id, square))
    for n, m in ((4096, 4096), (1000, 4096), (4096, 1000)):
        problem = square.with_(top_left=True, seqlen_q=n, seqlen_kv=m)
        works = works_of(stage_id, problem.with_(top_left=False))
        for found, other in zip(
            machine_code.inspect(compiled, works_of(stage_id, problem)),
            machine_code.inspect(compile_stage(stage_id, square), works),
            strict=True,
        ):
            assert found.code.frame_bytes == 0
            assert found.code.count("LDL|STL") == 0
            for pattern in ("HGMMA", "WARPGROUP.DEPBAR", "USETMAXREG", "UTMASTG"):
                assert found.code.count(pattern) == other.code.count(pattern)
            # Key ranges take fewer instructions, not more.
            assert len(found.code.instructions) <= len(other.code.instructions)


K7_CONFIGS = [(d, causal) for d in (*HEAD_DIMS, 256) for causal in (False, True)]
# Instructions a thread issues for one score in k7's loop over unmasked tiles, as INSTRUCTIONS_PER_SCORE.
K7_INSTRUCTIONS_PER_SCORE = {64: 4.18, 128: 4.24, 256: 4.93}


@pytest.mark.parametrize(("head_dim", "causal"), some("k7", K7_CONFIGS))
def test_k7_multiplies_codes(head_dim: int, causal: bool) -> None:
    problem = problem_at("k7", head_dim, causal)
    compiled = compile_stage("k7", problem)
    (found,) = machine_code.inspect(compiled, works_of("k7", problem))
    code, config = found.code, k7.CONFIGS[head_dim]
    assert code.frame_bytes == 0
    assert code.count("LDL|STL") == 0
    assert code.count("HGMMA|IGMMA") == 0
    products = [i for i in code.instructions if i.opcode.startswith("QGMMA")]
    assert all(i.opcode.endswith("x32.F32.E4M3.E4M3") for i in products)
    # The first Q·Kᵀ; in each of two loops both products; the next tile's first Q·Kᵀ, the last P·V. They are
    # not serialised: a group of instructions has one commit.
    qk, pv = 4, 3
    assert sum("gsb0" in i.text for i in products) == qk + pv
    # A wait for each product in a loop and for what is under way around a raised maximum, in two parts.
    assert code.count("WARPGROUP.DEPBAR") == 11
    from_registers = [i for i in products if re.search(r"QGMMA\S* R\d+, R\d+, gdesc", i.text)]
    boxes = (head_dim + 8) // k7.PV_COLUMNS[head_dim]
    assert len(from_registers) == pv * boxes * config.tile_kv // 32, "P comes from registers"
    assert {i.opcode.split(".")[1] for i in from_registers} == {f"64x{k7.PV_COLUMNS[head_dim]}x32"}
    others = [i.opcode.split(".")[1] for i in products if i not in from_registers]
    assert others == ["64x128x32"] * (qk * head_dim // 32)
    assert "tnsp" not in "".join(i.text for i in products), "V comes transposed"
    assert code.count("USETMAXREG") == 2
    assert code.count("UTMASTG") == head_dim // 64, "O leaves by TMA"
    quads = head_dim // 8  # of O's flush: 16 bytes each
    assert code.count("RED") == code.count(r"REDG?\.E\.ADD\.F32x4") == quads
    assert code.count("LDG.*128") == code.count("LDG.*STRONG") == 2 * quads
    assert found.work.smem_bytes in compiled.host_constants
    assert found.work.smem_bytes <= 232_448


@pytest.mark.parametrize(("head_dim", "causal"), some("k7", K7_CONFIGS))
def test_k7_issues_no_more_instructions_than_before(head_dim: int, causal: bool) -> None:
    (code,) = kernels_of("k7", head_dim, causal)
    config = k7.CONFIGS[head_dim]
    loops = [[i.opcode for i in code.usual(k)] for k in innermost_with_products(code)]
    assert len(loops) == 2
    assert len(code.seldom) == 2 * config.parts + 1, "branches of the rescaling, and the flush's"
    unmasked = min(loops, key=len)
    scores = 64 * config.tile_kv / 128  # of a thread
    assert len(unmasked) / scores <= K7_INSTRUCTIONS_PER_SCORE[head_dim] + 0.005
    assert unmasked.count("MUFU.EX2") == scores, "of P alone"
    assert sum(opcode.startswith("F2FP.SATFINITE.E4M3") for opcode in unmasked) == scores / 2
    assert sum(opcode.startswith("QGMMA") for opcode in unmasked) == (
        head_dim // 32 + (head_dim + 8) // k7.PV_COLUMNS[head_dim] * config.tile_kv // 32
    )
    assert sum(opcode.startswith("FADD") for opcode in unmasked) <= 8, "P is summed by the tensor cores"


@pytest.mark.parametrize(
    ("head_dim", "causal", "options"),
    [
        (64, False, {"direct_keys": 32}),
        (64, True, {"direct_keys": 128}),
        (128, True, {"direct_keys": 128, "in_half": True}),
        (256, False, {"direct_keys": 128, "in_half": True}),
    ],
)
def test_k7_without_exponentials(head_dim: int, causal: bool, options: dict[str, object]) -> None:
    problem = problem_at("k7", head_dim, causal)
    (code,) = machine_code.disassemble(machine_code.cubin_of(k7.compile_kernel(problem, **options)))
    assert code.frame_bytes == 0 and code.count("LDL|STL") == 0
    products = [i for i in code.instructions if i.opcode.startswith("QGMMA")]
    assert sum("gsb0" in i.text for i in products) == 7, "not serialised"
    in_fp16 = sum("x32.F16.E4M3" in i.opcode for i in products)
    assert in_fp16 == (4 * head_dim // 32 if "in_half" in options else 0)
    unmasked = min(([i.opcode for i in code.usual(k)] for k in innermost_with_products(code)), key=len)
    exact = 64 - options["direct_keys"] // 2  # scores of a thread
    assert unmasked.count("MUFU.EX2") == exact
    assert sum(opcode.startswith("F2FP.SATFINITE.E4M3") for opcode in unmasked) == exact / 2
    if "in_half" in options:
        assert unmasked.count("HFMA2.RELU") == 32, "two scores at once"


def test_k7_refuses_keys_that_are_no_part_of_a_tile() -> None:
    for options, words in (
        ({"direct_keys": 24}, "multiple of 16"),
        ({"direct_keys": 144}, "up to 128"),
        ({"direct_keys": 64, "in_half": True}, "direct_keys must be all"),
        ({"direct_keys": 144, "in_half": True}, "direct_keys must be all"),
    ):
        with pytest.raises(ValueError, match=words):
            k7.kernel_for(problem_at("k7", 64, False), **options)


WIDE = [(causal, dtype) for causal in (False, True) for dtype in DTYPES]


@pytest.mark.parametrize(("causal", "dtype"), some("bwd4", WIDE))
def test_bwd4_at_head_dim_256(causal: bool, dtype: str) -> None:
    """A kernel for dK and dV, one for dQ; no LSE, D or sum of dQ is waited for but at the kernels' start."""
    problem = problem_at("bwd4", 256, causal).with_(dtype=dtype)
    compiled = compile_stage("bwd4", problem)
    for seqlen in (512, 4096):
        works = works_of("bwd4", problem.with_(seqlen_q=seqlen, seqlen_kv=seqlen))
        keys, queries = (found.code for found in machine_code.inspect(compiled, works))
    for code in machine_code.disassemble(cubin_of(compiled)):
        assert code.frame_bytes == 0
        assert code.count("LDL|STL") == 0
        assert code.count("UBLKRED|RED|ATOMS|STRONG.*ATOM") == 0, "nothing is added in memory"
    # Products and instructions. dK and dV: for each consumer S or dP before the loops; in each of two a
    # gradient and the next S or dP; behind them the last gradient. dQ: S before the loops; in each of two dP,
    # dQ and the next S; behind them the last dP and dQ.
    for code, groups, instructions, waits, stores in (
        (keys, 2 * (1 + 2 * 2 + 1), 2 * (16 + 2 * (4 + 16) + 4), 2 * (1 + 2 * 2 + 2), 2 * 256 // 64),
        (queries, 1 + 2 * 3 + 2, 16 + 2 * (16 + 4 + 16) + 16 + 4, 1 + 2 * 3 + 3, 256 // 64),
    ):
        products = [i for i in code.instructions if i.opcode.startswith("HGMMA")]
        assert sum("gsb0" in i.text for i in products) == groups
        assert len(products) == instructions
        assert code.count("WARPGROUP.DEPBAR") == waits
        assert code.count("UTMASTG") == stores, "gradients leave by TMA"
        kind = {"bfloat16": "F32.BF16", "float16": "F32"}[dtype]
        assert all(i.opcode.endswith(kind) for i in products)
    for work in works:
        assert work.smem_bytes in compiled.host_constants
        assert work.smem_bytes <= 232_448


@pytest.mark.parametrize("causal", [False, True])
def test_bwd4_at_head_dim_256_is_deterministic_already(causal: bool) -> None:
    problem = problem_at("bwd4", 256, causal)
    both = [identity_of(stage_id, problem) for stage_id in ("bwd4", "bwd4_det")]
    assert both[0] == both[1]


def innermost_with_products(code: KernelCode) -> list[Loop]:
    innermost = [k for k in code.loops if not any(k.holds(other) for other in code.loops)]
    multiplies = lambda k: any(
        re.match("[HQ]GMMA", i.opcode) for i in code.instructions[k.first : k.last + 1]
    )
    return [k for k in innermost if multiplies(k)]


@pytest.mark.parametrize(("head_dim", "causal"), INSPECTED["k6"] + some("k6", K6_WIDE))
def test_k6_issues_no_more_instructions_than_before(head_dim: int, causal: bool) -> None:
    (code,) = kernels_of("k6", head_dim, causal)
    config = k6.CONFIGS[head_dim]
    loops = [[i.opcode for i in code.usual(k)] for k in innermost_with_products(code)]
    assert len(code.seldom) == len(loops) * config.parts, (
        "branches of the rescaling, which `usual` leaves out"
    )
    unmasked = min(loops, key=len)
    scores = 64 * config.tile_kv / 128  # of a thread
    assert len(unmasked) / scores <= INSTRUCTIONS_PER_SCORE[head_dim] + 0.005
    # Each part but the last becomes P before the vote on the next one, so that they run beside each other.
    votes = [at for at, opcode in enumerate(unmasked) if opcode.startswith("VOTE.ANY")]
    assert len(votes) == config.parts
    for begin, end in pairwise(votes):
        between = [opcode.split(".")[0] for opcode in unmasked[begin:end]]
        for kind in ("MUFU", "FFMA"):
            assert between.count(kind) >= scores / config.parts - 2


@pytest.mark.parametrize("stage_id", ["bwd4", "bwd4_parts"])
def test_bwd4_issues_no_more_instructions_than_before(stage_id: str) -> None:
    for head_dim, causal in INSPECTED[stage_id]:
        code = next(k for k in kernels_of(stage_id, head_dim, causal) if "Backward" in k.symbol)
        unmasked = min(k.last + 1 - k.first for k in innermost_with_products(code))
        scores = 64 * {64: 128, 128: 64}[head_dim] / 128  # of a thread in a step
        assert unmasked / scores <= BACKWARD_INSTRUCTIONS_PER_SCORE[head_dim] + 0.005


def test_k4_keeps_p_in_registers() -> None:
    for head_dim, causal in INSPECTED["k4"]:
        (code,) = kernels_of("k4", head_dim, causal)
        assert code.count("STS|LDS|STSM|LDSM") == 0
        from_registers = [
            i for i in code.instructions if re.search(r"HGMMA.* R\d+, R\d+, gdesc.*tnspB", i.text)
        ]
        assert len(from_registers) >= 4, "P·V takes P from registers and V with its modes exchanged"
        assert "tnspB" not in "".join(i.text for i in code.instructions if i not in from_registers)


@every_config
def test_is_hopper_code(stage_id: str, head_dim: int, causal: bool) -> None:
    cubin = cubin_of(compile_stage(stage_id, problem_at(stage_id, head_dim, causal)))
    assert cubin[49] == 90  # the second byte of the ELF header's flags: the compute capability


@every_config
def test_bound_is_stated(stage_id: str, head_dim: int, causal: bool) -> None:
    problem = problem_at(stage_id, head_dim, causal)
    works = works_of(stage_id, problem)
    demands = machine_code.inspect(compile_stage(stage_id, problem), works)
    assert [x.work for x in demands] == works
    for x in demands:
        assert x.cycles[x.unit] == max(x.cycles.values()) > 0
        assert min(x.cycles.values()) >= 0
        assert sum(x.mix.values()) > 0
        assert x.seconds() > 0
    bound = machine_code.bound_tflops(problem, demands)
    assert 0 < bound <= problem.flops / H100_SXM.roofline_seconds(problem) / 1e12


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in CUDA_CORES])
def test_first_stages_use_cuda_cores_only(stage_id: str, head_dim: int, causal: bool) -> None:
    for code in kernels_of(stage_id, head_dim, causal):
        assert code.count(r"[HIQDB]G?MMA") == 0
        assert code.count("UTMA|UBLKCP|SYNCS|LDGSTS") == 0
        assert code.count("FFMA|FMUL") > 0


@every_config
def test_shared_memory_is_what_the_stage_says(stage_id: str, head_dim: int, causal: bool) -> None:
    problem = problem_at(stage_id, head_dim, causal)
    launched = compile_stage(stage_id, problem).host_constants
    for work in works_of(stage_id, problem):
        assert work.smem_bytes <= 232_448, "more than a CTA may have: 227 KiB"
        assert work.smem_bytes in (*launched, 0)
    if stage_id == "k2" and head_dim == 128:
        assert {work.smem_bytes for work in works_of("k2", problem)} == {49152}


# The identity of machine code


def test_compiler_is_deterministic() -> None:
    problem = problem_at("k2", 64, False)
    module = ladder.load("k2")[1]
    first, second = module.compile_kernel(problem), module.compile_kernel(problem)
    assert first is not second
    assert cubin_of(first) == cubin_of(second)
    sha = machine_code.identity(first)
    assert re.fullmatch(r"[0-9a-f]{64}", sha)
    assert sha == machine_code.identity(
        compile_stage("k2", problem.with_(batch=1, seqlen_q=65, seqlen_kv=65))
    )


def test_hash_follows_the_tile() -> None:
    problem = problem_at("k2", 64, False)
    other = ladder.load("k2")[1].compile_kernel(problem, tile=32)
    assert machine_code.identity(other) != machine_code.identity(compile_stage("k2", problem))


def test_hash_tells_configurations_apart() -> None:
    """Of every stage, compiled here or recorded, the plain ones."""
    every = [(stage_id, *config) for stage_id in STAGES for config in MASKED]
    found = {identity_of(stage_id, problem_at(stage_id, d, causal)) for stage_id, d, causal in every}
    assert len(found) == len(every)


@every_config
def test_a_record_is_of_todays_machine_code(stage_id: str, head_dim: int, causal: bool) -> None:
    """A digest that was not made by compiling is found out here, sooner or later."""
    problem = problem_at(stage_id, head_dim, causal)
    if recorded(stage_id):
        compiled = machine_code.identity(compile_stage(stage_id, problem))
        assert identity_of(stage_id, problem) == compiled


@pytest.mark.parametrize("cubin", [None, b"", b"PTX", "\x7fELF"])
def test_what_carries_no_cubin(cubin: object) -> None:
    class Compiled:
        __cubin__ = cubin

    with pytest.raises(ValueError, match="carries no cubin; compile it with --keep-cubin"):
        cubin_of(Compiled())


def test_disassembler_refuses_other_bytes() -> None:
    with pytest.raises(RuntimeError, match=r"nvdisasm failed: ."):
        machine_code.disassemble(b"\x7fELF and nothing else")


# The work a stage declares must be the work its machine code does


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in FUSED])
def test_products_are_those_declared(stage_id: str, head_dim: int, causal: bool) -> None:
    problem = problem_at(stage_id, head_dim, causal)
    (work,) = works_of(stage_id, problem)
    assert work.ffma == 2 * 64 * 64 * head_dim // 256  # of one thread, in one 64×64 tile
    (found,) = machine_code.inspect(compile_stage(stage_id, problem), [work])
    # No tenth more than needed either: what is left over is the rescaling.
    with pytest.raises(ValueError, match="are the trips right"):
        demand(found.code, replace(work, ffma=ceil(1.1 * work.ffma)))


@pytest.mark.parametrize("stage_id", ["fa1", "k2", *TMA, "bwd2"])
def test_wrong_work_is_refused(stage_id: str) -> None:
    problem = problem_at(stage_id, *INSPECTED[stage_id][0])
    compiled = compile_stage(stage_id, problem)
    (work,) = works_of(stage_id, problem)
    for at in range(len(work.trips)):
        fewer = tuple(n - (i == at) for i, n in enumerate(work.trips))
        with pytest.raises(ValueError, match=rf": \d+ products in one pass, not the {work.ffma}"):
            machine_code.inspect(compiled, [replace(work, trips=fewer)])
    for trips in ((), (*work.trips, 8)):
        with pytest.raises(ValueError, match=rf"{len(work.trips)} innermost loops .*, not {len(trips)}"):
            machine_code.inspect(compiled, [replace(work, trips=trips)])
    with pytest.raises(ValueError, match="0 kernels named 'Nothing' in the cubin"):
        machine_code.inspect(compiled, [replace(work, kernel="Nothing")])


def test_k1_is_three_kernels() -> None:
    problem = problem_at("k1", *INSPECTED["k1"][0])
    found = machine_code.disassemble(cubin_of(compile_stage("k1", problem)))
    assert len(found) == 3
    demands = machine_code.inspect(compile_stage("k1", problem), works_of("k1", problem))
    assert [x.work.kernel for x in demands] == ["score", "softmax", "output"]
    assert len({x.code.symbol for x in demands}) == 3
    with pytest.raises(ValueError, match="3 kernels named 'NaiveAttention'"):
        every = replace(demands[0].work, kernel="NaiveAttention")
        machine_code.inspect(compile_stage("k1", problem), [every])


def test_bwd1_is_one_kernel_a_product() -> None:
    problem = problem_at("bwd1", *INSPECTED["bwd1"][0])
    found = machine_code.disassemble(cubin_of(compile_stage("bwd1", problem)))
    assert len(found) == 6
    demands = machine_code.inspect(compile_stage("bwd1", problem), works_of("bwd1", problem))
    names = ["probability", "grad_v", "grad_score", "grad_q", "grad_k"]  # row_dot is no product
    assert [x.work.kernel for x in demands] == names
    assert len({x.code.symbol for x in demands}) == 5
    products = sum(x.work.ffma * x.work.threads * x.work.passes for x in demands)
    assert problem.causal or 2 * products == problem.flops


@pytest.mark.parametrize(("head_dim", "causal"), INSPECTED["bwd2"])
def test_bwd2_adds_to_dq_without_asking_for_the_sum(head_dim: int, causal: bool) -> None:
    problem = problem_at("bwd2", head_dim, causal)
    found = {k.symbol: k for k in kernels_of("bwd2", head_dim, causal)}
    assert len(found) == 3
    (work,) = works_of("bwd2", problem)
    assert work.ffma * work.threads == 5 * 64 * 64 * head_dim
    (main,) = machine_code.inspect(compile_stage("bwd2", problem), [work])
    # Of dQ's tile a thread holds 64·head_dim/threads elements; a RED, unlike an ATOM, returns nothing.
    assert main.code.count("RED") == 64 * head_dim // work.threads
    for code in found.values():
        assert code.count("ATOM") == 0
        assert code.count("RED") == 0 or code is main.code


@pytest.mark.parametrize(("head_dim", "causal"), INSPECTED["bwd3"])
def test_bwd3_exchanges_ds_only(head_dim: int, causal: bool) -> None:
    problem = problem_at("bwd3", head_dim, causal)
    (main,) = machine_code.inspect(compile_stage("bwd3", problem), works_of("bwd3", problem))
    products = [i.text for i in main.code.instructions if i.opcode.startswith("HGMMA")]
    from_registers = [text for text in products if re.search(r"HGMMA\S* R\d+, R\d+, gdesc", text)]
    exchanged = [text for text in products if "tnspA.tnspB" in text]
    assert len(from_registers) == 2 * (128 if head_dim == 64 else 64) // 16, "dV and dK, queries summed over"
    assert all("tnspB" in text for text in from_registers), "dO and Q with their modes exchanged"
    assert len(exchanged) == 128 // 16, "dQ, keys summed over: dS and K with their modes exchanged"
    others = [text for text in products if text not in from_registers + exchanged]
    assert others
    assert "tnsp" not in "".join(others), "S and dP"
    body = main.code.instructions[(k := main_loop(main.code)).first : k.last + 1]
    ds_bytes = sum(512 for i in body if i.opcode.startswith("STSM"))
    assert ds_bytes == (128 if head_dim == 64 else 64) * 64 * 2 // 4, "a warp's quarter of dS, and no P"
    # Of dQ's tile a thread holds a block's 32 registers, and adds them in fours.
    assert [i.opcode for i in body if i.opcode.startswith("RED")] == 8 * [
        "REDG.E.ADD.F32x4.FTZ.RN.STRONG.GPU"
    ]
    assert main.code.count("ATOM|LDG|STG") == 0
    assert main.code.count("UTMASTG") == 2 * head_dim // 64, "dK and dV leave by TMA"


@pytest.mark.parametrize(("head_dim", "causal"), INSPECTED["bwd3"])
def test_ends_of_bwd3_move_16_bytes_an_access(head_dim: int, causal: bool) -> None:
    before, after = [
        next(k for k in kernels_of("bwd3", head_dim, causal) if name in k.symbol)
        for name in ("Preprocess", "Postprocess")
    ]
    assert before.count(r"LDG\.E\.128") == 2 * 4, "four rows of O and of dO"
    assert before.count(r"STG\.E\.128") == 64 * head_dim * 4 // 16 // (2 * head_dim), "dQ's sum"
    assert before.count("LDG") == 2 * 4 + 1, "the LSE"
    assert before.count("STG") == 8 + 4 + 1, "and D of four rows, LSE of one"
    assert after.count("LDG") == after.count(r"LDG\.E\.128") == 8
    assert after.count("STG") == 0
    assert after.count("UTMASTG") == head_dim // 64


# Reading a listing


SYMBOL = "kernel_toy_with_a_name_that_its_banner_cuts"
# A tile loop (.L_x_2) around two inner loops (.L_x_3, .L_x_4); behind the kernel's end a slow path that jumps
# back over it, and the padding loop.
LISTING = f"""
	//----- nvinfo : EIATTR_REGCOUNT
	.align		4
        /*0000*/ 	.byte	0x04, 0x2f
        /*0004*/ 	.word	index@({SYMBOL})
        /*0008*/ 	.word	0x0000002a

	//----- nvinfo : EIATTR_FRAME_SIZE
	.align		4
        /*0010*/ 	.word	index@({SYMBOL})
        /*0014*/ 	.word	0x00000010

//--------------------- .text.kernel_toy_with_a_name - --------------------------
	.section	.text.{SYMBOL},"ax",@progbits
.text.{SYMBOL}:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 EXIT ;
.L_x_2:
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_3:
        /*0030*/                   LDS.128 R8, [R6] ;
        /*0040*/                   FFMA R0, R8, R9, R0 ;
        /*0050*/                   FMUL R3, R8, R9 ;
        /*0060*/              @!P1 BRA `(.L_x_3) ;
        /*0070*/                   MUFU.EX2 R3, R3 ;
.L_x_4:
        /*0080*/                   LDS R8, [R6+0x10] ;
        /*0090*/             @!UP2 UIADD3 UR4, UR4, 0x1, URZ ;
        /*00a0*/                   FFMA.FTZ R0, R8, R9, R0 ;
        /*00b0*/               @P1 BRA `(.L_x_4) ;
        /*00c0*/                   STL [R1], R0 ;
        /*00d0*/               @P2 BRA `(.L_x_2) ;
        /*00e0*/                   EXIT ;
.L_x_5:
        /*00f0*/                   FADD R0, R0, R0 ;
        /*0100*/                   BRA `(.L_x_1);
.L_x_6:
        /*0110*/                   BRA `(.L_x_6);
        /*0120*/                   NOP;

//--------------------- .nv.shared.reserved.0     --------------------------
        /*0000*/                   FFMA R0, R0, R0, R0 ;
"""
TOY_WORK = Work("toy", "step", threads=64, ctas=1, passes=10, trips=(4, 3), ffma=11, hbm_bytes=512.0)


@pytest.fixture
def toy() -> KernelCode:
    (code,) = machine_code._parse(LISTING)
    return code


def test_parse(toy: KernelCode) -> None:
    assert toy.symbol == SYMBOL
    assert toy.registers == 42
    assert toy.frame_bytes == 16
    assert len(toy.instructions) == 19
    assert toy.instructions[0] == Instruction("LDC", "LDC R1, c[0x0][0x28] ")
    assert toy.instructions[1] == Instruction("EXIT", "@!P0 EXIT ")
    assert toy.instructions[9].opcode == "UIADD3"
    assert toy.loops == (Loop(3, 6), Loop(8, 11), Loop(2, 13))
    assert toy.count("LDL|STL") == 1
    assert toy.count("LDS") == 2
    assert toy.count("DS") == 0
    assert main_loop(toy) == Loop(2, 13)


def test_what_a_vote_skips_is_seldom(toy: KernelCode) -> None:
    """A branch forward that a vote decides on: what it skips does not count, the vote and the branch do."""
    mufu = "        /*0070*/                   MUFU.EX2 R3, R3 ;\n"
    aside = """        /*0071*/                   VOTE.ANY P3, P3 ;
        /*0072*/              @!P3 BRA `(.L_x_7) ;
        /*0073*/                   FMUL R0, R0, R3 ;
        /*0074*/                   FMUL R1, R1, R3 ;
.L_x_7:
"""
    assert LISTING.count(mufu) == 1
    (code,) = machine_code._parse(LISTING.replace(mufu, mufu + aside))
    assert toy.seldom == () and code.seldom == (Loop(10, 11),)
    assert [i.opcode for i in code.usual(Loop(8, 12))] == ["VOTE.ANY", "BRA", "LDS"]
    between = aside.replace(" ;\n", " ;\n        /*0075*/                   FMUL R4, R4, R4 ;\n", 1)
    (other,) = machine_code._parse(LISTING.replace(mufu, mufu + between))
    assert other.seldom == (Loop(11, 12),)
    for guard, seldom in (
        ("P3", ()),
        ("P2", (Loop(12, 13),)),
    ):  # what sets the branch's own guard last decides
        further = f"        /*0076*/                   FSETP.GT.AND {guard}, PT, R4, R5, PT ;\n"
        (other,) = machine_code._parse(
            LISTING.replace(mufu, mufu + between.replace("R4, R4 ;\n", f"R4, R4 ;\n{further}", 1))
        )
        assert other.seldom == seldom
    (unvoted,) = machine_code._parse(LISTING.replace(mufu, mufu + aside.replace("P3, P3", "P2, P3")))
    assert unvoted.seldom == ()
    mix = demand(toy, TOY_WORK).mix
    assert demand(code, TOY_WORK).mix == mix | {"branch": mix["branch"] + 1, "alu": 1}


def test_demand(toy: KernelCode) -> None:
    found = demand(toy, TOY_WORK)
    assert found.mix == {
        "global": 1,
        "shared": 4 + 3,
        "fp32": 2 * 4 + 3,
        "branch": 4 + 3 + 1,
        "mufu": 1,
        "uniform": 3,
        "local": 1,
    }
    assert found.cycles["tensor"] == 0
    assert found.cycles["MUFU"] == 64 * 1 / 16
    assert found.cycles["FP32"] == 64 * 11 / 128
    assert found.cycles["ALU"] == 0
    assert found.cycles["issue"] == 2 * 32 / 4
    assert found.cycles["shared"] == 2 * 32 * (4 * 16 + 3 * 4) / 128
    assert found.cycles["HBM"] == pytest.approx(512 * 132 * 1.98e9 / 3.35e12)
    assert found.unit == "HBM"
    assert found.seconds() == pytest.approx(10 * 512 * 132 / 3.35e12)  # one CTA: one SM's share of the rate
    assert replace(found, work=replace(TOY_WORK, ctas=1000)).seconds() == pytest.approx(10 * 512 / 3.35e12)
    problem = Problem.square(1, 1, 64, 64, False)
    assert machine_code.bound_tflops(problem, [found, found]) == pytest.approx(
        problem.flops / (2 * found.seconds()) / 1e12
    )


@pytest.mark.parametrize("changes", [{"trips": (3, 3)}, {"trips": (4, 2)}, {"ffma": 12}])
def test_demand_refuses_too_few_products(changes: dict[str, object], toy: KernelCode) -> None:
    with pytest.raises(ValueError, match=r"toy: .* products in one pass, not the .* needed"):
        demand(toy, replace(TOY_WORK, **changes))


def test_tensor_cycles_come_from_the_instruction_shape() -> None:
    wgmma = Instruction("HGMMA.64x128x16.F32.BF16", "")
    code = KernelCode("toy", 1, 0, (wgmma, Instruction("BRA", "")), (Loop(0, 1),))
    flops = 2 * 64 * 128 * 16
    work = replace(TOY_WORK, threads=128, trips=(1,), ffma=0, tensor_flops=flops)
    found = demand(code, work)
    assert found.cycles["tensor"] == flops / 4096  # a warpgroup's instruction
    assert found.mix["tensor"] == 1
    with pytest.raises(ValueError, match=f"{flops} FLOPs on tensor cores in one pass, not the {flops + 1}"):
        demand(code, replace(work, tensor_flops=flops + 1))


@pytest.mark.parametrize(
    ("operands", "rows"),
    [("R24, gdesc[UR8], R24, gsb0", 64 + 128), ("R24, R4, gdesc[UR8].tnspB, R24", 128)],
)
def test_operands_in_shared_memory_are_counted(operands: str, rows: int) -> None:
    opcode = "HGMMA.64x128x16.F32.BF16"
    wgmma = Instruction(opcode, f"{opcode} {operands}")
    code = KernelCode("toy", 1, 0, (wgmma, Instruction("BRA", "")), (Loop(0, 1),))
    work = replace(TOY_WORK, threads=128, trips=(1,), ffma=0, tensor_flops=2 * 64 * 128 * 16)
    assert demand(code, work).cycles["shared"] == rows * 16 * 2 / 128


def test_code_without_a_loop(toy: KernelCode) -> None:
    with pytest.raises(ValueError, match=f"{SYMBOL} has no loop"):
        main_loop(replace(toy, loops=()))


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HGMMA.64x128x16.F32.BF16", "tensor"),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", "tensor"),
        ("MUFU.EX2", "mufu"),
        ("FFMA.FTZ", "fp32"),
        ("FADD", "fp32"),
        ("IMAD.WIDE.U32", "imad"),
        ("F2FP.BF16.F32.PACK_AB", "convert"),
        ("LDS.128", "shared"),
        ("STSM.16.M88.4", "shared"),
        ("LDG.E.128", "global"),
        ("UTMALDG.4D", "global"),
        ("STL.64", "local"),
        ("SHFL.BFLY", "shuffle"),
        ("BAR.SYNC.DEFER_BLOCKING", "sync"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "sync"),
        ("WARPGROUP.DEPBAR.LE", "sync"),
        ("BRA", "branch"),
        ("UIADD3", "uniform"),
        ("R2UR", "uniform"),
        ("FMNMX", "alu"),
        ("LOP3.LUT", "alu"),
        ("FSETP.GT.AND", "alu"),
        ("NOP", "other"),
    ],
)
def test_classify(opcode: str, kind: str) -> None:
    assert classify(opcode) == kind
