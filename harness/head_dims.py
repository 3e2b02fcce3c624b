"""Cases of head dims that have no kernel of their own, and of values of another width than the keys.

A row's columns lie between others: NaN and ∞ that must not be read, and elements of a larger output that must
stay. They are registered with `harness.cases`'.
"""

import math
from collections.abc import Iterator

import torch

from harness import judging, reference
from harness.case_runs import fitted, noted, refused
from harness.cases import needle_in, with_targets
from harness.inputs import poison, random_inputs
from harness.registry import case, same
from harness.stages import prepare, prepare_backward
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem, Stage

# Ends and middles of every tile (`limits.TILE_DIMS`): of models 40, 72, 80, 96, 112, 160 and 192.
HEAD_DIMS = (8, 24, 40, 56, 72, 80, 96, 104, 112, 120, 136, 160, 192, 200, 248)
WITH_VALUES = ((192, 128), (192, 8), (136, 72), (96, 64), (64, 128), (128, 40), (24, 256))  # and of V
LENGTHS = ((203, 203), (129, 577), (321, 65))  # of queries and keys
NEEDLES = (72, 96, 120, 160, 192, 248)
BESIDE = 8  # columns on either side of a row's own: 16 bytes
REFUSED = (4, 12, 59, 100, 260, 264)


def problems(stage: Stage) -> Iterator[Problem]:
    for head_dim, value_dim in (*((x, None) for x in HEAD_DIMS), *WITH_VALUES):
        for queries, keys in LENGTHS:
            for causal in (False, True):
                plain = Problem(2, 4, 2, queries, keys, head_dim, causal, direction=stage.direction)
                yield fitted(stage, plain.with_(value_dim=value_dim))


def between_others(x: torch.Tensor) -> torch.Tensor:
    """x (batch, heads, seqlen, columns) as the middle columns of wider rows, the others NaN and ∞."""
    wide = x.new_full((*x.shape[:3], x.shape[3] + 2 * BESIDE), math.nan)
    wide[..., ::2] = math.inf
    return wide[..., BESIDE:-BESIDE].copy_(x)


def surrounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows, and their middle columns, of x's shape."""
    wide = torch.randn(*x.shape[:3], x.shape[3] + 2 * BESIDE, device=x.device).to(x.dtype)
    return wide, wide[..., BESIDE:-BESIDE]


@case("library")
def head_dims_between(stage_id, args):
    """Every multiple of 8 up to 256, in rows of wider tensors: computed correctly, or refused by name."""
    stage, module = ladder.load(stage_id)
    for problem in problems(stage):
        q, k, v, *do = random_inputs(problem)
        expected = judging.Expected(q, k, v, problem.causal, *do)
        q, k, v, *saved = (between_others(x) if x.dim() == 4 else x for x in expected.inputs)
        options = {"causal": problem.causal, "stage": stage_id}
        if saved:
            o, lse, d_out = saved
            call, inputs, like = prepare_backward, (d_out, q, k, v, o, lse), (q, k, v)
        else:
            call, inputs, like = prepare, (q, k, v), (expected.forward[0].to(q.dtype),)
        if reason := module.supports(problem):
            yield from refused(lambda: call(*inputs, **options), ValueError, reason)
            continue
        wides, middles = zip(*map(surrounded, like))
        before = [wide.clone() for wide in wides]
        module, compiled, tensors = call(*inputs, **options, out=middles if saved else middles[0])
        module.run_kernel(compiled, poison(tensors))
        rounding = reference.rounding_of(stage, module, problem, **stage.options)
        yield from noted(expected.judge(tensors.outputs, rounding), problem)
        for wide, middle, was in zip(wides, middles, before):
            middle.copy_(was[..., BESIDE:-BESIDE])
            if not same(wide, was):
                yield f"{problem}: wrote beside its own columns"


@case("library")
def needles_of_head_dims_between(stage_id, args):
    stage, module = ladder.load(stage_id)
    for head_dim in NEEDLES:
        for causal in (False, True):
            problem = fitted(stage, Problem.square(1, 2, 1025, head_dim, causal, direction=stage.direction))
            if module.supports(problem) is None:
                yield from needle_in(stage_id, with_targets(problem))


@case("library")
def other_head_dims_are_refused(stage_id, args):
    stage, _ = ladder.load(stage_id)
    make = lambda *columns: torch.randn(1, 2, 16, *columns, device="cuda", dtype=torch.bfloat16)
    for head_dim in REFUSED:
        x = make(head_dim)
        if stage.direction == "bwd":
            lse = torch.zeros(1, 2, 16, device="cuda")
            call = lambda: prepare_backward(x, x, x, x, x, lse, stage=stage_id)
        else:
            call = lambda: prepare(x, x, x, stage=stage_id)
        yield from refused(call, ValueError, "head_dim")
