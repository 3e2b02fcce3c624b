"""Backward passes with few key heads: every number of parts that bwd4_gqa can have, beside bwd4 and peers.

    python -m harness.parts            measure and print
    python -m harness.parts --save     and write results/<gpu>/library/parts.json

What `calls.parts_of` chooses is not measured here but looked up, in the tables and the tests: an edit of the
choice is held against what is committed.
"""

import argparse
import sys

import torch

from harness import peers, results, timing
from harness.inputs import random_inputs
from hopper_attention import production
from hopper_attention.kernels import calls
from hopper_attention.kernels.contract import Problem

PEERS = ("fa2", "cudnn", "fa3", "fa4")
SECONDS = 0.06  # of each call
AGREE = 0.01  # of the largest element: by how much gradients may differ from bwd4's
# batch, heads, key heads, queries, keys, head_dim, causal
PROBLEMS = [
    (1, 8, 1, 8192, 8192, 128, True),  # Llama-3 70B, one of 8 GPUs
    (1, 8, 1, 8192, 8192, 128, False),
    (1, 8, 1, 8192, 8192, 64, True),
    (1, 16, 1, 4096, 4096, 128, True),  # multi-query
    (1, 16, 1, 4096, 4096, 64, True),
    (1, 16, 2, 2048, 2048, 64, True),
    (2, 14, 2, 4096, 4096, 64, True),  # Qwen2.5 0.5B
    (2, 14, 2, 4096, 4096, 128, True),
    (1, 28, 4, 4096, 4096, 128, True),  # Qwen2.5 7B
    (1, 40, 8, 4096, 4096, 128, True),  # Qwen2.5 14B
    (1, 32, 8, 512, 512, 128, True),  # Llama-3 8B
    (1, 32, 8, 2048, 2048, 128, True),
    (2, 32, 8, 2048, 2048, 128, True),
    (4, 32, 8, 2048, 2048, 128, True),
    (1, 32, 8, 4096, 4096, 128, True),
    (1, 32, 8, 4096, 4096, 64, True),
    (1, 32, 8, 8192, 8192, 128, True),
    (1, 32, 8, 512, 8192, 128, True),
    (1, 32, 8, 2048, 8192, 128, True),
    (1, 64, 8, 1024, 1024, 128, True),  # Llama-3 70B
    (4, 64, 8, 1024, 1024, 128, True),
    (1, 64, 8, 2048, 2048, 128, True),
    (1, 64, 8, 4096, 4096, 128, True),
    (1, 64, 8, 4096, 4096, 128, False),
    (1, 64, 8, 4096, 4096, 64, True),
    (1, 64, 8, 8192, 8192, 128, True),
    (2, 16, 2, 1024, 1024, 128, False),
    (2, 16, 2, 1024, 1024, 64, False),
    (8, 16, 2, 1024, 1024, 128, True),
]


def measure(problem: Problem) -> dict[str, float]:
    """µs of a backward pass: by number of parts, 1 being bwd4, and by peer. Raises RuntimeError where
    gradients in parts are not bwd4's."""
    q, k, v, do = random_inputs(problem)
    o, lse = production.forward(q, k, v, None, problem.causal, problem.top_left)
    inputs = do, q, k, v, o, lse, None, None, problem.causal, problem.top_left, False
    group, chosen = problem.heads // problem.kv_heads, calls.parts_of
    found, first = {}, None
    try:
        for parts in (x for x in range(1, group + 1) if group % x == 0):
            calls.parts_of = lambda problem, parts=parts: parts
            plan = production._plan_backward(*inputs)
            call = lambda plan=plan: production._backward(plan, do, q, k, v, o, lse, None, q.device)
            gradients = call()
            first = first or gradients
            for x, y in zip(gradients, first):
                if (x - y).abs().max() > AGREE * y.abs().max():
                    raise RuntimeError(f"{problem}: gradients in {parts} parts are not bwd4's")
            found[f"parts {parts}"] = call
    finally:
        calls.parts_of = chosen
    for name in peers.versions(list(PEERS)):
        try:
            call = peers.PEERS[name].build(problem, q, k, v, do)
            call()
        except Exception as error:
            print(f"{problem}: {name}: {error!s:.80}")
        else:
            found[name] = call
    times = timing.interleaved(found, SECONDS)
    return {name: round(1e3 * time.ms_median, 1) for name, time in times.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.parts", description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write results/<gpu>/library/parts.json")
    save = parser.parse_args(arguments).save
    if not torch.cuda.is_available():
        print("harness.parts: needs a GPU", file=sys.stderr)
        return 2
    rows = []
    for shape in PROBLEMS:
        problem = Problem(*shape, direction="bwd")
        names = "batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv", "head_dim", "causal"
        rows.append(dict(zip(names, shape)) | {"us": measure(problem)})
        print(problem, rows[-1]["us"], flush=True)
    if save:
        environment = timing.environment(peers.versions(list(PEERS)))
        print(f"wrote {results.save_library('parts', rows, environment)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
