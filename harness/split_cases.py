"""Cases of tiles of keys that are left over by a round of the SMs, and taken in parts
(`kernels.device.split_tiles`)."""

from functools import partial

import torch

from harness.case_runs import captured, differing, inputs_for, judged, ready, run
from harness.inputs import poison, random_inputs
from harness.registry import case, same
from hopper_attention.kernels import calls_split
from hopper_attention.kernels.contract import Problem
from hopper_attention.kernels.device.constants import SMS
from hopper_attention.launch import BACKWARD

REPEATS = 50


def left_over(dtype: str = "bfloat16") -> list[Problem]:
    """One tile more than there are SMs; three more, with groups of heads; many more. The last tiles of keys
    and of queries are not full."""
    plain = Problem.square(1, SMS + 1, 100, 128, False, dtype=dtype, direction="bwd")
    return [
        plain.with_(seqlen_q=2500),
        plain.with_(batch=3, heads=20, kv_heads=5, seqlen_q=1333, seqlen_kv=1111),
        plain.with_(batch=2, heads=10, kv_heads=10, seqlen_q=4000, seqlen_kv=1160, head_dim=96),
    ]


@case(BACKWARD)
def tiles_left_over_by_a_round(stage_id, args):
    for problem in [x for dtype in ("bfloat16", "float16") for x in left_over(dtype)]:
        if calls_split.split_for(problem)[1] == 1:
            yield f"{problem}: nothing is split"
        q, k, v, do = random_inputs(problem)
        yield from judged(stage_id, q, k, v, do, False, problem)


@case(BACKWARD)
def parts_put_together_in_one_order(stage_id, args):
    """dK and dV have the same bits whoever comes last, and what counts the parts is at zero again."""
    for problem in left_over():
        module, compiled, tensors = ready(stage_id, inputs_for(problem), False)
        first: list[torch.Tensor] = []
        for _ in range(REPEATS):
            module.run_kernel(compiled, tensors)
            found = [tensors.dk.clone(), tensors.dv.clone()]
            first = first or found
            if not all(map(same, found, first)):
                yield f"{problem}: dK and dV are not the same every time"
                break
            if any(x.any() for x in tensors.workspace.values() if x.dtype == torch.int32):
                yield f"{problem}: a counter is not at zero"
                break


@case(BACKWARD)
def split_tiles_in_a_graph(stage_id, args):
    """A replay leaves counters and parts as the next one needs them."""
    for problem in left_over():
        inputs = inputs_for(problem)
        expected = run(stage_id, inputs, False)
        module, compiled, tensors = ready(stage_id, inputs, False)
        graph = captured(partial(module.run_kernel, compiled, tensors))
        for replay in range(3):
            poison(tensors)
            graph.replay()
            torch.cuda.synchronize()
            for name in differing(stage_id, tensors.outputs, expected):
                yield f"{problem}: {name} of replay {replay} differs from eager"
