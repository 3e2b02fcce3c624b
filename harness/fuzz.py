"""Random problems with windows, soft caps, sinks and packed sequences, gradients of short packed ones, and
plain problems of few queries to many keys, against float64 on the GPU.

    python -m harness.fuzz              problems 0…2047 of each set: library/fuzz.json of results
    python -m harness.fuzz 300 40       40 from the 300th on; only the whole is ever written
    python -m harness.fuzz --set few    few queries alone

A problem follows from its number (`problem_of`) and from nothing else. It goes through the library's own call
(`attention` or `flash_attn_varlen_func`), in the layout that the number says, and its outputs through the
pass rule; gradients are of the O and LSE that the reference gives. The file says which numbers passed, of how
many sequences, rows and keys, and of each kernel that ran its machine code's identity.
"""

import argparse
import functools
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from harness import machine_code, row_files, timing
from harness.inputs import hopper_gpu
from harness.measuring import chosen_stage, job_of
from harness.policies import Given, random_given
from harness.reference import rounding_of
from hopper_attention import attention, policies
from hopper_attention.kernels import division, ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import BACKWARD, compile_kernel
from hopper_attention.precompile import Job, fill

COUNT = 2048
PIECE = 64  # problems that a process takes at a time
FEW = "few"  # the set of plain forward problems
SHORT = "short"  # of gradients of packed sequences that are one tile of keys; the others are of one direction
SETS = ("fwd", "bwd", FEW, SHORT)
KEYS_MAX = 400_000  # of a batch's heads, of few queries
ROWS_MAX = 6000  # rows of all heads and batches together, so that float64 takes milliseconds
LAYOUTS = ("heads first", "rows first", "of one tensor", "padded rows")
# What is compiled in, of which there are thousands; a problem's number chooses among these.
KINDS = 36


@dataclass(frozen=True)
class Kind:
    """What of a problem is compiled in."""

    head_dim: int
    dtype: str
    mask: str  # "full", "causal", "top left" or "window"
    softcap: bool
    sink: bool
    packed: bool
    lse_grad: bool


def kinds() -> list[Kind]:
    """KINDS of them: each value of each field often, and every pair of masks and policies."""
    rng = random.Random(22)
    found: list[Kind] = []
    combined = [
        (m, c, s, p) for m in ("window", "causal", "full") for c in (0, 1) for s in (0, 1) for p in (0, 1)
    ]
    for i in range(KINDS):
        mask, softcap, sink, packed = combined[i % len(combined)]
        if mask != "window" and not (softcap or sink or packed):
            mask, softcap, sink = "top left", True, mask == "causal"
        head_dim = (64, 128, 256, 128)[(i + i // len(combined)) % 4]
        dtype = "float16" if rng.random() < 0.3 else "bfloat16"
        found.append(Kind(head_dim, dtype, mask, bool(softcap), bool(sink), bool(packed), rng.random() < 0.4))
    return found


@dataclass(frozen=True)
class Drawn:
    """A random problem, and what else its number says."""

    which: str  # set
    number: int
    problem: Problem
    scale: float
    padding: tuple[tuple[int, int], ...] | None
    layout: str
    outside: float


def length_of(rng: random.Random, most: int) -> int:
    """Often about the ends of tiles, sometimes 0 or 1."""
    kind = rng.random()
    if kind < 0.12:
        return rng.choice((0, 1, 2))
    if kind < 0.5:
        return max(0, min(most, rng.choice((64, 128, 192, 256, 512)) + rng.randint(-1, 1)))
    return int(math.exp(rng.uniform(0, math.log(max(1, most)))))


def problem_of(number: int, which: str) -> Drawn:
    """The number-th random problem of a set."""
    rng = random.Random(f"{which} {number}")
    if which in (FEW, SHORT):
        return (_few if which == FEW else _short)(number, rng)
    direction = which
    kind = kinds()[number % KINDS]
    kv_heads = rng.choice((1, 1, 2, 3))
    heads = kv_heads * rng.choice((1, 1, 2, 4, 8))
    fields: dict[str, object] = {"softcap": rng.choice((1.0, 5.0, 30.0, 50.0)) if kind.softcap else 0.0}
    if kind.mask == "window":
        bound = lambda: rng.choice((-1, 0, 1, 63, 64, 65, 127, 128, rng.randint(0, 700)))
        window = bound(), rng.choice((0, 0, bound()))
        fields["window"] = (17, 0) if window == (-1, -1) else window
    causal = kind.mask in ("causal", "top left")
    most = max(64, ROWS_MAX // heads)
    padding = None
    if kind.packed:
        count = rng.choice((1, 2, 3, 7, 30, 200))
        sequences = []
        for _ in range(count):
            queries = length_of(rng, max(4, 3 * most // count))
            keys = queries if rng.random() < 0.6 else length_of(rng, max(4, 3 * most // count))
            sequences.append((queries, keys))
        padding, extents = _packing(rng, sequences, 0.4)
        fields |= {"sequences": tuple(sequences)}
        batch = 1
    else:
        batch = rng.choice((1, 1, 2, 3))
        queries = max(1, length_of(rng, max(4, most // batch)))
        keys = queries if rng.random() < 0.5 else max(1, length_of(rng, 2 * most))
        extents = [queries, keys]
    problem = Problem(
        batch, heads, kv_heads, *extents, kind.head_dim, causal, kind.dtype, direction,
        top_left=kind.mask == "top left", sink=kind.sink, scaled=True,
        lse_grad=kind.lse_grad and direction == "bwd", **fields,
    )  # fmt: skip
    scale = rng.choice((1.0, 1.0, 0.5, 3.0)) * kind.head_dim**-0.5
    outside = rng.choice((math.nan, math.inf))
    return Drawn(which, number, problem, scale, padding, rng.choice(LAYOUTS), outside)


def _packing(
    rng: random.Random, sequences: list[tuple[int, int]], padded: float
) -> tuple[tuple[tuple[int, int], ...] | None, list[int]]:
    """Rows between the sequences, with a probability of `padded`, and those of the tensors, some behind the
    last one. Where no sequence has both queries and keys one is added."""
    if not any(q and kv for q, kv in sequences):
        sequences.append((5, 9))
    padding = None
    if rng.random() < padded:
        padding = tuple((rng.randint(0, 9), rng.randint(0, 70)) for _ in sequences)
    behind = rng.choice((0, 0, 1, 130))
    return padding, [sum(x) + behind for x in zip(*sequences, *padding or ())]


def _few(number: int, rng: random.Random) -> Drawn:
    """As many rows as a group's heads and queries may be, and keys about the ends of chunks, or many."""
    kv_heads = rng.choice((1, 1, 2, 3, 8))
    heads = kv_heads * rng.choice((1, 1, 2, 4, 5, 8, 16))
    queries = rng.choice((1, 1, 2, 3, 4, 8, 15, 16, 17, 32, 64, 100, 128, 129))
    chunk = rng.choice((32, 64, 128, 512, 1024, 4096))
    keys = queries + rng.choice((1, 2, chunk - queries, chunk + 1, chunk, rng.randint(1, 20000)))
    batch = max(1, min(rng.choice((1, 1, 2, 3, 9)), KEYS_MAX // (heads * max(1, keys))))
    causal = rng.random() < 0.6
    problem = Problem(
        batch, heads, kv_heads, queries, max(queries + 1, keys), rng.choice((64, 128, 128, 256)), causal,
        rng.choice(("bfloat16", "bfloat16", "float16")), top_left=causal and rng.random() < 0.1,
        scaled=rng.random() < 0.3,
    )  # fmt: skip
    scale = (rng.choice((0.5, 3.0)) if problem.scaled else 1.0) * problem.head_dim**-0.5
    return Drawn(FEW, number, problem, scale, None, rng.choice(LAYOUTS), math.nan)


def _short(number: int, rng: random.Random) -> Drawn:
    """Up to ONE_TILE_KEYS keys each, mostly as many queries, sometimes more."""
    most, kv_heads = division.ONE_TILE_KEYS, rng.choice((1, 1, 2, 3))
    heads = kv_heads * rng.choice((1, 1, 2, 4, 8))
    sequences = []
    for _ in range(rng.choice((1, 2, 3, 7, 30, 200))):
        keys = min(most, length_of(rng, most))
        queries = keys if rng.random() < 0.7 else length_of(rng, 700)
        sequences.append((queries, keys))
    padding, extents = _packing(rng, sequences, 0.3)
    problem = Problem(
        1, heads, kv_heads, *extents, rng.choice((64, 128)), rng.random() < 0.6,
        rng.choice(("bfloat16", "bfloat16", "float16")), "bwd", scaled=True, lse_grad=rng.random() < 0.3,
        sequences=tuple(sequences),
    )  # fmt: skip
    scale = rng.choice((1.0, 1.0, 0.5, 3.0)) * problem.head_dim**-0.5
    outside = rng.choice((math.nan, math.inf))
    return Drawn(SHORT, number, problem, scale, padding, rng.choice(LAYOUTS), outside)


def longest_of(drawn: Drawn) -> int:
    """What a forward call is told of how many queries a sequence has at most: nothing, what is true, or the
    mean, with which they seem equally long and are not. What a backward one is of keys: nothing, or what is
    true."""
    sequences = drawn.problem.sequences
    if not sequences:
        return 0
    if drawn.problem.direction == "bwd":
        tells = drawn.which == SHORT or drawn.number // (2 * KINDS) % 2
        return max(n for _, n in sequences) if tells else 0
    told = 0, max(n for n, _ in sequences), -(-drawn.problem.seqlen_q // len(sequences))
    return told[drawn.number // KINDS % 3]


def stage_of(drawn: Drawn) -> str:
    """The stage that the library runs."""
    problem = policies.without_idle_window(drawn.problem)
    return chosen_stage(problem, is_deterministic(drawn), longest_of(drawn))


def is_deterministic(drawn: Drawn) -> bool:
    """Whether a backward problem goes to the deterministic kernels; each kind goes to both."""
    return drawn.number // KINDS % 2 == 0


# ---- running one ------------------------------------------------------------------------------------------


def laid_out(x: torch.Tensor, layout: str, packed: bool) -> torch.Tensor:
    """x (batch, heads, rows, head_dim) as a call takes it, packed (rows, heads, head_dim), in memory as the
    layout says."""
    batch, heads, rows, head_dim = x.shape
    if layout == "rows first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "of one tensor":
        whole = x.new_full((batch, rows, heads, 3, head_dim), math.nan)
        x = whole[:, :, :, 1].copy_(x.transpose(1, 2)).transpose(1, 2)
    elif layout == "padded rows":
        whole = x.new_full((batch, heads, rows, head_dim + 8), math.nan)
        x = whole[..., :head_dim].copy_(x)
    return x[0].transpose(0, 1) if packed else x


def check(drawn: Drawn) -> list[str]:
    """What is wrong with what the library computes."""
    problem = drawn.problem
    packed = problem.sequences is not None
    given = random_given(
        problem, drawn.number, scale=drawn.scale, padding=drawn.padding, outside=drawn.outside
    )
    more, options = arguments_of(given)
    tensors = [laid_out(x, drawn.layout, packed) for x in (given.q, given.k, given.v)]
    as_judged = lambda x: x.transpose(0, 1)[None] if packed and x.dim() == 3 else x
    if not problem.policies:
        given.softmax_scale = drawn.scale if problem.scaled else None
        masks = {"causal": problem.causal, "top_left": problem.top_left}
        call = functools.partial(attention, *tensors, **masks, softmax_scale=given.softmax_scale)
        o, lse = call(return_lse=True)
        if not call().equal(o):
            return ["without the lse o is another"]
        outputs, stage_id = {"o": o, "lse": lse}, chosen_stage(problem)
    elif problem.direction == "fwd":
        o, lse = policies.forward(*tensors, more, *options, longest=longest_of(drawn))
        outputs = {"o": as_judged(o), "lse": lse[None] if packed else lse}
        stage_id = stage_of(drawn)
    else:
        o, lse = given.saved
        saved = [laid_out(x, drawn.layout, packed) for x in (given.do, o)]
        dlse = given.dlse if given.dlse is None or not packed else given.dlse[0]
        lse = lse[0] if packed else lse
        deterministic = is_deterministic(drawn)
        saved = saved[0], *tensors, saved[1], lse.contiguous(), dlse
        found = policies.backward(*saved, more, *options, deterministic, longest_kv=longest_of(drawn))
        outputs = dict(zip(("dq", "dk", "dv"), map(as_judged, found)))
        if problem.sink:
            outputs["dsink"] = found[3]
        stage_id = BACKWARD
    stage, module = ladder.load(stage_id)
    return given.judge(outputs, rounding_of(stage, module, problem, **stage.options), poisoned=False)


def arguments_of(given: Given) -> tuple[policies.Tensors, tuple[object, ...]]:
    """What `policies.forward` takes beside q, k and v."""
    problem = given.problem
    more = policies.Tensors(given.sink)
    if problem.sequences is not None:
        (cu_q, cu_kv), used = given.lengths()
        more = policies.Tensors(given.sink, cu_q, cu_kv, *used)
    window = problem.window or (-1, -1)
    return more, (given.softmax_scale, problem.causal, problem.top_left, window, problem.softcap)


def jobs(drawn: list[Drawn]) -> list[Job]:
    """The kernels that they run."""
    found: dict[str, Job] = {}
    for one in drawn:
        job = job_of(stage_of(one), policies.without_idle_window(one.problem))
        found[repr(job)] = job
    return list(found.values())


def run(first: int, count: int, sets: tuple[str, ...] = SETS) -> Iterator[tuple[Drawn, list[str]]]:
    """Each problem, and what was wrong with it."""
    for which in sets:
        for number in range(first, first + count):
            drawn = problem_of(number, which)
            try:
                yield drawn, check(drawn)
            except (ValueError, NotImplementedError) as error:  # of the library: a refusal is a failure here
                yield drawn, [f"{type(error).__name__}: {error}"]


def run_piece(first: int, count: int, which: str) -> list[tuple[int, list[str]]]:
    """Of each problem in a range its number, and what was wrong with it."""
    return [(drawn.number, failures) for drawn, failures in run(first, count, (which,))]


def run_in_processes(
    first: int, count: int, sets: tuple[str, ...], processes: int
) -> Iterable[tuple[Drawn, list[str]]]:
    """As `run`, in so many processes: what takes time is the reference's many small operations, which keep no
    GPU busy."""
    pieces = [
        (begin, min(PIECE, first + count - begin), which)
        for which in sets
        for begin in range(first, first + count, PIECE)
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for (*_, which), found in zip(pieces, pool.map(run_piece, *zip(*pieces))):
            for number, failures in found:
                yield problem_of(number, which), failures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("first", nargs="?", type=int, default=0, help="number of the first problem")
    parser.add_argument("count", nargs="?", type=int, default=COUNT, help="problems of each set")
    parser.add_argument("--set", choices=SETS, help="one set alone")
    parser.add_argument(
        "--processes", type=int, default=1, help="how many share the GPU, of which one takes up to 10 GB"
    )
    parser.add_argument("--no-save", action="store_true", help="write nothing of a whole run either")
    args = parser.parse_args(arguments)
    whole = (args.first, args.count, args.set) == (0, COUNT, None)
    if not hopper_gpu():
        print("harness.fuzz: there is no Hopper GPU here", file=sys.stderr)
        return 2
    sets = (args.set,) if args.set else SETS
    every = [problem_of(n, x) for x in sets for n in range(args.first, args.first + args.count)]
    kernels = jobs(every)
    fill(kernels)
    print(f"{len(kernels)} kernels", flush=True)
    begin, failed, passed = time.perf_counter(), [], dict.fromkeys(sets, 0)
    for drawn, failures in run_in_processes(args.first, args.count, sets, args.processes):
        passed[drawn.which] += not failures
        if failures:
            failed.append(drawn)
            print(f"{drawn.which} {drawn.number}: {drawn.problem}, {drawn.layout}", flush=True)
            print(*(f"    {x:.300}" for x in failures), sep="\n", flush=True)
    seconds = time.perf_counter() - begin
    print(f"{sum(passed.values())} of {len(every)} problems passed in {seconds:.0f} s")
    if whole and not args.no_save and not failed:
        rows = [summary(x, [y for y in every if y.which == x], args.first) for x in sets]
        for stage_id, least, options in kernels:
            identity = machine_code.identity(compile_kernel(stage_id, least, **options))
            kernel = {"stage": stage_id, "kernel": str(least), "options": options}
            rows.append(kernel | {"cubin_sha256": identity})
        print(row_files.save("fuzz", rows, timing.environment({})))
    return 1 if failed else 0


def summary(which: str, drawn: list[Drawn], first: int) -> dict[str, object]:
    """What was tried, of one set."""
    problems = [x.problem for x in drawn]
    count = lambda wanted: sum(map(bool, map(wanted, problems)))
    return {
        "direction": which,
        "first": first,
        "problems": len(problems),
        "failures": 0,
        "windows": count(lambda x: x.window),
        "softcaps": count(lambda x: x.softcap),
        "sinks": count(lambda x: x.sink),
        "packed": count(lambda x: x.sequences is not None),
        "sequences": sum(len(x.sequences or ()) for x in problems),
        "told_the_longest": sum(longest_of(x) > 0 for x in drawn) if which != FEW else None,
        "deterministic": sum(map(is_deterministic, drawn)) if which == "bwd" else None,
        "grouped_heads": count(lambda x: x.heads != x.kv_heads),
        "layouts": {name: sum(x.layout == name for x in drawn) for name in LAYOUTS},
    }


if __name__ == "__main__":
    sys.exit(main())
