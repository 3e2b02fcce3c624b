"""The cases every stage must compute correctly or refuse by name; run by `python ref_check.py <stage>`.

A case is a generator of messages, one for each thing that went wrong. Without a GPU the stage's NumPy model
stands in and no kernel is executed.
"""

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness import models, policy_cases, reference  # noqa: F401  policy_cases registers its own
from harness.inputs import as_read, poison, random_inputs
from harness.registry import CASES, case, same
from harness.results import repository
from harness.stages import backward, forward, prepare, prepare_backward, starts_at_zero
from harness.sweep import HEAD_DIMS
from hopper_attention import attention, attention_backward, production
from hopper_attention.checks import problem_of
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import LazyMaximum, Problem, Tensors
from hopper_attention.kernels.device.fp8 import BLOCK
from hopper_attention.launch import BACKWARD, LIBRARY, compile_stage, reachable

LENGTHS = (1, 3, 63, 64, 65, 113, 127, 128, 129, 203, 255, 257, 1023, 1025, 4097)
NEEDLE_LENGTHS = (16, 64, 65, 257, 1024, 4097)
LONG = 8257  # twice as many keys as in any other case
UNEQUAL = 257, 1025
worst_seen: dict[str, float] = {}
Outputs = dict[str, torch.Tensor]  # o and lse, or dq, dk and dv


def small(stage_id: str, **changes: object) -> list[Problem]:
    """A ragged problem of the stage's direction for each head_dim and mask."""
    direction = ladder.load(stage_id)[0].direction
    plain = Problem.square(2, 3, 203, 64, False, direction=direction)
    return [plain.with_(head_dim=d, causal=causal, **changes) for d in HEAD_DIMS for causal in (False, True)]


def inputs_for(problem: Problem, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random q, k, v, and of a backward problem also o, lse, do."""
    q, k, v, *do = random_inputs(problem, seed=seed)
    return reference.Expected(q, k, v, problem.causal, *do, top_left=problem.top_left).inputs


def ready(
    stage_id: str, inputs: tuple[torch.Tensor, ...], causal: bool, top_left: bool = False
) -> tuple[object, object, Tensors]:
    """`prepare` or `prepare_backward`: (module, compiled, tensors) of a stage for `Expected.inputs`."""
    if len(inputs) == 3:
        return prepare(*inputs, causal=causal, top_left=top_left, stage=stage_id)
    *inputs, do = inputs
    return prepare_backward(do, *inputs, causal=causal, top_left=top_left, stage=stage_id)


def run(
    stage_id: str,
    inputs: tuple[torch.Tensor, ...],
    causal: bool,
    out: object = None,
    top_left: bool = False,
) -> Outputs:
    """The stage's outputs through `stages.forward` or `stages.backward`, for `Expected.inputs`."""
    options = {"causal": causal, "top_left": top_left, "stage": stage_id, "out": out}
    if len(inputs) == 3:
        return dict(zip(("o", "lse"), forward(*inputs, **options)))
    *inputs, do = inputs
    return dict(zip(("dq", "dk", "dv"), backward(do, *inputs, **options)))


def run_poisoned(
    stage_id: str, inputs: tuple[torch.Tensor, ...], causal: bool, top_left: bool = False
) -> Outputs:
    """The stage's outputs, into outputs and scratch filled with NaN."""
    module, compiled, tensors = ready(stage_id, inputs, causal, top_left)
    module.run_kernel(compiled, poison(tensors))
    return tensors.outputs


def judged(stage_id: str, q, k, v, do, causal: bool, what: object, top_left: bool = False) -> Iterator[str]:
    """The pass rule; `do` is None for a forward stage."""
    stage, module = ladder.load(stage_id)
    q, k, v = as_read(stage.direction, q, k, v)
    expected = reference.Expected(q, k, v, causal, do, top_left)
    module, compiled, tensors = ready(stage_id, expected.inputs, causal, top_left)
    shape = problem_of(q, k, v, causal, top_left).with_(direction=stage.direction)
    rounding = reference.rounding_of(stage, module, shape, **stage.options)
    yield from noted(expected.run(module, compiled, tensors, rounding), what)


def as_multiplied(stage_id: str, problem: Problem, q, k, v) -> tuple[torch.Tensor, ...]:
    """q, k and v as a forward stage multiplies them: as `as_read`, or as it quantises them itself."""
    stage, module = ladder.load(stage_id)
    rounding = reference.rounding_of(stage, module, problem, **stage.options)
    if isinstance(rounding, LazyMaximum) and rounding.quantized:
        return reference.Expected(q, k, v, problem.causal).quantized(rounding.quantized).inputs
    return as_read(problem.direction, q, k, v)


def noted(verdict: reference.Verdict, what: object) -> Iterator[str]:
    """The verdict's failures; its ratios join the worst seen."""
    for name in ("max_ratio", "rms_ratio", "block_rms_ratio", "row_rms_ratio", "lse_error"):
        worst_seen[name] = max(worst_seen.get(name, 0.0), getattr(verdict, name))
    for failure in verdict.failures:
        yield f"{what}: {failure}"


def differing(stage_id: str, found: Outputs, expected: Outputs) -> list[str]:
    """The outputs that differ. They must be bit-identical, but for a stage with float atomics: there sums of
    another order, rounded to 16 bits, may differ by a unit in the last place, or where they cancel by a
    little of what was added."""
    if not ladder.load(stage_id)[0].atomics:
        return [name for name, x in found.items() if not same(x, expected[name])]
    close = lambda x, y: torch.allclose(
        x.float(), y.float(), rtol=2**-7, atol=2**-12 * y.abs().max().item() if y.numel() else 0
    )
    return [name for name, x in found.items() if not close(x, expected[name])]


def refused(call: Callable[[], object], error: type[Exception], words: str) -> Iterator[str]:
    try:
        call()
    except error as raised:
        if words not in str(raised):
            yield f"refused with {raised!s:.120}, expected a message with {words!r}"
    else:
        yield f"not refused, expected {error.__name__} with {words!r}"


# ---- 1 to 4: the values ------------------------------------------------------------------------------------


@case()
def lengths(stage_id, args):
    for n in LENGTHS:
        for problem in small(stage_id, seqlen_q=n, seqlen_kv=n):
            q, k, v, *do = random_inputs(problem, seed=n)
            yield from judged(stage_id, q, k, v, *(do or [None]), problem.causal, problem)


@case("fwd")
def needle(stage_id, args):
    for n in NEEDLE_LENGTHS:
        for problem in small(stage_id, batch=1, heads=2, kv_heads=2, seqlen_q=n, seqlen_kv=n):
            yield from needle_in(stage_id, problem)


def needle_in(stage_id: str, problem: Problem) -> Iterator[str]:
    """What a stage makes of `needle_inputs`, or of a backward problem of `needle_gradient_inputs`."""
    mask = {"causal": problem.causal, "top_left": problem.top_left}
    if problem.direction == "bwd":
        inputs, exact = reference.needle_gradient_inputs(problem, "cuda")
        yield from reference.needles_missed(problem, run_poisoned(stage_id, inputs, **mask), exact)
        return
    # Truncated sums of 8-bit products leave a logit up to 0.25 % short. Of one of 64 to 128 that is less than
    # what a tile that is counted twice adds to the LSE; the other keys then have up to e⁻¹⁶.
    amplitude, trace = (8.0, 2.0**-20) if problem.in_fp8 else (32.0, 0.0)
    q, k, v, target = reference.needle_inputs(problem, "cuda", amplitude)
    found = run_poisoned(stage_id, as_read(problem.direction, q, k, v), **mask)
    q, k, v = as_multiplied(stage_id, problem, q, k, v)
    values = v[:, :, target].to(found["o"].dtype)
    wrong = (~((found["o"] - values).abs() <= trace)).any(-1).nonzero()  # also where O is NaN
    if len(wrong):
        row = wrong[0, 2].item()
        key = target[row].item()
        yield f"{problem}: {len(wrong)} rows miss their key, first row {row} (key {key})"
    ref_lse = reference.reference(q, k, v, **mask)[1]
    off = (found["lse"] - ref_lse).abs()
    slack = math.log(2) / 2 if problem.in_fp8 else reference.LSE_TOLERANCE * ref_lse.abs()
    if not (off <= slack).all():
        yield f"{problem}: LSE off by {off.max().item():.3g}: a tile counted twice?"


@case("bwd")
def gradient_needle(stage_id, args):
    for n in NEEDLE_LENGTHS:
        for problem in small(stage_id, batch=1, heads=2, kv_heads=2, seqlen_q=n, seqlen_kv=n):
            yield from needle_in(stage_id, problem)


@case()
def output_inside_a_larger_allocation(stage_id, args):
    for problem in small(stage_id):
        inputs = inputs_for(problem)
        plain = run(stage_id, inputs, problem.causal)
        names = [name for name in plain if name != "lse"]
        surroundings, views = [], []
        for name in names:
            b, h, n, d = plain[name].shape
            big = torch.randn(b + 2, h + 2, n + 2, d + 16, device="cuda").to(plain[name].dtype)
            view = big[1:-1, 1:-1, 1:-1, 8:-8]
            surroundings.append((big, big.clone(), view))
            views.append(view.fill_(math.nan))
        found = run(stage_id, inputs, problem.causal, out=views[0] if len(views) == 1 else tuple(views))
        for name in differing(stage_id, found, plain):
            yield f"{problem}: {name} written to a view differs from a fresh one"
        for name, (big, before, view) in zip(names, surroundings):
            view.copy_(before[1:-1, 1:-1, 1:-1, 8:-8])
            if not same(big, before):
                yield f"{problem}: wrote outside of {name}"


@case()
def inputs_inside_nan(stage_id, args):
    for problem in small(stage_id):
        inputs = inputs_for(problem)
        inside = []
        for x in inputs:
            if x.dim() == 4:
                b, h, n, d = x.shape
                big = torch.full((b, h, n + 128, d), math.nan, device="cuda", dtype=x.dtype)
                inside.append(big[:, :, :n].copy_(x))
            else:  # the LSE, which must be contiguous
                big = torch.full((x.numel() + 256,), math.nan, device="cuda", dtype=x.dtype)
                inside.append(big[128:-128].view_as(x).copy_(x))
        plain = run(stage_id, inputs, problem.causal)
        for name in differing(stage_id, run(stage_id, tuple(inside), problem.causal), plain):
            yield f"{problem}: what lies beyond the sequence changes {name}"


@case("fwd")
def constant_values(stage_id, args):
    for problem in small(stage_id):
        q, k, v = random_inputs(problem)
        columns = v[:, :, :1]
        for name, constant in (
            ("1", torch.ones_like(v)),
            ("its column's constant", columns.expand_as(v).contiguous()),
        ):
            o = run_poisoned(stage_id, (q, k, constant), problem.causal)["o"]
            # Sums of 8-bit products are truncated: of V's column as much as of the ones, but not the same.
            slack = 2**-7 if problem.in_fp8 else 2**-8
            constant = as_multiplied(stage_id, problem, q, k, constant)[2]
            if not torch.allclose(o.float(), constant.float(), rtol=slack, atol=0):
                yield f"{problem}: V = {name} gives O up to {(o - constant).abs().max().item():.3g} away"


@case("bwd")
def gradients_that_vanish(stage_id, args):
    """Values that do not depend on the key leave dQ and dK nothing but round-off; dO = 0 leaves nothing."""
    for problem in small(stage_id):
        q, k, v, do = random_inputs(problem)
        constant = v[:, :, :1].expand_as(v).contiguous()
        what = f"{problem}, V constant"
        yield from judged(stage_id, q, k, constant, do, problem.causal, what)
        inputs = reference.Expected(q, k, v, problem.causal, torch.zeros_like(do)).inputs
        for name, x in run_poisoned(stage_id, inputs, problem.causal).items():
            if not (x == 0).all():
                yield f"{problem}: dO = 0 gives {name} other than 0"


Shape = dict[str, object]  # what of a plain problem is otherwise

OTHER_SHAPES: list[Shape] = [
    {"heads": 32, "kv_heads": 8},
    {"heads": 16, "kv_heads": 1, "head_dim": 128},
    {"seqlen_kv": 1025},
    {"seqlen_q": 1025, "head_dim": 128},  # causal: the first 822 queries see no key
    {"seqlen_q": 1},
    {"seqlen_kv": 1, "head_dim": 128},
    {"seqlen_q": 257, "seqlen_kv": 4161, "heads": 8, "kv_heads": 2},
    {"dtype": "float16"},
    {"dtype": "float16", "head_dim": 128, "seqlen_q": 1025, "seqlen_kv": 1025},
    {"head_dim": 256},
    {"head_dim": 256, "seqlen_q": 1025, "seqlen_kv": 4097, "kv_heads": 2},
    {"head_dim": 256, "seqlen_q": 1025, "dtype": "float16"},
    # more heads than are worked on together: what one leaves behind meets the next
    {"batch": 24, "seqlen_q": 320, "seqlen_kv": 320, "head_dim": 128},
    {"batch": 12, "seqlen_q": 320, "seqlen_kv": 320, "head_dim": 256, "kv_heads": 2},
]
TOP_LEFT_SHAPES: list[Shape] = [
    {},
    {"seqlen_kv": 1025},
    {"seqlen_q": 1025},
    {"seqlen_q": 1},  # the only query sees one key of 203
    {"seqlen_kv": 1},
    {"seqlen_q": 128, "seqlen_kv": 129},  # tiles of keys end where they are seen no more
    {"seqlen_q": 129, "seqlen_kv": 128},
    {"seqlen_q": 257, "seqlen_kv": 4161, "heads": 8, "kv_heads": 2},
    {"seqlen_q": 4161, "seqlen_kv": 257, "heads": 8, "kv_heads": 2},
    {"seqlen_q": 1025, "heads": 16, "kv_heads": 1},
    {"seqlen_kv": 1025, "dtype": "float16"},
    # More tiles than SMs: of keys, a CTA has some that are seen and some that are not.
    {"batch": 4, "heads": 16, "kv_heads": 16, "seqlen_kv": 1025},
]
TOP_LEFT_WIDE_SHAPES: list[Shape] = [
    {"seqlen_q": 257, "seqlen_kv": 1025},
    {"seqlen_q": 1025, "seqlen_kv": 257},
]
FORMS: dict[str, Shape] = {  # of a problem, on each kernel that a user can reach
    "MHA": {"batch": 2, "heads": 3, "kv_heads": 3, "seqlen_q": 203, "seqlen_kv": 203},
    "GQA 32:8": {"heads": 32, "kv_heads": 8, "seqlen_q": 257, "seqlen_kv": 257},
    "MQA 16:1": {"heads": 16, "kv_heads": 1, "seqlen_q": 129, "seqlen_kv": 129},
    "more keys": {"heads": 4, "kv_heads": 2, "seqlen_q": 257, "seqlen_kv": 1025},
    "more queries": {"heads": 4, "kv_heads": 2, "seqlen_q": 1025, "seqlen_kv": 257},
    "more tiles than SMs": {"batch": 5, "heads": 16, "kv_heads": 16, "seqlen_q": 520, "seqlen_kv": 520},
}


SCALE = 1.4  # times 1/√head_dim, where a kernel is given its scale


@case()
def other_shapes(stage_id, args):
    """GQA, unequal lengths, fp16 and head_dim 256: computed correctly, or refused by name."""
    stage, module = ladder.load(stage_id)
    plain = Problem.square(1, 4, 203, 64, False, direction=stage.direction)
    problems = [plain.with_(causal=causal, **shape) for causal in (False, True) for shape in OTHER_SHAPES]
    for problem in problems:
        q, k, v, *do = random_inputs(problem)
        inputs = reference.Expected(q, k, v, problem.causal, *do).inputs
        if reason := module.supports(problem):
            yield from refused(lambda: run(stage_id, inputs, problem.causal), ValueError, reason)
            continue
        yield from judged(stage_id, q, k, v, *(do or [None]), problem.causal, problem)
        blind = problem.seqlen_q - problem.seqlen_kv if problem.causal else 0  # queries that see no key
        if do and blind > 0 and run_poisoned(stage_id, inputs, True)["dq"][:, :, :blind].any():
            yield f"{problem}: dq of queries that see no key is not zero"


@case()
def top_left_mask(stage_id, args):
    """A causal mask aligned at the top left. At unequal lengths, rows past the last key see every key, and
    keys past the last row are seen by none: computed correctly, or refused by name. At equal ones, where it
    is the mask that every stage has, computed correctly."""
    stage, module = ladder.load(stage_id)
    plain = Problem.square(1, 4, 203, 64, True, direction=stage.direction, top_left=True)
    problems = [plain.with_(head_dim=d, **shape) for d in HEAD_DIMS for shape in TOP_LEFT_SHAPES]
    problems += [plain.with_(head_dim=256, kv_heads=2, **shape) for shape in TOP_LEFT_WIDE_SHAPES]
    for problem in problems:
        q, k, v, *do = random_inputs(problem)
        if reason := module.supports(problem):
            inputs = inputs_for(problem)
            yield from refused(lambda: run(stage_id, inputs, True, top_left=True), ValueError, reason)
            continue
        yield from judged(stage_id, q, k, v, *(do or [None]), True, problem, top_left=True)
        if problem.dtype == "bfloat16" and problem.heads == problem.kv_heads:
            yield from needle_in(stage_id, problem)
        if do and problem.seqlen_kv > problem.seqlen_q:
            found = run_poisoned(stage_id, inputs_for(problem), True, top_left=True)
            for name in ("dk", "dv"):
                if found[name][:, :, problem.seqlen_q :].any():
                    yield f"{problem}: {name} of keys that no query sees is not zero"


forms_passed: dict[Problem, list[str]] = {}  # by what is compiled; what `records` keeps


def forms_of(stage_id: str, kernel: Problem) -> dict[str, Problem]:
    """The problems of FORMS that a kernel is for."""
    supports = ladder.load(stage_id)[1].supports
    problems = {name: kernel.with_(**form) for name, form in FORMS.items()}
    return {name: problem for name, problem in problems.items() if supports(problem) is None}


@case()
def every_kernel(stage_id, args):
    """Each kernel that a user can reach, on every form of problem that it is for."""
    stage, module = ladder.load(stage_id)
    for kernel in reachable(stage_id):
        for name, problem in forms_of(stage_id, kernel).items():
            q, k, v, *do = random_inputs(problem)
            mask = {"causal": problem.causal, "top_left": problem.top_left}
            given = SCALE / math.sqrt(problem.head_dim)
            # A kernel in FP8 is given a scale in any case.
            scales = [None, given] if problem.in_fp8 else [given if problem.scaled else None]
            dlse = None
            if problem.lse_grad:  # the same in every run
                dlse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(1)).to(q.device)
            rounding = reference.rounding_of(stage, module, problem, **stage.options)
            verdicts = []
            for scale in scales:
                expected = reference.Expected(
                    q, k, v, do=(do or [None])[0], **mask, softmax_scale=scale, dlse=dlse
                )
                tensors = expected.allocate(module, problem, **stage.options)
                verdicts.append(expected.run(module, compile_stage(stage_id, kernel), tensors, rounding))
                scaled = f", softmax_scale {scale:.3g}" if problem.in_fp8 and scale else ""
                yield from noted(verdicts[-1], f"{problem}{scaled}")
            if all(verdict.passed for verdict in verdicts):
                forms_passed.setdefault(kernel, []).append(name)


@case("bwd")
def after_the_forward_stage(stage_id, args):
    """Gradients from the O and LSE that `attention` gives, and once by autograd."""
    stage, module = ladder.load(stage_id)
    few, many = UNEQUAL
    wide = small(stage_id, heads=8, kv_heads=2, seqlen_q=few, seqlen_kv=many)
    high = small(stage_id, heads=8, kv_heads=2, seqlen_q=many, seqlen_kv=few)
    top_left = [problem.with_(top_left=True) for problem in (*wide, *high) if problem.causal]
    for problem in (*small(stage_id), *wide, *top_left):
        if module.supports(problem):
            continue
        q, k, v, do = random_inputs(problem)
        mask = {"causal": problem.causal, "top_left": problem.top_left}
        o, lse = attention(q, k, v, **mask, return_lse=True)
        found = run(stage_id, (q, k, v, o, lse, do), **mask)
        expected = reference.Expected(q, k, v, do=do, **mask)
        forward = problem.with_(direction="fwd")
        ran = production.forward_stage(forward)
        rounding = reference.rounding_of(*ladder.load(ran), forward, **production.OPTIONS.get(ran, {}))
        yard_o = reference.yardstick(q, k, v, rounds_p=rounding, **mask)
        yard_inputs = q, k, v, yard_o, expected.saved[1], do
        yard = lambda nudge: reference.yardstick_gradients(
            *yard_inputs, rounds_p=stage.rounds_p, **mask, nudge=nudge
        )
        floors = reference.cancellation(q, k, v, do)
        yield from noted(reference.judge_roundings(found, expected.gradients, yard, floors), problem)
        if stage_id != BACKWARD:
            continue
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        for what, given in (("autograd", do), ("autograd of a sum", torch.ones_like(do))):
            out = attention(*leaves, **mask)
            grads = torch.autograd.grad(*((out, leaves, given) if given is do else (out.sum(), leaves)))
            explicit = dict(zip(found, attention_backward(given, q, k, v, o, lse, **mask)))
            for name in differing(stage_id, dict(zip(explicit, grads)), explicit):
                yield f"{problem}: {name} by {what} differs from attention_backward's"


# ---- 5 and 6: masking and extreme logits -------------------------------------------------------------------


@case("fwd")
def causality(stage_id, args):
    for problem in small(stage_id):
        if not problem.causal:
            continue
        q, k, v = random_inputs(problem)
        plain, _ = forward(q, k, v, causal=True, stage=stage_id)
        for row in (0, 62, 63, 64, 127, 200):
            k2, v2 = k.clone(), v.clone()
            large = 448 if problem.reads_codes else 1e4
            k2[:, :, row + 1 :], v2[:, :, row + 1 :] = large, large
            later, _ = forward(q, k2, v2, causal=True, stage=stage_id)
            # A block of keys that is quantised with its own scale is one thing: what is in it moves that.
            rows = (row + 1) // BLOCK * BLOCK if problem.direction == "fp8_cast" else row + 1
            if not same(later[:, :, :rows], plain[:, :, :rows]):
                yield f"{problem}: keys after row {row} change rows up to it"


@case("bwd")
def causality_of_gradients(stage_id, args):
    """Given O and LSE, dQ of a row depends on keys up to it, dK and dV of a key on rows from it on."""
    for problem in small(stage_id):
        if not problem.causal:
            continue
        q, k, v, o, lse, do = inputs_for(problem)
        plain = run(stage_id, (q, k, v, o, lse, do), True)
        other_q, other_k, other_v, *others = inputs_for(problem, seed=1)
        for row in (0, 62, 63, 64, 127, 200):
            new_k, new_v = (torch.cat([x[:, :, : row + 1], y[:, :, row + 1 :]], 2)
                            for x, y in ((k, other_k), (v, other_v)))  # fmt: skip
            found = run(stage_id, (q, new_k, new_v, o, lse, do), True)["dq"][:, :, : row + 1]
            if differing(stage_id, {"dq": found}, {"dq": plain["dq"][:, :, : row + 1]}):
                yield f"{problem}: keys after row {row} change dq up to it"
            new_q, *new = (torch.cat([y[:, :, :row], x[:, :, row:]], 2)
                           for x, y in zip((q, o, lse, do), (other_q, *others)))  # fmt: skip
            found = run(stage_id, (new_q, k, v, *new), True)
            found = {name: found[name][:, :, row:] for name in ("dk", "dv")}
            for name in differing(stage_id, found, {name: plain[name][:, :, row:] for name in found}):
                yield f"{problem}: rows before {row} change {name} from it on"


@case("fwd")
def extreme_logits(stage_id, args):
    # One FFMA for scale·s − scale·max leaves a product's rounding in the exponent of the largest score: its P
    # is then not 1, and where P is rounded to 16 bits, O is its value times that rounding.
    slack = 2**-7 if ladder.load(stage_id)[0].rounds_p else 0.0
    for logit in (3e4, 1e6):
        for problem in small(stage_id, batch=1, heads=2, kv_heads=2):
            amplitude = logit / math.sqrt(problem.head_dim)
            q, k, v, target = reference.needle_inputs(problem, "cuda", amplitude)
            found = run_poisoned(stage_id, as_read(problem.direction, q, k, v), problem.causal)
            v = as_multiplied(stage_id, problem, q, k, v)[2]
            if not all(x.isfinite().all() for x in found.values()):
                yield f"{problem}: logits of {logit:.0e} give non-finite values"
            elif not torch.allclose(found["o"].float(), v[:, :, target].float(), rtol=slack, atol=0):
                yield f"{problem}: logits of {logit:.0e} do not select the largest"
    for problem in small(stage_id):
        q, k, v = random_inputs(problem)
        yield from judged(stage_id, torch.zeros_like(q), k, v, None, problem.causal, f"{problem}, q = 0")


@case("fwd")
def long_sequence(stage_id, args):
    problem = Problem.square(1, 1, LONG, 64, True, direction=ladder.load(stage_id)[0].direction)
    q, k, v = random_inputs(problem)
    yield from judged(stage_id, q, k, v, None, problem.causal, problem)
    yield from needle_in(stage_id, problem)


@case("fwd")
def rising_scores(stage_id, args):
    # From row to row scores rise or fall with the key, by up to 185 powers of two: what earlier keys gave as
    # the maximum is behind in most tiles of some rows, now and then of others, and never of the rest. In FP8
    # by up to 23: beyond that the tensor cores' truncated sums of Q·Kᵀ decide, which no rule of ours does.
    problems = small(stage_id, seqlen_q=513, seqlen_kv=513)
    problems += [problems[-1].with_(**changes) for changes in ({"head_dim": 256}, {"dtype": "float16"})]
    for problem in problems:
        if ladder.load(stage_id)[1].supports(problem):
            continue  # `other_shapes` sees to the refusal
        q, k, v = random_inputs(problem)
        k[..., 0] = torch.linspace(0, 16, problem.seqlen_kv)
        steep = 1 if problem.in_fp8 else 8
        q[..., 0] = torch.linspace(-steep, steep, problem.seqlen_q) * math.sqrt(problem.head_dim)
        yield from judged(stage_id, q, k, v, None, problem.causal, f"{problem}, rising scores")


@case("bwd")
def gradients_at_extreme_logits(stage_id, args):
    for logit in (3e4, 1e6):
        for problem in small(stage_id, batch=1, heads=2, kv_heads=2):
            amplitude = logit / math.sqrt(problem.head_dim)
            q, k, v, _ = reference.needle_inputs(problem, "cuda", amplitude)
            *_, do = random_inputs(problem)
            expected = reference.Expected(q, k, v, problem.causal, do)
            found = run_poisoned(stage_id, expected.inputs, problem.causal)
            if not all(x.isfinite().all() for x in found.values()):
                yield f"{problem}: logits of {logit:.0e} give non-finite gradients"
            # P is e^(S − LSE): fp32 leaves 3e4 a 500th, which is P's error, and 1e6 a sixteenth.
            dv = expected.gradients[2]
            if logit < 1e5 and not torch.allclose(found["dv"].double(), dv, rtol=2**-5, atol=2**-6):
                off = (found["dv"] - dv).abs().max().item()
                yield f"{problem}: logits of {logit:.0e} give dv up to {off:.3g} away"
    for problem in small(stage_id):
        q, k, v, do = random_inputs(problem)
        yield from judged(stage_id, torch.zeros_like(q), k, v, do, problem.causal, f"{problem}, q = 0")


# ---- 7 to 9: layouts and wrong inputs ----------------------------------------------------------------------


@case()
def strided_views(stage_id, args):
    for problem in small(stage_id):
        inputs = inputs_for(problem)
        q, k, v, *rest = inputs
        b, h, n, d = q.shape
        attend = lambda *x: run(stage_id, x, problem.causal)
        plain = attend(*inputs)
        heads = [x for x in inputs if x.dim() == 4]  # all but the LSE

        def among(views: list[torch.Tensor]) -> list[torch.Tensor]:
            views = iter(views)
            return [next(views) if x.dim() == 4 else x for x in inputs]

        packed = torch.stack([x.transpose(1, 2) for x in heads], dim=2)  # (B, N, 3 or 5, H, d)
        layouts = {
            "(B, N, H, d) memory": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads],
            "slices of a packed tensor": [packed[:, :, i].transpose(1, 2) for i in range(len(heads))],
            "(N, B, H, d) memory": [x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in heads],
        }
        for name, views in layouts.items():
            for attempt in ("first", "second"):  # a stale stride or pointer shows on the second call
                for output in differing(stage_id, attend(*among(views)), plain):
                    yield f"{problem}: {output} of {name} differs on the {attempt} call"
            for output in differing(stage_id, attend(*inputs), plain):
                yield f"{problem}: {output} of a contiguous call after {name} differs"
        k1, v1 = k[:, :1].expand(b, h, n, d), v[:, :1].expand(b, h, n, d)  # stride 0
        copied = attend(q, k1.contiguous(), v1.contiguous(), *rest)
        for output in differing(stage_id, attend(q, k1, v1, *rest), copied):
            yield f"{problem}: {output} of expanded heads differs from that of copied ones"
        for _ in range(2):
            for at, x in enumerate(heads):
                bad = lambda view: attend(*among([*heads[:at], view, *heads[at + 1 :]]))
                columns = x.mT.contiguous().mT
                yield from refused(lambda: bad(columns), ValueError, "contiguous in its last dimension")
                shifted = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view_as(x)
                yield from refused(lambda: bad(shifted), ValueError, "16-byte boundary")
                odd = torch.empty(b, h, n, d + 1, device="cuda", dtype=x.dtype)[..., :d]
                yield from refused(lambda: bad(odd), ValueError, "multiples of 8 elements")
        out = torch.empty(1, h, n, d, device="cuda", dtype=q.dtype).expand(b, h, n, d)
        outs = (torch.empty_like(q), out, torch.empty_like(q)) if rest else out
        yield from refused(
            lambda: run(stage_id, inputs, problem.causal, outs), ValueError, "must not overlap itself"
        )


@case()
def wrong_input(stage_id, args):
    direction = ladder.load(stage_id)[0].direction
    problem = Problem.square(2, 4, 64, 64, False, direction=direction)
    q, k, v, *rest = inputs_for(problem)
    attend = lambda *x: run(stage_id, (*x, *rest), False)
    on_cpu = tuple(x.cpu() for x in (q, k, v, *rest))
    yield from refused(lambda: run(stage_id, on_cpu, False), ValueError, "must be on a CUDA device")
    yield from refused(lambda: attend(q, k.cpu(), v), ValueError, "must be on one device")
    wide = (x.float() for x in (q, k, v))
    yield from refused(lambda: attend(*wide), TypeError, "must be bfloat16 or float16")
    yield from refused(lambda: attend(q, k.half(), v), TypeError, "must have one dtype")
    yield from refused(lambda: attend(q, k, v[:, :, 1:]), ValueError, "k and v must have one shape")
    yield from refused(lambda: attend(q[0], k, v), ValueError, "must have 4 dimensions")
    yield from refused(lambda: attend(q, k[:, :3], v[:, :3]), ValueError, "must be a multiple")
    yield from refused(lambda: attend(q, k[:1], v[:1]), ValueError, "must agree in batch")
    yield from refused(lambda: attend(q, None, v), TypeError, "must be a torch.Tensor")
    for d in (4, 59, 100, 288):
        x = torch.randn(1, 1, 16, d, device="cuda", dtype=torch.bfloat16)
        others = (x, torch.zeros(1, 1, 16, device="cuda"), x) if rest else ()
        yield from refused(lambda: run(stage_id, (x, x, x, *others), False), ValueError, "head_dim")
    # The raw launch, which the front end's checks do not precede, must not run on what it was not compiled
    # for.
    for name in ("q", "do") if rest else ("q",):
        module, compiled, tensors = ready(stage_id, (q, k, v, *rest), False)
        dtype = getattr(tensors, name).dtype
        shifted = torch.empty(q.numel() + 1, device="cuda", dtype=dtype)[1:].view_as(q)
        setattr(tensors, name, shifted)
        yield from refused(lambda: module.run_kernel(compiled, tensors), Exception, "align")
        setattr(tensors, name, torch.empty_like(q, dtype=dtype)[:, :3])
        yield from refused(lambda: module.run_kernel(compiled, tensors), Exception, "")


@case("bwd")
def wrong_input_of_the_backward_pass(stage_id, args):
    q, k, v, o, lse, do = inputs_for(Problem.square(2, 4, 64, 64, False, direction="bwd"))
    attend = lambda **changes: run(
        stage_id, tuple(({"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do} | changes).values()), False
    )
    yield from refused(lambda: attend(do=None), TypeError, "do must be a torch.Tensor")
    yield from refused(lambda: attend(do=do.float()), ValueError, "do must be like q")
    yield from refused(lambda: attend(do=do[:, :, 1:]), ValueError, "do must be like q")
    yield from refused(lambda: attend(o=o.cpu()), ValueError, "o must be like q")
    yield from refused(lambda: attend(o=o[:, :2]), ValueError, "o must be like q")
    yield from refused(lambda: attend(lse=lse.double()), TypeError, "lse must be float32")
    yield from refused(lambda: attend(lse=lse[:, :, 1:]), ValueError, "lse must be (batch, heads, seqlen_q)")
    yield from refused(lambda: attend(lse=lse.mT.contiguous().mT), ValueError, "lse must be contiguous")


@case()
def empty(stage_id, args):
    direction = ladder.load(stage_id)[0].direction
    for b, h, n in ((2, 3, 0), (0, 3, 16), (2, 0, 16)):
        problem = Problem.square(b, h, n, 64, False, direction=direction)
        inputs = inputs_for(problem)
        for name, x in run(stage_id, inputs, False).items():
            expected = inputs[0].shape[:3] if name == "lse" else inputs[0].shape
            if x.shape != expected:
                yield f"{problem}: {name} is {tuple(x.shape)}"
    torch.cuda.synchronize()


# ---- 10 to 12: streams, graphs, repeats, sanitizers --------------------------------------------------------


@case()
def side_stream_with_a_pending_producer(stage_id, args):
    problem = small(stage_id)[0]
    inputs = inputs_for(problem)
    plain = run(stage_id, inputs, problem.causal)
    late_q = torch.zeros_like(inputs[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # ≈ 30 ms in which a launch on another stream would read zeros
        late_q.copy_(inputs[0])
        found = run(stage_id, (late_q, *inputs[1:]), problem.causal)
    torch.cuda.synchronize()
    for name in differing(stage_id, found, plain):
        yield f"{name}: did not wait for its own stream's producer"


@case()
def cuda_graph(stage_id, args):
    for problem in small(stage_id):
        inputs = inputs_for(problem)
        module, compiled, tensors = ready(stage_id, inputs, problem.causal)
        module.run_kernel(compiled, tensors)  # loads the module, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module.run_kernel(compiled, tensors)
        for seed in (1, 2):
            new = inputs_for(problem, seed=seed)
            _, _, other = ready(stage_id, new, problem.causal)
            for name in ("q", "k", "v", "o", "lse", "do") if len(new) > 3 else ("q", "k", "v"):
                getattr(tensors, name).copy_(getattr(other, name))
            poison(tensors)
            graph.replay()
            torch.cuda.synchronize()
            for name in differing(stage_id, tensors.outputs, run(stage_id, new, problem.causal)):
                yield f"{problem}: {name} of a replay with new data differs from eager"


@case()
def repeats(stage_id, args):
    """Launches on the same tensors, scratch included, give the same; with float atomics the spread is
    printed."""
    square = small(stage_id, seqlen_q=1025, seqlen_kv=1025)
    square += [problem.with_(head_dim=256) for problem in square if problem.head_dim == 128]
    unequal = small(stage_id, seqlen_q=257, seqlen_kv=1025)
    unequal = [problem.with_(top_left=True) for problem in unequal if problem.causal]
    supports = ladder.load(stage_id)[1].supports
    for problem in (problem for problem in (*square, *unequal) if supports(problem) is None):
        inputs = inputs_for(problem)
        mask = {"causal": problem.causal, "top_left": problem.top_left}
        first = run_poisoned(stage_id, inputs, **mask)
        module, compiled, tensors = ready(stage_id, inputs, **mask)
        differ = 0
        spread = {name: torch.zeros((), device="cuda") for name in first}
        for _ in range(args.repeats):
            for x in tensors.outputs.values():
                x.fill_(math.nan)
            module.run_kernel(compiled, tensors)
            differ += bool(differing(stage_id, tensors.outputs, first))
            for name, x in tensors.outputs.items():
                spread[name] = torch.maximum(spread[name], (x.float() - first[name].float()).abs().max())
        if differ:
            yield f"{problem}: {differ} of {args.repeats} repeats differ"
        for name, x in tensors.workspace.items():
            if starts_at_zero(name, str(x.dtype).removeprefix("torch.")) and x.any():
                yield f"{problem}: scratch {name!r} is not left at zero"
        if ladder.load(stage_id)[0].atomics:
            share = {name: x.item() / first[name].abs().max().item() for name, x in spread.items()}
            text = ", ".join(f"{name} {value:.2g}" for name, value in share.items())
            print(f"    {problem}: spread of {args.repeats} repeats, of the largest: {text}", flush=True)


@case()
def beside_memory_traffic(stage_id, args):
    """Loads that arrive late and in another order must neither hang the kernel nor change its output."""
    for problem in small(stage_id, seqlen_q=1025, seqlen_kv=1025):
        inputs = inputs_for(problem)
        first = run_poisoned(stage_id, inputs, problem.causal)
        module, compiled, tensors = ready(stage_id, inputs, problem.causal)
        source = torch.empty(2**28, dtype=torch.int8, device="cuda")
        traffic, other = torch.cuda.Stream(), torch.empty_like(source)
        torch.cuda.synchronize()
        for _ in range(20):
            with torch.cuda.stream(traffic):
                other.copy_(source, non_blocking=True)
            for x in tensors.outputs.values():
                x.fill_(math.nan)
            for _ in range(5):
                module.run_kernel(compiled, tensors)
            if differing(stage_id, tensors.outputs, first):
                yield f"{problem}: differs beside memory traffic"
                break
        torch.cuda.synchronize()


@case()
def sanitizer(stage_id, args):
    if args.no_sanitizer:
        print("    sanitizer: left out by --no-sanitizer", flush=True)
        return
    program = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if program is None:
        yield "compute-sanitizer is not installed; --no-sanitizer leaves it out"
        return
    for tool in ("memcheck", "synccheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", __name__, stage_id]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=repository())
        if run.returncode or "ERROR SUMMARY: 0 errors" not in run.stdout:
            yield f"{tool}: " + (run.stdout + run.stderr)[-1500:]


def one_launch(stage_id: str) -> None:
    """Small launches and nothing else, for a sanitizer to watch."""
    problems = small(stage_id, batch=1, heads=2, kv_heads=2, seqlen_q=113, seqlen_kv=113)
    problems += [x.with_(head_dim=256) for x in problems if x.head_dim == 128]
    problems += [x.with_(seqlen_kv=401, top_left=True) for x in problems if x.causal]  # keys that none sees
    for problem in problems:
        if ladder.load(stage_id)[1].supports(problem) is None:
            run(stage_id, inputs_for(problem), problem.causal, top_left=problem.top_left)
    torch.cuda.synchronize()


# ---- running them ------------------------------------------------------------------------------------------


def run_model(stage_id: str) -> list[str]:
    """The stage's NumPy model in float64 against the reference: what can be checked without a GPU."""
    stage, module = ladder.load(stage_id)
    by_name = models.BACKWARD_MODELS if stage.direction == "bwd" else models.MODELS
    model, failures = by_name[stage.model], []
    square = Problem.square(1, 1, 1, 64, False, direction=stage.direction)
    problems = [
        square.with_(seqlen_q=n, seqlen_kv=n, head_dim=d, causal=causal)
        for n in (1, 3, 64, 65, 203, 512)
        for d in HEAD_DIMS
        for causal in (False, True)
    ]
    top_left = square.with_(causal=True, top_left=True)
    unequal = [top_left.with_(seqlen_q=n, seqlen_kv=m) for n, m in ((65, 203), (203, 65), (1, 3), (3, 1))]
    problems += [problem for problem in unequal if module.supports(problem) is None]
    for problem in problems:
        mask = {"causal": problem.causal, "top_left": problem.top_left}
        q, k, v, *do = (x.double() for x in random_inputs(problem, "cpu", seed=problem.seqlen_q))
        rounding, lazy = reference.rounding_of(stage, module, problem, **stage.options), {}
        if isinstance(rounding, LazyMaximum):
            lazy = rounding.behind
            q *= 32  # as they are, hardly a score is 2⁸ ahead of its row's first tile
        expected = reference.Expected(q, k, v, do=do[0] if do else None, **mask)
        inputs, exact = (q, k, v), expected.forward
        if do:
            inputs, exact = (q, k, v, *expected.forward, *do), expected.gradients
        found = model(*(x[0, 0].numpy() for x in inputs), **mask, **lazy)
        off = max(abs(x - ref[0, 0].numpy()).max() for x, ref in zip(found, exact))
        if not off <= 1e-12:
            failures.append(f"{problem}: {stage.model} is {off:.3g} away from the reference")
    return failures


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    name: str
    failures: list[str]
    seconds: float


def chosen(stage_id: str, only: str | None = None) -> list[str]:
    """The cases of a stage's direction, by name; with `only` those whose name contains it."""
    stage, module = ladder.load(stage_id)
    kinds = None, "bwd" if stage.direction == "bwd" else "fwd", "library" if stage_id in LIBRARY else None
    square = Problem.square(1, 1, 1, 64, False, direction=stage.direction, sequences=((1, 1),))
    takes = module.supports(square) is None
    return [
        name
        for name, (of, _, policies) in CASES.items()
        if of in kinds and (takes or not policies) and (only or "") in name
    ]


def run_cases(stage_id: str, args: object) -> Iterator[Outcome]:
    """Run a stage's cases, one after the other."""
    for name in chosen(stage_id, args.only):
        begin = time.perf_counter()
        try:
            failures = list(CASES[name][1](stage_id, args))
        except Exception as error:  # a case that breaks is a case that fails; the others still run
            failures = [f"{type(error).__name__}: {error}"]
        yield Outcome(name, failures, time.perf_counter() - begin)


if __name__ == "__main__":
    one_launch(sys.argv[1])
