"""What a compiled kernel asks of the hardware, read from its cubin without a GPU.

    cubin → nvdisasm → registers, stack frame, instruction mix of the main loop → cycles per unit → bound

Rates are those of `harness.hardware.Gpu`. Cycles are lower bounds of one SM: they assume that every unit
overlaps perfectly with every other one. Every instruction of the loop body counts as executed, masking
included, but for what a branch behind a vote skips: that is the seldom path.
"""

import functools
import hashlib
import io
import math
import re
import subprocess
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import StringTableSection, SymbolTableSection

from harness.hardware import H100_SXM, Gpu
from hopper_attention.kernels.contract import BYTES_PER_ELEMENT, Problem, Work

WARP = 32
VOTE_AHEAD = 100  # instructions that may be between a vote and its branch: a part's exponentials
# First match wins. Pipes as in the CUDA programming guide's throughput table for compute capability 9.0: IMAD
# runs on half of the FMA lanes, compares, selects, logic and shifts on the ALU's 64.
CLASSES = (
    ("tensor", r"[HQI]GMMA"),
    ("mufu", r"MUFU"),
    ("fp32", r"FFMA|FMUL|FADD"),
    ("imad", r"IMAD"),
    ("convert", r"F2FP|F2F|I2F|F2I"),
    ("shared", r"LDS|STS|LDSM|STSM|ATOMS"),
    ("global", r"LDG|STG|RED|ATOMG|UTMA|UBLKCP|LDC|ULDC"),
    ("local", r"LDL|STL"),
    ("shuffle", r"SHFL"),
    ("sync", r"BAR|SYNCS|WARPSYNC|WARPGROUP|DEPBAR|MEMBAR|FENCE|BSSY|BSYNC|ELECT|NANOSLEEP"),
    ("branch", r"BRA|EXIT|RET|CALL|JMP|BREAK"),
    ("uniform", r"U[A-Z]|R2UR|S2UR|VOTEU"),
    (
        "alu",
        r"LOP3|SHF|PRMT|IADD|ISETP|FSETP|FSEL|SEL|FMNMX|VIMNMX|IMNMX|LEA|VIADD|PLOP3|R2P|P2R|IABS|FLO|POPC|VOTE|"
        r"MOV|CS2R|S2R|LEPC",
    ),
)


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with its modifiers, without the predicate
    text: str


@dataclass(frozen=True)
class Loop:
    """A loop, or another run of instructions, by the first and the last index."""

    first: int
    last: int  # of a loop the branch back

    def holds(self, other: "Loop") -> bool:
        return self.first <= other.first and other.last <= self.last and self != other


@dataclass(frozen=True)
class KernelCode:
    """One kernel of a cubin."""

    symbol: str
    registers: int  # per thread at launch; with setmaxnreg only the launch cap
    frame_bytes: int  # stack frame: more than 0 means spills or indexed registers
    instructions: tuple[Instruction, ...]
    loops: tuple[Loop, ...]
    seldom: tuple[Loop, ...] = ()  # what a branch behind a vote skips, first to last instruction

    def usual(self, loop: Loop) -> list[Instruction]:
        """The instructions of one turn of `loop` in which no vote leads aside."""
        return [self.instructions[at] for at in range(loop.first, loop.last + 1) if not self.is_seldom(at)]

    def is_seldom(self, at: int) -> bool:
        return any(k.first <= at <= k.last for k in self.seldom)

    def count(self, pattern: str) -> int:
        """Instructions whose opcode starts with the regular expression `pattern`."""
        return sum(bool(re.match(pattern, i.opcode)) for i in self.instructions)


@dataclass(frozen=True)
class Demand:
    """Cycles one SM needs for one pass of a kernel's main loop, per unit, and what bounds it."""

    work: Work
    code: KernelCode
    mix: dict[str, int]  # instructions a thread executes in one pass, by class
    cycles: dict[str, float]  # by unit

    @property
    def unit(self) -> str:
        return max(self.cycles, key=self.cycles.get)

    def seconds(self, gpu: Gpu = H100_SXM) -> float:
        """Least time of all passes: the busiest unit at its peak rate, on the SMs the launch can reach."""
        sms = min(gpu.sms, self.work.ctas)
        return self.work.passes * self.cycles[self.unit] / sms / (gpu.clock_ghz * 1e9)


def cubin_of(compiled: object) -> bytes:
    """The machine code of a kernel compiled by `hopper_attention.launch`."""
    cubin = compiled.__cubin__
    if not isinstance(cubin, bytes) or not cubin.startswith(b"\x7fELF"):
        raise ValueError("the compiled kernel carries no cubin; compile it with --keep-cubin")
    return cubin


def identity(compiled: object) -> str:
    """The sha256 of the machine code, symbol names normalised.

    The compiler is deterministic at a pinned version, so that the hash names what ran. A kernel's symbol
    holds its module's path and its class, which change nothing that runs: each is replaced by its number, and
    what follows from a name's length, the offsets in the file and the tables of names, is left out.
    """
    elf = ELFFile(io.BytesIO(cubin_of(compiled)))
    tables = [section for section in elf.iter_sections() if isinstance(section, SymbolTableSection)]
    symbols = [symbol for table in tables for symbol in table.iter_symbols()]
    kernels = [symbol.name for symbol in symbols if symbol["st_info"]["type"] == "STT_FUNC"]

    def plain(name: str) -> str:
        for number, kernel in enumerate(kernels):
            name = name.replace(kernel, f"kernel {number}")
        return name

    digest = hashlib.sha256(repr((elf["e_machine"], elf["e_flags"])).encode())
    for section in elf.iter_sections():
        header = section.header
        about = [header[f"sh_{x}"] for x in ("type", "flags", "info", "link", "entsize", "addralign")]
        digest.update(repr((plain(section.name), about)).encode())
        if isinstance(section, SymbolTableSection):
            for symbol in section.iter_symbols():
                about = [symbol[f"st_{x}"] for x in ("info", "other", "shndx", "value", "size")]
                digest.update(repr((plain(symbol.name), about)).encode())
        elif not isinstance(section, StringTableSection):
            content = b"" if header["sh_type"] == "SHT_NOBITS" else section.data()
            digest.update(repr(header["sh_size"]).encode() + content)
    return digest.hexdigest()


def disassemble(cubin: bytes) -> list[KernelCode]:
    """Every kernel in the cubin. Raises RuntimeError when nvdisasm (nvidia-cuda-nvdisasm) is missing or
    fails."""
    return list(_disassembled(cubin))


@functools.lru_cache(maxsize=32)  # a second each, and who asks for one problem asks for the next one too
def _disassembled(cubin: bytes) -> tuple[KernelCode, ...]:
    programs = sorted(Path(sysconfig.get_paths()["purelib"], "nvidia").glob("*/bin/nvdisasm"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            run = subprocess.run(
                [programs[0] if programs else "nvdisasm", file.name], capture_output=True, text=True
            )
        except OSError as error:
            raise RuntimeError(f"nvdisasm did not start ({error}); install nvidia-cuda-nvdisasm") from error
    if run.returncode:
        raise RuntimeError(f"nvdisasm failed: {run.stderr.strip()}")
    return tuple(_parse(run.stdout))


def _parse(listing: str) -> list[KernelCode]:
    attribute = r"EIATTR_%s\n.*?index@\((\S+?)\)\n.*?\.word\s+(0x[0-9a-f]+)"
    registers = {k: int(v, 16) for k, v in re.findall(attribute % "REGCOUNT", listing, re.S)}
    frames = {k: int(v, 16) for k, v in re.findall(attribute % "FRAME_SIZE", listing, re.S)}
    kernels = []
    for symbol, body in re.findall(r"^//-+ \.text\.(\S+) .*?\n(.*?)(?=^//-+ |\Z)", listing, re.S | re.M):
        symbol = next(
            (name for name in registers if name.startswith(symbol)), symbol
        )  # banners cut long names
        instructions, labels, branches = [], {}, []
        for line in body.splitlines():
            if label := re.match(r"\s*(\.L\S*):", line):
                labels[label[1]] = len(instructions)
            elif found := re.match(
                r"\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z]\S*)(.*?);", line
            ):
                if target := re.search(r"`\((\.L\S*)\)", found[3]):
                    branches.append((len(instructions), target[1]))
                instructions.append(Instruction(found[2], f"{found[1] or ''}{found[2]}{found[3]}"))
        loops = [Loop(labels[t], at) for at, t in branches if labels.get(t, at + 1) < at]
        # A slow path laid out behind the kernel's end jumps back too; what it spans is not a loop.
        loops = [k for k in loops if not any(i.opcode == "EXIT" for i in instructions[k.first : k.last])]
        voted = [(at, t) for at, t in branches if _follows_a_vote(instructions, at)]
        skipped = [Loop(at + 1, labels[t] - 1) for at, t in voted if labels.get(t, at) > at]
        # A branch that leads to the seldom case, laid out elsewhere, would skip products or an end.
        skips = lambda k, pattern: any(
            re.match(pattern, i.opcode) for i in instructions[k.first : k.last + 1]
        )
        seldom = [k for k in skipped if not skips(k, "[HQ]GMMA|EXIT")]
        kernels.append(
            KernelCode(
                symbol,
                registers[symbol],
                frames[symbol],
                tuple(instructions),
                tuple(loops),
                tuple(seldom),
            )
        )
    return kernels


def _follows_a_vote(instructions: list[Instruction], branch: int) -> bool:
    """Whether a vote decides on a branch; ptxas may put other business between, such as exponentials."""
    if not (guard := re.match(r"@!?(U?P\w+)", instructions[branch].text)):
        return False
    sets_it = rf"(?:@\S+\s+)?\S+\s+(?:\w+, )?{guard[1]},"  # the first operand, or the second
    for i in reversed(instructions[max(0, branch - VOTE_AHEAD) : branch]):
        if i.opcode.startswith("BRA"):
            return False
        if re.match(sets_it, i.text):
            return i.opcode.startswith("VOTE")
    return False


def classify(opcode: str) -> str:
    return next((name for name, pattern in CLASSES if re.match(pattern, opcode)), "other")


def main_loop(code: KernelCode) -> Loop:
    """The smallest loop that holds most of the kernel's arithmetic."""
    weight = {"fp32": 1, "mufu": 1, "tensor": 1000}
    worth = [weight.get(classify(i.opcode), 0) for i in code.instructions]
    inside = {k: sum(worth[k.first : k.last + 1]) for k in code.loops}
    if not inside:
        raise ValueError(f"{code.symbol} has no loop")
    enough = [k for k in code.loops if inside[k] >= 0.7 * max(inside.values())]
    return min(enough, key=lambda k: k.last - k.first)


def demand(code: KernelCode, work: Work, gpu: Gpu = H100_SXM) -> Demand:
    """Instructions and cycles of one pass. Raises ValueError when `work` does not describe this machine
    code."""
    body = main_loop(code)
    # A loop without arithmetic is a barrier being polled: it costs what it waits, which nobody knows here.
    works = lambda k: any(
        classify(i.opcode) in ("fp32", "mufu", "tensor") for i in code.instructions[k.first : k.last]
    )
    nest = [k for k in code.loops if (k == body or body.holds(k)) and works(k)]
    innermost = sorted((k for k in nest if not any(k.holds(o) for o in nest)), key=lambda k: k.first)
    if len(innermost) != len(work.trips):
        raise ValueError(
            f"{work.kernel}: {len(innermost)} innermost loops in the main loop, not {len(work.trips)}"
        )
    mix, smem_bytes, tensor_flops, ffma = Counter(), 0, 0, 0
    tensor_work = 0.0  # FLOPs as of 16 bits: of 8 a clock has twice as many
    for at in range(body.first, body.last + 1):
        if code.is_seldom(at):
            continue
        times = next((n for k, n in zip(innermost, work.trips) if k.first <= at <= k.last), 1)
        opcode = code.instructions[at].opcode
        kind = classify(opcode)
        mix[kind] += times
        ffma += times * opcode.startswith(("FFMA", "FMUL"))  # the first product of a sum from zero is an FMUL
        if kind == "shared":
            width = re.search(r"\.(64|128)\b", opcode)
            smem_bytes += times * WARP * (int(width[1]) // 8 if width else 4)
        if shape := re.search(r"GMMA\.(\d+)x(\d+)x(\d+)", opcode):
            m, n, k = (int(x) for x in shape.groups())
            flops = times * 2 * m * n * k / 4  # one warp's quarter
            element = 1 if opcode.startswith("Q") else BYTES_PER_ELEMENT
            tensor_flops += flops
            tensor_work += flops * element / BYTES_PER_ELEMENT
            # B comes from shared memory; so does A, unless a register stands there: `R24, R4, gdesc[…]`.
            from_smem = n if re.search(r"R\d+, R\d+, gdesc", code.instructions[at].text) else m + n
            smem_bytes += times * from_smem * k * element / 4
    # Exponents and rescaling multiply too, but little beside products on CUDA cores.
    if not work.ffma <= ffma or (work.ffma and ffma > 1.1 * work.ffma + 64):
        raise ValueError(
            f"{work.kernel}: {ffma} products in one pass, not the {work.ffma} needed; are the trips right?"
        )
    warps = work.threads / WARP
    if not math.isclose(warps * tensor_flops, work.tensor_flops):
        raise ValueError(
            f"{work.kernel}: {warps * tensor_flops:.0f} FLOPs on tensor cores in one pass, "
            f"not the {work.tensor_flops:.0f} needed; are the trips right?"
        )
    per_lane = {
        unit: warps * WARP / lanes for unit, lanes in (("fma", gpu.fp32_lanes), ("alu", gpu.alu_lanes))
    }
    cycles = {
        "tensor": warps * tensor_work / gpu.tensor_flops_per_clock,
        "MUFU": warps * WARP * mix["mufu"] / gpu.mufu_lanes,
        "FP32": max(per_lane["fma"] * (mix["fp32"] + mix["imad"]), 2 * per_lane["fma"] * mix["imad"]),
        "ALU": per_lane["alu"] * (mix["alu"] + mix["convert"]),
        "issue": warps * sum(mix.values()) / gpu.issue_slots,
        "shared": warps * smem_bytes / gpu.smem_bytes_per_clock,
        "HBM": work.hbm_bytes / (gpu.hbm_bytes_per_s / gpu.sms / (gpu.clock_ghz * 1e9)),
    }
    return Demand(work, code, dict(mix.most_common()), cycles)


def inspect(compiled: object, works: list[Work]) -> list[Demand]:
    """One `Demand` for each kernel that `works` names, in that order."""
    kernels = disassemble(cubin_of(compiled))
    demands = []
    for work in works:
        found = [k for k in kernels if re.search(rf"{work.kernel}(_|\d|$|[A-Z])", k.symbol)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} kernels named {work.kernel!r} in the cubin")
        demands.append(demand(found[0], work))
    return demands


def bound_tflops(problem: Problem, demands: list[Demand], gpu: Gpu = H100_SXM) -> float:
    """TFLOP/s of `problem` if every kernel ran at its busiest unit's peak rate, one kernel after the
    other."""
    return problem.flops / sum(d.seconds(gpu) for d in demands) / 1e12
