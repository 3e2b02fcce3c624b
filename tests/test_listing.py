"""Reading machine code: a listing becomes instructions and loops, and these become cycles; what cannot be
read is refused."""

from dataclasses import replace

import pytest

from harness import machine_code
from harness.machine_code import Instruction, KernelCode, Loop, classify, cubin_of, demand, main_loop
from hopper_attention.kernels.contract import Problem, Work


@pytest.mark.parametrize("cubin", [None, b"", b"PTX", "\x7fELF"])
def test_what_carries_no_cubin(cubin: object) -> None:
    class Compiled:
        __cubin__ = cubin

    with pytest.raises(ValueError, match="carries no cubin; compile it with --keep-cubin"):
        cubin_of(Compiled())


def test_disassembler_refuses_other_bytes() -> None:
    with pytest.raises(RuntimeError, match=r"nvdisasm failed: ."):
        machine_code.disassemble(b"\x7fELF and nothing else")


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
