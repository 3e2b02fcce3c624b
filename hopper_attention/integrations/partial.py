"""Gradients of a part of a problem, in fp32: the call of `kernels/bwd4_fp32.py`."""

import torch

from .. import ops, production, tuned
from ..checks import VECTOR_BYTES, check_lse, gradient_problem_of
from ..kernels import calls
from ..kernels.calls import UNDIVIDED
from ..kernels.device.constants import GRID_YZ_MAX
from ..launch import BACKWARD, kernel_for, sms_option

FILE = "bwd4_fp32"
_plans: dict[tuple[object, ...], production.Plan] = {}


def backward(
    do, q, k, v, o, lse, dlse=None, softmax_scale=None, causal=False, top_left=False, deterministic=False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `ops.backward`, but dq, dk and dv are fp32, so that a sum of them can be rounded once. At head_dim
    256, and `deterministic`, they are of the inputs' type: rounded one by one."""
    if deterministic or q.shape[3] == 256 or max(q.shape[:2]) > GRID_YZ_MAX:
        return ops.backward(do, q, k, v, o, lse, dlse, softmax_scale, causal, top_left, deterministic)
    options = softmax_scale, causal, top_left
    strides = tuple(x.stride() for x in (q, k, v, o, do, lse))
    kind = q.shape, k.shape, strides, q.dtype, q.device, dlse is None, options, tuned.margin.get()
    make = lambda: _plan(do, q, k, v, o, lse, dlse, *options)
    plan = production.plan_of(_plans, kind, make)
    return production.run_on(q.device, lambda: _run(plan, do, q, k, v, o, lse, dlse), make)


def _plan(do, q, k, v, o, lse, dlse, softmax_scale, causal: bool, top_left: bool) -> production.Plan:
    problem, given = production._scaled(
        gradient_problem_of(do, q, k, v, o, lse, causal, top_left), softmax_scale
    )
    if dlse is not None:  # whose kernels are given their scale
        check_lse("dlse", dlse, q)
        given = given or (problem.head_dim**-0.5,)
        problem = problem.with_(scaled=True, lse_grad=True)
    production._check_inputs(BACKWARD, problem, q=q, k=k, v=v)
    least = problem.with_(batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_kv=1)
    launch = kernel_for(FILE, least, sms_option(tuned.gpu(q.device).sms)).launch
    part = production._part(
        production.WHOLE, production.WHOLE, calls.backward_scratch(problem, False, UNDIVIDED)
    )
    outputs = tuple(
        (shape, stride, torch.float32) for shape, stride, _ in map(production._dense_like, (q, k, v))
    )
    unreadable = not all(x is production._readable(x) for x in (do, o))
    return production.Plan(launch, outputs, (part,), given, unreadable)


def _run(plan: production.Plan, do, q, k, v, o, lse, dlse):
    if plan.unreadable or (do.data_ptr() | o.data_ptr()) % VECTOR_BYTES:
        do, o = production._readable(do), production._readable(o)
    gradients = tuple(production.empty(*x) for x in plan.outputs)
    given = plan.given if dlse is None else (*plan.given, dlse.contiguous())
    scratch = production._scratch(plan.parts[0], q.device)
    with production._several_kernels:
        calls.launch_backward(plan.launch, q, k, v, o, lse, do, *gradients, scratch, given)
    return gradients
