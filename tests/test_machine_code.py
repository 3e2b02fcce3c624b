"""What every stage compiles to for sm_90a, without a GPU."""

import re
from itertools import pairwise

import pytest
from compiled_stages import (
    CONFIGS,
    INSPECTED,
    MASKED,
    TMA,
    disassemble_once,  # noqa: F401
    every_config,
    innermost_with_products,
    kernels_of,
    problem_at,
    works_of,
)
from rotating import sample, some

from harness import machine_code
from harness.machine_code import cubin_of, main_loop
from harness.sweep import HEAD_DIMS
from hopper_attention.kernels import k6, ladder
from hopper_attention.kernels.calls_split import splits
from hopper_attention.kernels.contract import DTYPES
from hopper_attention.kernels.device.far_scores import TOGETHER
from hopper_attention.launch import compile_stage

CUDA_CORES = ("k1", "fa1", "k2", "bwd1", "bwd2")  # what these compute with; tensor cores and TMA come later
SLICES = ("k6_slices", "k6_slices_r192", "k6_slices_r64", "k6_groups", "k6_groups_r64")
K6 = ("k6", "k6_r192", "k6_r128", "k6_r64", *SLICES)
BWD4 = ("bwd4", "bwd4_det", "bwd4_parts", "bwd4_parts_det", "bwd4_one", "bwd4_one_parts")
# Of these some heads' queries come from the last to the first.
REVERSED = ("bwd4", *(stage_id for stage_id in BWD4 if stage_id.endswith("_det")))
WGMMA = ("k4_qk", "k4", "k5", "k6_1", "k6_2", *K6, "bwd3", *BWD4)
# Products on tensor cores in the code, full and causal: k6_2 has a first Q·Kᵀ before its loop and a last P·V
# behind it, k6 a second loop for tiles with hidden keys and the next tile's first Q·Kᵀ; where heads may be
# reversed, bwd4 has a third loop, since tiles with a hidden pair are its first or its last.
PRODUCTS = {
    "k4_qk": (1, 1),
    "k4": (2, 2),
    "k5": (2, 2),
    "k6_1": (2, 2),
    "k6_2": (4, 4),
    **dict.fromkeys(K6, (7, 7)),
    "bwd3": (5, 5),
    **dict.fromkeys(BWD4, (15, 15)),
    **dict.fromkeys(REVERSED, (15, 20)),
}
# Waits where they are not one a product: k6 has branches that wait for P·V before they touch O, bwd3 waits
# for S and dP together, and for dV, dK and dQ.
WAITS = {"bwd3": (2, 2), **dict.fromkeys(K6, (9, 9)), **dict.fromkeys(BWD4, (13, 13))}
WAITS |= dict.fromkeys(REVERSED, (13, 17))
WAITS |= {(stage_id, 64): (11, 11) for stage_id in K6} | {("k6_r64", 128): (11, 11)}  # a tile in two parts
# Slices wait for P·V before it is left or added to.
WAITS |= {(stage_id, 64): (12, 12) for stage_id in SLICES}
WAITS |= {("k6_slices_r64", 128): (12, 12), ("k6_groups_r64", 128): (12, 12)}
WAITS |= {("k6_r192", 64): (13, 13), ("k6_slices_r192", 64): (14, 14)}  # in three parts
WAITS |= dict.fromkeys(SLICES, (10, 10))
SPECIALISED = ("k5", "k6_1", "k6_2", *K6, *BWD4)
# Instructions a thread issues for one score, in the loop over unmasked tiles, if no row's maximum has grown.
# May only fall. (At 64 it was 6.16 in tiles of 256×64 and 5.91 in 192×128, before a tile came in two parts,
# which is a vote more, and faster; and 6.28 before each row had a limit of its own, which is more accurate.)
INSTRUCTIONS_PER_SCORE = {64: 6.34, 128: 6.47, 256: 7.25}
BACKWARD_INSTRUCTIONS_PER_SCORE = {64: 9.13, 128: 13.88}


# Every stage


@every_config
def test_is_hopper_code(stage_id: str, head_dim: int, causal: bool) -> None:
    cubin = cubin_of(compile_stage(stage_id, problem_at(stage_id, head_dim, causal)))
    assert cubin[49] == 90  # the second byte of the ELF header's flags: the compute capability


@every_config
def test_compiles_without_spills(stage_id: str, head_dim: int, causal: bool) -> None:
    found = kernels_of(stage_id, head_dim, causal)
    assert found
    for code in found:
        assert len(code.instructions) > 100
        assert 16 <= code.registers <= 255
        assert code.frame_bytes == 0, f"{code.symbol} has a stack frame"
        assert code.count("LDL|STL") == 0, f"{code.symbol} spills"


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in CUDA_CORES])
def test_first_stages_use_cuda_cores_only(stage_id: str, head_dim: int, causal: bool) -> None:
    for code in kernels_of(stage_id, head_dim, causal):
        assert code.count(r"[HIQDB]G?MMA") == 0
        assert code.count("UTMA|UBLKCP|SYNCS|LDGSTS") == 0
        assert code.count("FFMA|FMUL") > 0


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
        words = 1 if stage_id in BWD4 and stage_id not in ladder.FEW_KEYS else 0
        if stage_id in SLICES:  # which read whether pieces are there, and those
            assert code.count("LDG.*STRONG") > 0
            continue
        assert (code.count("LDG") > 0) == (words > 0)
        # And parts of dK and dV, which are there: of tiles of keys that are split, by a thread of a consumer.
        parts = 0
        if stage_id == "bwd4" and splits(problem_at(stage_id, head_dim, causal)):
            parts = 2 * 64 * head_dim // 128 // 4
        assert code.count("LDG") == code.count("LDG.*STRONG") + parts
    for work in works_of(stage_id, problem_at(stage_id, head_dim, causal)):
        assert work.tensor_flops > 0


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in WGMMA])
def test_registers_move_to_the_consumers(stage_id: str, head_dim: int, causal: bool) -> None:
    for code in kernels_of(stage_id, head_dim, causal):
        specialised = stage_id in SPECIALISED and code.count("HGMMA") > 0
        assert code.count("USETMAXREG") == (2 if specialised else 0)


# Forward


def test_k4_keeps_p_in_registers() -> None:
    for head_dim, causal in INSPECTED["k4"]:
        (code,) = kernels_of("k4", head_dim, causal)
        assert code.count("STS|LDS|STSM|LDSM") == 0
        from_registers = [
            i for i in code.instructions if re.search(r"HGMMA.* R\d+, R\d+, gdesc.*tnspB", i.text)
        ]
        assert len(from_registers) >= 4, "P·V takes P from registers and V with its modes exchanged"
        assert "tnspB" not in "".join(i.text for i in code.instructions if i not in from_registers)


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
    # Each part but the last becomes P before the branch on the next one's vote, so that they run beside each
    # other. The vote itself stands among the exponentials, and its answer is there at the branch.
    votes = [at for at, opcode in enumerate(unmasked) if opcode.startswith("VOTE.ANY")]
    assert len(votes) == config.parts
    branches = [next(at for at in range(vote, len(unmasked)) if unmasked[at] == "BRA") for vote in votes]
    for begin, end in pairwise(branches):
        between = [opcode.split(".")[0] for opcode in unmasked[begin:end]]
        for kind in ("MUFU", "FFMA"):
            assert between.count(kind) >= scores / config.parts - 2


def test_a_cap_counts_nan_as_far() -> None:
    """Not one comparison of a lane's largest score with what the polynomial is for is false of NaN: two of
    a row's first tile, those of tiles seen whole, and of tiles with hidden keys."""
    compiled = compile_stage("k6", problem_at("k6", 128, True).with_(softcap=50.0))
    (code,) = machine_code.disassemble(cubin_of(compiled))
    assert code.count(r"FSETP\.GTU\.(AND|OR)") == 4


def test_far_scores_have_loops_of_their_own() -> None:
    """Four to a reciprocal and sums that saturate instead of minima, or the hardware's tanh; no vote, and
    descriptors in uniform registers though what a barrier was told decides between the loops."""
    compiled = compile_stage("k6", problem_at("k6", 128, True).with_(softcap=50.0))
    (code,) = machine_code.disassemble(cubin_of(compiled))
    steps = [code.usual(loop) for loop in innermost_with_products(code)]
    count = lambda loop, opcode: sum(i.opcode.startswith(opcode) for i in loop)
    of_each = lambda opcode: [count(x, opcode) for x in steps]
    scores = k6.CONFIGS[128].tile_kv // 2
    # near zero, far from it exactly and roughly, with hidden keys
    assert of_each("MUFU.EX2") == [scores, 2 * scores, scores, scores]
    assert of_each("MUFU.RCP") == [0, scores // TOGETHER, 0, 0]
    assert of_each("MUFU.TANH") == [0, 0, scores, 0]
    assert of_each("VOTE.") == [2, 0, 0, 2]
    assert of_each("FFMA.FTZ.SAT") == [0, scores, 0, 0]
    assert not sum(of_each("R2UR"))
    assert not any(count(x, "FMNMX") for x in steps[:2])
    assert count(steps[2], "FMNMX") == 2  # rows' largest scores so far


# Backward


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


@pytest.mark.parametrize("stage_id", ["bwd4", "bwd4_parts"])
def test_bwd4_issues_no_more_instructions_than_before(stage_id: str) -> None:
    for head_dim, causal in INSPECTED[stage_id]:
        code = next(k for k in kernels_of(stage_id, head_dim, causal) if "Backward" in k.symbol)
        unmasked = min(k.last + 1 - k.first for k in innermost_with_products(code))
        scores = 64 * {64: 128, 128: 64}[head_dim] / 128  # of a thread in a step
        assert unmasked / scores <= BACKWARD_INSTRUCTIONS_PER_SCORE[head_dim] + 0.005


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


# A mask aligned at the top left


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
