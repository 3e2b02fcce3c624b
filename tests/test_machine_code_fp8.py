"""What k7 compiles to for sm_90a, with exponentials and without; without a GPU."""

import re

import pytest
from compiled_stages import (
    disassemble_once,  # noqa: F401
    innermost_with_products,
    kernels_of,
    problem_at,
    works_of,
)
from rotating import some

from harness import machine_code
from harness.sweep import HEAD_DIMS
from hopper_attention.kernels import k7
from hopper_attention.launch import compile_stage

K7_CONFIGS = [(d, causal) for d in (*HEAD_DIMS, 256) for causal in (False, True)]
# Instructions a thread issues for one score in k7's loop over unmasked tiles. May only fall.
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
