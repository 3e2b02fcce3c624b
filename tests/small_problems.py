"""Problems small enough for float64, and what the tests on them share."""

import torch

from harness.inputs import random_inputs
from hopper_attention.kernels.contract import LazyMaximum, Problem

SHAPES = {
    "square": Problem.square(2, 3, 203, 64, False),
    "causal": Problem.square(2, 3, 203, 128, True),
    "one row": Problem.square(1, 1, 1, 64, True),
    "grouped": Problem(2, 6, 2, 65, 65, 64, False),
    "grouped, causal": Problem(1, 5, 1, 130, 130, 64, True),
    "few queries": Problem(2, 2, 2, 7, 130, 64, False),
    "few queries, causal": Problem(2, 4, 2, 33, 130, 64, True),
    "many queries": Problem(1, 2, 2, 130, 33, 64, False),
    "fp16": Problem.square(1, 2, 65, 64, True, dtype="float16"),
    "top left": Problem.square(1, 2, 130, 64, True, top_left=True),
    "few queries, top left": Problem(2, 4, 2, 33, 130, 64, True, top_left=True),
    "many queries, top left": Problem(1, 4, 2, 130, 33, 64, True, top_left=True),
}
GRADIENT_SHAPES = SHAPES | {
    "many queries, causal": Problem(1, 4, 2, 130, 33, 64, True),  # the first 97 see no key
    "one key": Problem(1, 2, 2, 203, 1, 64, False),
    "one query": Problem(2, 2, 1, 1, 65, 128, True),
}
IN_CODES = LazyMaximum(128, 2, 2.75, e4m3=6.0)  # as k7


def mask_of(problem: Problem) -> dict[str, bool]:
    return {"causal": problem.causal, "top_left": problem.top_left}


def visible_pairs(seqlen_q: int, seqlen_kv: int, causal: bool, top_left: bool) -> torch.Tensor:
    """Which keys (columns) each query (row) sees: aligned at the bottom right, the last query sees every
    key, at the top left the first query sees one."""
    visible = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if causal and top_left:
        return visible.tril()
    return visible.tril(seqlen_kv - seqlen_q) if causal else visible


backward = lambda problem: random_inputs(problem.with_(direction="bwd"), "cpu")


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def in_codes(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).float()
