"""The cases every stage must compute correctly or refuse by name; `python ref_check.py <stage>` runs them,
through `harness.case_list`.

A case is a generator of messages, one for each thing that went wrong.
"""

import math
from collections.abc import Iterator

import torch

from harness import judging, needles, policy_cases, reference, score_cases, split_cases  # noqa: F401  three register theirs
from harness.case_runs import (
    as_multiplied,
    differing,
    fitted,
    inputs_for,
    judged,
    noted,
    refused,
    run,
    run_poisoned,
    small,
)
from harness.inputs import as_read, random_inputs
from harness.registry import case, same
from harness.stages import forward
from harness.sweep import HEAD_DIMS
from hopper_attention import attention, attention_backward, selection
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.fp8 import BLOCK
from hopper_attention.launch import BACKWARD, compile_stage, reachable

LENGTHS = (1, 3, 63, 64, 65, 113, 127, 128, 129, 203, 255, 257, 1023, 1025, 4097)
NEEDLE_LENGTHS = (16, 64, 65, 257, 1024, 4097)
LONG = 8257  # twice as many keys as in any other case
UNEQUAL = 257, 1025


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


def with_targets(problem: Problem) -> Problem:
    """The problem with a mask under which every query sees a key."""
    blind = problem.causal and problem.seqlen_q > problem.seqlen_kv
    return problem.with_(top_left=problem.top_left or blind)


def needle_in(stage_id: str, problem: Problem) -> Iterator[str]:
    """What a stage makes of `needle_inputs`, or of a backward problem of `needle_gradient_inputs`."""
    mask = {"causal": problem.causal, "top_left": problem.top_left}
    if problem.direction == "bwd":
        inputs, exact = needles.needle_gradient_inputs(problem, "cuda")
        yield from needles.needles_missed(problem, run_poisoned(stage_id, inputs, **mask), exact)
        return
    # Truncated sums of 8-bit products leave a logit up to 0.25 % short. Of one of 64 to 128 that is less than
    # what a tile that is counted twice adds to the LSE; the other keys then have up to e⁻¹⁶.
    amplitude, trace = (8.0, 2.0**-20) if problem.in_fp8 else (32.0, 0.0)
    q, k, v, target = needles.needle_inputs(problem, "cuda", amplitude)
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
    slack = math.log(2) / 2 if problem.in_fp8 else judging.LSE_TOLERANCE * ref_lse.abs()
    if not (off <= slack).all():
        yield f"{problem}: LSE off by {off.max().item():.3g}: a tile counted twice?"


@case("bwd")
def gradient_needle(stage_id, args):
    for n in NEEDLE_LENGTHS:
        for problem in small(stage_id, batch=1, heads=2, kv_heads=2, seqlen_q=n, seqlen_kv=n):
            yield from needle_in(stage_id, with_targets(problem))


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
        inputs = judging.Expected(q, k, v, problem.causal, torch.zeros_like(do)).inputs
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
    # one tile of keys each: more tiles than SMs, and fewer queries than keys
    {"batch": 40, "seqlen_q": 129, "seqlen_kv": 128},
    {"batch": 40, "seqlen_q": 65, "seqlen_kv": 77, "head_dim": 128, "kv_heads": 2},
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
NOT_OF_FEW_KEYS = {"more keys", "more tiles than SMs"}  # nor are they that when fitted: OTHER_SHAPES has some


SCALE = 1.4  # times 1/√head_dim, where a kernel is given its scale


@case()
def other_shapes(stage_id, args):
    """GQA, unequal lengths, fp16 and head_dim 256: computed correctly, or refused by name."""
    stage, module = ladder.load(stage_id)
    plain = Problem.square(1, 4, 203, 64, False, direction=stage.direction)
    problems = [plain.with_(causal=causal, **shape) for causal in (False, True) for shape in OTHER_SHAPES]
    for problem in (fitted(stage, x) for x in problems):
        q, k, v, *do = random_inputs(problem)
        inputs = judging.Expected(q, k, v, problem.causal, *do).inputs
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
    for problem in (fitted(stage, x) for x in problems):
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
    """The problems of FORMS that a kernel is for, with as many keys as the stage takes."""
    stage, module = ladder.load(stage_id)
    lost = NOT_OF_FEW_KEYS if stage.most_keys else set()
    problems = {name: fitted(stage, kernel.with_(**form)) for name, form in FORMS.items() if name not in lost}
    return {name: problem for name, problem in problems.items() if module.supports(problem) is None}


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
                expected = judging.Expected(
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
        expected = judging.Expected(q, k, v, do=do, **mask)
        forward = problem.with_(direction="fwd")
        ran = selection.forward_stage(forward)
        rounding = reference.rounding_of(*ladder.load(ran), forward, **selection.OPTIONS.get(ran, {}))
        yard_o = reference.yardstick(q, k, v, rounds_p=rounding, **mask)
        yard_inputs = q, k, v, yard_o, expected.saved[1], do
        yard = lambda nudge: reference.yardstick_gradients(
            *yard_inputs, rounds_p=stage.rounds_p, **mask, nudge=nudge
        )
        floors = judging.cancellation(q, k, v, do)
        yield from noted(judging.judge_roundings(found, expected.gradients, yard, floors), problem)
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
            q, k, v, target = needles.needle_inputs(problem, "cuda", amplitude)
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
            q, k, v, _ = needles.needle_inputs(problem, "cuda", amplitude)
            *_, do = random_inputs(problem)
            expected = judging.Expected(q, k, v, problem.causal, do)
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
        yield from score_cases.at_small_scales(stage_id, problem.with_(scaled=True), q, k, v, do)


from harness import call_cases  # noqa: E402, F401  registers its own behind these: values first, sanitizers last
