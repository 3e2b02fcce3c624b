"""The cases of `harness.policy_cases` that are about what the scores are: far from zero, about a soft cap,
NaN; and what `harness.cases` asks of small scales."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from harness import judging, reference
from harness.inputs import poison
from harness.policies import Given, random_given
from harness.policy_cases import HEAD_DIMS, checked, plain_of
from harness.reference import Rounding
from harness.registry import case
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import compile_stage

FAR = -1e3  # scores of keys that are seen, so far below zero that nothing of e^score is left
SPOILT = slice(200, 208)  # queries, or keys: of S's rows 8 to 15 of a warp's 16, or columns of every lane
BLOCK = 128  # queries, or keys: where these end, all tiles of backward kernels do
OF_QUERIES = -2.0  # what `shift_scores` adds to each column of a query


def shift_scores(given: Given, by: float) -> None:
    """q·k becomes `by` and some noise. Each column has the same part in it, and the noise of the second half
    is that of the first with the other sign, so that shift times noise cancels. (If one column made it all,
    a row of dK would be one large number, whose rounding the rule for rows takes for that of head_dim.)"""
    head_dim = given.problem.head_dim
    half = head_dim // 2
    for x, own in ((given.q, OF_QUERIES), (given.k, of_keys(by, head_dim))):
        x[..., half:] = -x[..., :half]
        x.copy_(x.float() * head_dim**-0.25 + own)


def of_keys(by: float, head_dim: int) -> float:
    """What `shift_scores` adds to each column of a key, so that q·k becomes `by`."""
    return by / head_dim / OF_QUERIES


def at_small_scales(stage_id: str, problem: Problem, *inputs: torch.Tensor) -> Iterator[str]:
    """With scales from the least normal fp32 on all P of a row are the same, and dV is a mean, however large
    LSE/scale is."""
    stage, module = ladder.load(stage_id)
    if module.supports(problem):
        return
    *qkv, do = inputs
    for scale in (2.0**-126, 2.0**-101, 2.0**-64):
        expected = judging.Expected(*qkv, problem.causal, do, softmax_scale=scale)
        tensors = expected.allocate(module, problem, **stage.options)
        module.run_kernel(compile_stage(stage_id, problem), poison(tensors))
        if not all(x.isfinite().all() for x in tensors.outputs.values()):
            yield f"{problem}: a scale of {scale:.0e} gives non-finite gradients"
        dv = expected.gradients[2]
        slack = {"rtol": 2**-6, "atol": 2**-8 * dv.abs().max().item()}
        if not torch.allclose(tensors.outputs["dv"].double(), dv, **slack):
            yield f"{problem}: a scale of {scale:.0e} gives another dv"


@case(policy="window")
def far_below_zero(stage_id, args):
    """Scores at which e^s is nothing: a maximum that stays at 0 while a row has seen no key loses them all;
    and sinks far above and below everything."""
    for head_dim in HEAD_DIMS:
        for fields in ({"window": (70, 0)}, {"window": (3, 3)}, {"window": (100, 0), "sink": True}):
            problem = plain_of(stage_id, head_dim, batch=1, seqlen_q=400, seqlen_kv=400, **fields)
            given = random_given(problem, scale=1.0, sink=torch.full((4,), FAR, device="cuda"))
            given.sink = given.sink if problem.sink else None
            shift_scores(given, FAR)
            yield from checked(stage_id, given, "scores far below zero")
        for sink in (-math.inf, -300.0, -30.0, 30.0, 300.0):
            problem = plain_of(stage_id, head_dim, batch=1, causal=True, sink=True)
            yield from checked(
                stage_id, random_given(problem, sink=torch.full((4,), sink, device="cuda")), f"sink {sink}"
            )


@case(policy="window")
def scores_about_the_cap(stage_id, args):
    """From far within the cap to far beyond it: tanh is computed in several ways. And of caps large and
    small, whose powers must have their place in fp32."""
    for head_dim in HEAD_DIMS:
        for cap in (1e-5, 3.0, 50.0, 300.0):
            for ahead in (0.2, 1.0, 5.0):  # of the cap, the largest of some thousand scores
                given = random_given(plain_of(stage_id, head_dim, batch=1, causal=True, softcap=cap))
                given.q *= ahead * cap / 4
                yield from checked(stage_id, given, f"scores up to {ahead} caps")


@case(direction="fwd", policy="window")
def scores_far_in_some_tiles(stage_id, args):
    """Of keys that a consumer sees first, of others alone, and of no more than one: what its first tile is
    decides how the others are computed."""
    for head_dim in HEAD_DIMS:
        for dtype in ("bfloat16", "float16"):
            for far in (slice(64), slice(256, None), slice(300, 301)):
                fields = {"batch": 1, "softcap": 50.0, "seqlen_q": 300, "seqlen_kv": 700, "dtype": dtype}
                given = random_given(plain_of(stage_id, head_dim, **fields))
                given.q *= 2.0
                given.k[:, :, far] *= 20.0
                yield from checked(stage_id, given, f"far scores of keys {far.start} to {far.stop}")


@case(direction="fwd", policy="window")
def scores_at_ends_of_the_cap(stage_id, args):
    """Of all keys at the lower end, or of some at the upper: a maximum that is not followed must leave room
    for the ones, and not lose the others."""
    masks = {}, {"causal": True}, {"window": (200, 0)}, {"window": (200, 0), "sink": True}
    for head_dim in HEAD_DIMS:
        for fields in (*masks, {"dtype": "float16"}):
            fields = {"batch": 1, "softcap": 50.0, "seqlen_q": 300, "seqlen_kv": 700} | fields
            for upper in (slice(0), slice(64), slice(64, None), slice(600, 601)):
                given = random_given(plain_of(stage_id, head_dim, **fields), scale=1.0)
                shift_scores(given, -150.0)
                given.k[:, :, upper] *= -1.0
                yield from checked(stage_id, given, f"keys {upper.start} to {upper.stop} at the upper end")


@case(direction="fwd", policy="window")
def keys_behind_those_at_the_lower_end(stage_id, args):
    """Of rows whose first tile is at one end of the cap the largest terms are in the next one, or in a later
    one, and below what the first one's maximum was raised to."""
    for head_dim in HEAD_DIMS:
        for fields in ({"window": (200, 0)}, {"causal": True}, {"window": (200, 0), "dtype": "float16"}):
            fields = {"batch": 1, "softcap": 50.0, "seqlen_q": 300, "seqlen_kv": 700} | fields
            for keys, level, noise in ((slice(256, None), -10.0, 12.0), (slice(None, None, 97), -25.0, 1.0)):
                given = random_given(plain_of(stage_id, head_dim, **fields), scale=1.0)
                shift_scores(given, -150.0)
                alone = given.k[:, :, keys].float() - of_keys(-150.0, head_dim)
                given.k[:, :, keys] = alone * noise + of_keys(level, head_dim)
                yield from checked(stage_id, given, f"keys {keys.start} to {keys.stop} at {level}")


@case(direction="fwd", policy="window")
def an_lse_about_zero(stage_id, args):
    """Of equal scores, as many as bring the LSE back to it: it must be right to 10⁻⁵. Beside a first tile
    that is far from zero they are taken for far; alone they are not."""
    for head_dim in HEAD_DIMS:
        # 636 keys: −6.46 is 0; 700: −6.55; 4000: −8.29. From 0.26 of the cap on, 13, all are far.
        of_700, of_4000 = (-7.0, -6.5, -6.0, -5.5), (-16.0, -8.75, -8.25, -7.75)
        for keys, levels, first in ((700, of_700, -20.0), (700, of_700, None), (4000, of_4000, None)):
            for level in levels:
                fields = {"batch": 1, "softcap": 50.0, "seqlen_q": 300, "seqlen_kv": keys}
                given = random_given(plain_of(stage_id, head_dim, **fields), scale=1.0)
                given.q.fill_(1.0)
                given.k.fill_(level / head_dim)
                given.k[:, :, :64] = (first or level) / head_dim
                yield from checked(stage_id, given, f"{level} of {keys}, first {first or level}")


@case(direction="fwd", policy="window")
def many_equal_keys_beside_a_larger_one(stage_id, args):
    """Thousands of equal terms, each row's of another size, beside one of about 1: added to it one by one
    they would all be rounded the same way, and an LSE about zero shows that."""
    for head_dim in HEAD_DIMS:
        for largest, fields in ((0, {}), (0, {"softcap": 300.0}), (3000, {})):
            fields = {"batch": 1, "seqlen_q": 300, "seqlen_kv": 4096} | fields
            given = random_given(plain_of(stage_id, head_dim, **fields))
            given.q.zero_()
            given.k.zero_()
            given.q[..., 0] = 1.0
            given.q[..., 1] = torch.linspace(0.25, 1.5, 300, device=given.q.device)
            given.q *= head_dim**0.5
            given.k[..., 0], given.k[..., 1] = -8.0, -1.0
            given.k[:, :, largest, 0], given.k[:, :, largest, 1] = -0.5, 0.0
            yield from checked(stage_id, given, f"keys from -8.25 to -9.5, a larger one at {largest}")


@case(direction="fwd", policy="window")
def rows_of_few_large_scores(stage_id, args):
    """One key or some equal ones are nearly all of a row, and none of them is in its first tile, nor in its
    last; or many far below zero are. A rough tanh is then off the same way in all that weighs, each row's
    elsewhere."""
    for head_dim in HEAD_DIMS:
        for cap, most in ((50.0, 60.0), (12.0, 15.0)):
            fields = {"batch": 1, "softcap": cap, "seqlen_q": 300, "seqlen_kv": 700}
            given = random_given(plain_of(stage_id, head_dim, **fields), scale=1.0)
            given.q.zero_()
            given.q[..., 0] = torch.linspace(most / 10, most, 300, device=given.q.device)
            for others, largest in ((0.6, 1), (-0.6, 1), (0.2, 3), (-0.6, 25), (0.6, 300), (-1.0, 0)):
                given.k.zero_()
                given.k[..., 0] = others
                given.k[:, :, :3, 0] = 0.75 if largest else 0.1
                given.k[:, :, 600 - largest : 600, 0] = 1.0
                again = replace(given)  # one that has kept nothing of the keys before
                yield from checked(stage_id, again, f"{largest} of 1, others of {others}")


@case(direction="fwd", policy="window")
def equal_keys_far_from_zero(stage_id, args):
    """Many terms of a row are the largest and equal, and none is of its first tile: what rounds one of them
    rounds all."""
    for head_dim in HEAD_DIMS:
        for fields in ({}, {"causal": True}, {"window": (500, 0)}, {"dtype": "float16"}):
            fields = {"batch": 1, "softcap": 50.0, "seqlen_q": 300, "seqlen_kv": 700} | fields
            for size in (3.0, 10.0, 30.0):
                given = random_given(plain_of(stage_id, head_dim, **fields))
                given.q *= 6.0
                given.k[:, :, 300:] = given.k[:, :, 300:301] * (size / 6.0)
                yield from checked(stage_id, given, f"equal keys, scores of deviation {size}")


# ---- NaN that some rows do not see -------------------------------------------------------------------------

Run = Callable[[Given], dict[str, torch.Tensor]]  # a kernel's outputs


def visible(problem: Problem) -> torch.Tensor:
    """(query, key): whether the one sees the other, in a dense problem."""
    queries, keys = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_kv)
    ahead = keys - queries - (0 if problem.top_left else problem.seqlen_kv - problem.seqlen_q)
    left, right = problem.window or (-1, 0 if problem.causal else -1)
    return ((ahead >= -left) | (left < 0)) & ((ahead <= right) | (right < 0))


def reached(problem: Problem, spoilt: str) -> dict[str, torch.Tensor]:
    """By output, which rows NaN in the rows SPOILT of q or k may reach: those that see it. Of gradients, all
    of a tile in which it is: zeros of a hidden pair are multiplied by it there."""
    seen = visible(problem)
    rows, keys = (torch.zeros(n, dtype=torch.bool) for n in seen.shape)
    if spoilt == "q":
        rows[SPOILT] = True
    else:
        keys[SPOILT] = True
        rows = seen[:, keys].any(1)
    if problem.direction != "bwd":
        return {"o": rows, "lse": rows}
    whole = lambda x: torch.cat([block.any().expand(len(block)) for block in x.split(BLOCK)])
    of_queries = whole(rows | seen[:, whole(keys)].any(1))
    of_keys = whole(keys | seen[whole(rows)].any(0))
    return {"dq": of_queries, "dk": of_keys, "dv": of_keys}


def with_spoilt(given: Given, name: str, value: float) -> Given:
    """The same with `value` in the rows SPOILT of q or k; of gradients, what the forward pass then saved."""
    x = getattr(given, name).clone()
    x[:, :, SPOILT] = value
    other = replace(given, **{name: x})
    if given.problem.direction == "bwd":
        rows = reached(given.problem.with_(direction="fwd"), name)["o"]
        other.saved = tuple(x.clone() for x in given.saved)
        for x in other.saved:
            x[:, :, rows] = math.nan
    return other


def spread_of_nan(given: Given, run: Run, rounding: Rounding) -> Iterator[str]:
    """What is wrong with rows that do not see a NaN, or with those that do if it does not show there."""
    plain = run(given)
    for name, value in (("k", math.nan), ("k", math.inf), ("q", math.nan)):
        found, mixed = run(with_spoilt(given, name, value)), {}
        for output, rows in reached(given.problem, name).items():
            rows = rows.to(found[output].device)
            if given.problem.direction != "bwd" and not found[output][:, :, rows].isnan().all():
                yield f"{value} in {name}: {output} of rows that see it is not NaN"
            mixed[output] = found[output].clone()
            mixed[output][:, :, rows] = plain[output][:, :, rows]
        for failure in given.judge(mixed, rounding, poisoned=False):
            yield f"{value} in {name}, which these rows do not see: {failure}"


HIDING = (  # kernels of `alone` in which some rows do not see all keys, and plain ones
    {"causal": True, "softcap": 3.0},
    {"window": (40, 0), "softcap": 3.0, "dtype": "float16"},
    {"causal": True},
    {"window": (40, 0)},
)


def far_scores(stage_id: str, head_dim: int, size: float, device: str = "cuda") -> Iterator[Given]:
    """Problems with some rows that do not see the keys SPOILT, and scores up to about `size`."""
    for fields in HIDING:
        extents = {"batch": 1, "seqlen_q": 515, "seqlen_kv": 515}
        given = random_given(plain_of(stage_id, head_dim, **fields, **extents), device=device)
        given.q *= size / 4  # deviations that the largest of some thousand is away
        yield given


def beside_nan(stage_id: str, given: Given, what: str = "") -> Iterator[str]:
    """`spread_of_nan` of a stage."""
    stage, module = ladder.load(stage_id)
    rounding = reference.rounding_of(stage, module, given.problem, **stage.options)
    for failure in spread_of_nan(given, lambda given: given.run(stage_id).outputs, rounding):
        yield f"{given.problem}{what}: {failure}"


@case(policy="window")
def nan_that_some_rows_do_not_see(stage_id, args):
    """Beside far scores: by what way a warp computes, and whether it rescales, must not be chosen by a
    comparison that is false of NaN. Scores about the cap, and far beyond it."""
    sizes = (3.0, 15.0) if ladder.load(stage_id)[0].direction != "bwd" else (15.0,)
    for head_dim in HEAD_DIMS:
        for size in sizes:
            for given in far_scores(stage_id, head_dim, size):
                yield from beside_nan(stage_id, given, f", scores up to {size}")


@case(direction="fwd", policy="window")
def small_rows_beside_nan(stage_id, args):
    """Rows with keys far below zero alone, among others with large scores. By what way they are all capped
    must be chosen with these in mind, though other rows of their threads are NaN."""
    for head_dim in HEAD_DIMS:
        for cap in (50.0, 12.0):
            fields = {"batch": 1, "softcap": cap, "seqlen_q": 300, "seqlen_kv": 700}
            given = random_given(plain_of(stage_id, head_dim, **fields), scale=1.0)
            given.q.zero_()
            given.k.zero_()
            small = slice(SPOILT.start - 8, SPOILT.start)
            given.q[..., 0], given.q[:, :, small, 0] = 0.8 * cap, 0.0
            given.q[:, :, small, 1] = torch.linspace(0.5, 0.7, 8, device=given.q.device) * cap
            given.k[..., 0], given.k[..., 1] = 1.0, -1.0
            yield from beside_nan(stage_id, given)
