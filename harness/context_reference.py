"""The pass rule on a ring's outputs, whole sequences put together from all ranks.

O is held to the yardstick of one GPU: rounded once, while a ring rounds each step's. Over a tensor that is
within the rule; a row whose O one GPU happens to round by little is held to the ring's own yardstick too,
which rounds as a ring does. Gradients follow from the O and LSE that the ring gave, and are judged so.
"""

import functools

import torch

from harness import judging, reference
from hopper_attention.integrations import zigzag

LAST_ROWS = 512  # of a slice
Whole = dict[str, torch.Tensor]  # q, k, v, do, o, lse, dq, dk, dv
Verdicts = dict[str, judging.Verdict]


def whole(
    x: Whole, causal: bool, ranks: int, forward: reference.Rounding, backward: reference.Rounding,
    softmax_scale: float | None = None, dlse: torch.Tensor | None = None, block_by_block: bool = False,
) -> Verdicts:  # fmt: skip
    """Every row, and every row's gradients; `block_by_block` if those of each block are rounded."""
    q, k, v, do, o, lse = (x[name] for name in ("q", "k", "v", "do", "o", "lse"))
    expected = judging.Expected(q, k, v, causal, do, softmax_scale=softmax_scale, dlse=dlse)
    found = {"forward": expected.judge({"o": o, "lse": lse}, forward)}
    if not found["forward"].passed:
        yard = reference.yardstick(q, k, v, causal, forward, scale=softmax_scale)
        others = [ring_yardstick(q, k, v, causal, forward, ranks, softmax_scale)]
        exact = expected.forward
        found["forward"] = judging.judge(o, exact[0], yard, lse, exact[1], others=others)
    expected.saved = o, lse
    gradients = {name: x[name] for name in ("dq", "dk", "dv")}
    found["backward"] = expected.judge(gradients, backward)
    if block_by_block and not found["backward"].passed:
        options = {"scale": softmax_scale, "dlse": dlse}
        inputs = q, k, v, o, lse, do, causal, backward
        found["backward"] = judging.judge_gradients(
            gradients,
            expected.gradients,
            reference.yardstick_gradients(*inputs, **options),
            judging.cancellation(q, k, v, do, softmax_scale),
            ring_gradients(*inputs, ranks, **options),
        )
    return found


def slices(x: Whole, causal: bool, forward: reference.Rounding, backward: reference.Rounding) -> Verdicts:
    """LAST_ROWS queries and as many keys before three places. What gradients of keys follow from, O and LSE
    of all queries, is computed in float64 once."""
    q, k, v, do = inputs = [x[name] for name in ("q", "k", "v", "do")]
    n = q.shape[2]
    exact, read = reference.reference(q, k, v, causal), (x["o"], x["lse"])
    floors = judging.cancellation(*inputs)
    found = {}
    for place in (n, n // 2, n // 4):
        some = torch.arange(place - LAST_ROWS, place, device=q.device)
        pick = lambda name, some=some: x[name][:, :, some]
        part = [y[:, :, some] for y in exact]
        yard = reference.yardstick(q, k, v, causal, forward, some)
        found[f"forward, rows to {place}"] = judging.judge(pick("o"), part[0], yard, pick("lse"), part[1])

        def gradients(compute, saved, *how, some=some, **more):
            """dQ of these queries, dK and dV of these keys."""
            of = lambda **which: compute(q, k, v, *saved, do, causal, *how, **which, **more)
            return of(rows=some)[0], *of(columns=some)[1:]

        yards = functools.partial(gradients, reference.yardstick_gradients, read, backward)
        outputs = {name: pick(name) for name in ("dq", "dk", "dv")}
        found[f"backward, rows to {place}"] = judging.judge_roundings(
            outputs,
            gradients(reference.reference_gradients, exact),
            lambda nudge, yards=yards: yards(nudge=nudge),
            floors,
        )
    return found


# ---- a ring's roundings -----------------------------------------------------------------------------------


def steps_of(ranks: int, causal: bool):
    """(rank, step) of every block of scores."""
    return [(r, step) for r in range(ranks) for step in zigzag.schedule(r, ranks, causal)]


def ring_yardstick(
    q, k, v, causal: bool, rounding: reference.Rounding, ranks: int, scale: float | None = None
) -> torch.Tensor:
    """`reference.yardstick` of each step, O rounded, merged in float64 and rounded."""
    parts = [[zigzag.shard(x, r, ranks) for x in (q, k, v)] for r in range(ranks)]
    sums: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * ranks
    for r, step in steps_of(ranks, causal):
        keys = [step.keys.of(x) for x in parts[step.source][1:]]
        part = reference.yardstick_of(step.queries.of(parts[r][0]), *keys, step.causal, rounding, scale=scale)
        o, lse = (x.double() for x in part)
        if sums[r] is None:
            sums[r] = o, lse
            continue
        before = [step.queries.of(x) for x in sums[r]]
        both = torch.logaddexp(before[1], lse)
        weigh = lambda x, both=both: (x - both).exp()[..., None]
        before[0].copy_(before[0] * weigh(before[1]) + o * weigh(lse))
        before[1].copy_(both)
    return zigzag.unshard([o.to(q.dtype) for o, _ in sums])


def ring_gradients(
    q, k, v, o, lse, do, causal: bool, rounding: reference.Rounding, ranks: int, scale: float | None = None,
    dlse: torch.Tensor | None = None,
) -> reference.Gradients:  # fmt: skip
    """`reference.yardstick_gradients` of each step, rounded, added in fp32 and rounded."""
    cut = lambda x: [None if x is None else zigzag.shard(x, r, ranks) for r in range(ranks)]
    qs, ks, vs, os, lses, dos, dlses = map(cut, (q, k, v, o, lse, do, dlse))
    sums = [[torch.zeros_like(x[r], dtype=torch.float32) for r in range(ranks)] for x in (qs, ks, vs)]
    for r, step in steps_of(ranks, causal):
        of_q = lambda x, r=r, step=step: None if x[r] is None else step.queries.of(x[r])
        of_k = lambda x, step=step: step.keys.of(x[step.source])
        inputs = of_q(qs), of_k(ks), of_k(vs), of_q(os), of_q(lses), of_q(dos), step.causal, rounding
        found = reference.yardstick_gradients(*inputs, scale=scale, dlse=of_q(dlses))
        for x, total in zip(found, (of_q(sums[0]), of_k(sums[1]), of_k(sums[2]))):
            total += x.float()
    return tuple(zigzag.unshard([x.to(q.dtype) for x in of_ranks]) for of_ranks in sums)
