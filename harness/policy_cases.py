"""The cases of `harness.cases` for stages that take a window, a soft cap, a sink or packed sequences: each
alone, as models have them together, and what others got wrong.

A call can reach 150 such kernels of each of the forward stages and 300 of the backward ones
(`launch.reachable_with_policies`). The cases run about 40 of each: all masks, caps, sinks and packed
sequences at every head_dim, combinations as models have them; of the 16 of bwd4_one, which takes packed
sequences alone, 5. A stage's record says which, and of how many problems each has passed.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from harness import reference
from harness.case_runs import captured
from harness.policies import Given, random_given, starts_of
from harness.registry import case, same
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import CANONICAL, WITH_POLICIES, compile_stage, compiled_for

HEAD_DIMS = (64, 128, 256)
EDGES = (63, 64, 65, 127, 128, 129)  # of windows, about the ends of tiles
MANY = 10**5  # sequences


def plain_of(stage_id: str, head_dim: int = 64, **fields: object) -> Problem:
    direction = ladder.load(stage_id)[0].direction
    return Problem.square(2, 4, 203, head_dim, False, direction=direction).with_(**fields)


def packed_of(stage_id: str, sequences, head_dim: int = 64, behind: int = 0, **fields: object) -> Problem:
    """A problem of packed sequences, with no more keys than the stage takes and so many rows behind the last
    one."""
    most = ladder.load(stage_id)[0].most_keys
    if most is not None:
        sequences = [(queries, min(keys, most)) for queries, keys in sequences]
    queries, keys = (sum(x) + behind for x in zip(*sequences)) if sequences else (behind, behind)
    extents = {"batch": 1, "seqlen_q": queries, "seqlen_kv": keys, "sequences": tuple(sequences)}
    return plain_of(stage_id, head_dim, **fields).with_(**extents)


def policies_of(stage_id: str) -> list[str]:
    """Those of `Problem.policies` that a stage takes."""
    if stage_id not in WITH_POLICIES:
        return []
    stage, module = ladder.load(stage_id)
    one = Problem.square(1, 1, 1, 64, False, direction=stage.direction)
    alone = {name: one.with_(**{name: value}) for name, value in CANONICAL.items()}
    return [name for name, problem in alone.items() if module.supports(problem) is None]


def head_dims_of(stage_id: str) -> list[int]:
    """Those of HEAD_DIMS of whose packed sequences a stage computes something."""
    of = {d: packed_of(stage_id, ((9, 9),), d) for d in HEAD_DIMS}
    return [d for d, problem in of.items() if ladder.load(stage_id)[1].supports(problem) is None]


def masks_of(stage_id: str, masks: tuple[dict[str, object], ...] | None = None) -> list[dict[str, object]]:
    """Those of the masks that a stage takes, by default of MASKED."""
    return [mask for mask in masks or MASKED if "window" not in mask or "window" in policies_of(stage_id)]


problems_passed: Counter[Problem] = Counter()  # by what is compiled; what `records` keeps


def checked(stage_id: str, given: Given, what: str = "") -> Iterator[str]:
    """The pass rule, or a refusal by name, which `harness.policy_cases` cannot meet: `chosen` asks first."""
    if reason := ladder.load(stage_id)[1].supports(given.problem):
        yield f"{given.problem}: refused: {reason}"
        return
    try:
        failures = given.check(stage_id)
        torch.cuda.synchronize()
    except RuntimeError as error:  # of a launch, which names no problem
        raise RuntimeError(f"{given.problem}{what and ', '}{what}: {error!s:.200}") from error
    if not failures:
        problems_passed[compiled_for(stage_id, given.problem)] += 1
    for failure in failures:
        yield f"{given.problem}{what and ', '}{what}: {failure}"


def kernels(stage_id: str) -> Counter[Problem]:
    """The kernels that the first cases run, each alone, together and packed, and how many problems each."""
    takes, problems = policies_of(stage_id), []
    if "sequences" in takes:
        problems += [problem for _, problem in packed(stage_id)]
    if "window" in takes:
        problems += *alone(stage_id), *together(stage_id)
    return Counter(compiled_for(stage_id, problem) for problem in problems)


# ---- each, and together ------------------------------------------------------------------------------------

ALONE = (
    {"window": (40, 0)},
    {"window": (-1, 9)},
    {"window": (0, 0)},
    {"window": (70, 33)},
    {"softcap": 3.0},
    {"softcap": 50.0, "causal": True},
    {"sink": True},
    {"sink": True, "causal": True},
    {"sink": True, "causal": True, "dtype": "float16"},
    {"window": (100, 0), "dtype": "float16", "softcap": 20.0},
)
TOGETHER = (  # as models have them, and everything at once
    {"heads": 8, "kv_heads": 4, "window": (127, 0), "softcap": 50.0, "head_dim": 256},  # Gemma 2
    {"heads": 8, "kv_heads": 4, "causal": True, "softcap": 50.0, "head_dim": 256},
    {"heads": 16, "kv_heads": 2, "window": (127, 0), "sink": True, "head_dim": 64},  # gpt-oss
    {"heads": 16, "kv_heads": 2, "causal": True, "sink": True, "head_dim": 64},
    {"heads": 8, "kv_heads": 2, "window": (255, 0), "head_dim": 128},  # Mistral
    {"heads": 8, "kv_heads": 2, "window": (31, 17), "softcap": 5.0, "sink": True, "head_dim": 128},
)
EXTENTS = ({}, {"seqlen_q": 1025, "seqlen_kv": 1025}, {"seqlen_kv": 700}, {"seqlen_q": 700}, {"seqlen_q": 1})


def alone(stage_id: str) -> Iterator[Problem]:
    for head_dim in HEAD_DIMS:
        for fields in ALONE:
            for extents in EXTENTS:
                yield plain_of(stage_id, head_dim, batch=1, **fields).with_(**extents)


def together(stage_id: str) -> Iterator[Problem]:
    for fields in TOGETHER:
        for extents in EXTENTS:
            plain = plain_of(stage_id, **{**fields, **extents})
            yield plain
            if plain.direction == "bwd":
                yield plain.with_(scaled=True, lse_grad=True)
        yield packed_of(stage_id, ((300, 300), (1, 77), (64, 64), (0, 9), (513, 513), (2, 2)), **fields)


@case(policy="window")
def policies_alone(stage_id, args):
    for problem in alone(stage_id):
        yield from checked(stage_id, random_given(problem, scale=3.0 * problem.head_dim**-0.5))


@case(policy="window")
def policies_together(stage_id, args):
    for problem in together(stage_id):
        scale = None if problem.lse_grad else 2.0 * problem.head_dim**-0.5
        yield from checked(stage_id, random_given(problem, scale=scale))


@case(policy="window")
def edges_of_windows(stage_id, args):
    """Off by one on either side moves a row of a small window by more than its roundings."""
    for head_dim in HEAD_DIMS:
        for left, right in ((1, 0), (0, 1), (2, 2), *((x, 0) for x in EDGES), (-1, 64), (64, -1), (127, 127)):
            for extents in ({"seqlen_q": 512, "seqlen_kv": 512}, {"seqlen_q": 257, "seqlen_kv": 601}):
                problem = plain_of(stage_id, head_dim, batch=1, window=(left, right), **extents)
                yield from checked(stage_id, random_given(problem))


# ---- packed sequences --------------------------------------------------------------------------------------

PACKED = {
    "equal": ((256, 256),) * 5,
    "ragged": ((203, 203), (1, 1), (64, 64), (65, 65), (513, 513), (31, 31)),
    "without queries or keys": ((0, 40), (70, 0), (0, 0), (33, 65), (5, 0)),
    "empty at both ends": ((0, 0), (100, 100), (0, 0)),
    "one token beside an empty one": ((1, 1), (0, 0)),
    "more keys": ((65, 301), (1, 513), (128, 129)),
    "more queries": ((301, 65), (513, 1), (129, 128)),
    "one long, many short": ((1500, 1500), *(((7, 7),) * 90)),
}
MASKED = ({}, {"causal": True}, {"window": (37, 0)}, {"window": (20, 11)})


def packed(stage_id: str) -> Iterator[tuple[str, Problem]]:
    """Named problems."""
    for head_dim in head_dims_of(stage_id):
        for name, sequences in PACKED.items():
            for mask in masks_of(stage_id):
                problem = packed_of(stage_id, sequences, head_dim, behind=70, **mask)
                if problem.direction != "bwd" or all(problem.totals):
                    yield name, problem
    fields = {"causal": True, "heads": 8, "kv_heads": 2, "dtype": "float16"}
    yield "GQA, fp16", packed_of(stage_id, PACKED["ragged"], 128, **fields)


def counted(stage_id: str, given: Given, name: str) -> Iterator[str]:
    """Where sequences taken as so many tiles each, which nothing lists then, have other bits."""
    if ladder.load(stage_id)[0].direction == "bwd":
        return  # its tiles are always listed
    listed = given.run(stage_id).outputs
    for each in (1, 2, 9):
        for output, x in replace(given, each=each).run(stage_id).outputs.items():
            if not same(x, listed[output]):
                yield f"{given.problem}, {name}: {output} as {each} tiles each is not that of listed tiles"


@case(policy="sequences")
def packed_sequences(stage_id, args):
    """Of a forward stage also as if all had so many tiles, which nothing lists then: fewer than the longest
    has, and more than any. The bits are those of listed tiles."""
    for name, problem in packed(stage_id):
        given = random_given(problem, outside=math.inf)
        yield from checked(stage_id, given, name)
        yield from counted(stage_id, given, name)


@case(policy="sequences")
def short_sequences_of_many_heads(stage_id, args):
    """Heads of a sequence of up to 64 queries share tiles: as many as a tile has, and fewer; key heads with
    one query head, with as many as a tile has, and with more; among sequences that share with nobody."""
    short = [(n, n) for n in (64, 1, 63, 0, 17, 64, 33)]
    short += [(5, 0), (0, 9), (3, 64), (64, 2), (64, 65), (65, 3)]
    for heads, kv_heads in ((1, 1), (2, 2), (5, 5), (16, 16), (6, 3), (8, 2), (7, 1), (20, 5)):
        for head_dim in head_dims_of(stage_id):
            for mask in masks_of(stage_id):
                sequences = [*short, (700, 700), *short] if heads < 16 else short * 5
                fields = {"heads": heads, "kv_heads": kv_heads} | mask
                problem = packed_of(stage_id, sequences, head_dim, behind=70, **fields)
                yield from checked(stage_id, random_given(problem, outside=math.nan))
    for softcap in (0.0, 5.0) if "softcap" in policies_of(stage_id) else ():
        fields = {"heads": 16, "kv_heads": 4, "causal": True, "sink": True, "softcap": softcap}
        yield from checked(stage_id, random_given(packed_of(stage_id, short * 9, 128, **fields)))


@case(policy="sequences")
def padding_between_sequences(stage_id, args):
    """`seqused`: rows between sequences hold NaN or Inf, and stay as they are. Listed or counted."""
    for outside in (math.nan, math.inf):
        for mask in masks_of(stage_id):
            sequences = PACKED["ragged"] + PACKED["without queries or keys"]
            padding = [(i % 3 * 20, (i + 1) % 3 * 33) for i in range(len(sequences))]
            plain = packed_of(stage_id, sequences, 128, **mask)
            queries, keys = (sum(x) for x in zip(*padding))
            problem = plain.with_(seqlen_q=plain.seqlen_q + queries, seqlen_kv=plain.seqlen_kv + keys)
            given = random_given(problem, padding=padding, outside=outside)
            yield from checked(stage_id, given)
            yield from counted(stage_id, given, "padded")


@case(policy="sequences")
def many_sequences(stage_id, args):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (MANY,), generator=generator).tolist()
    for mask in masks_of(stage_id, ({"causal": True}, {"window": (1, 0)})):
        problem = packed_of(stage_id, [(n, n) for n in lengths], 64, heads=2, kv_heads=1, **mask)
        yield from checked(stage_id, random_given(problem))


@case(policy="sequences")
def sequences_in_another_order(stage_id, args):
    """A sequence's bits depend on no other sequence, nor on its place."""
    if ladder.load(stage_id)[0].atomics:
        return
    most = ladder.load(stage_id)[0].most_keys or 700
    sequences = [(n, n) for n in (min(203, most), 64, 1, most, 65)]
    for head_dim in head_dims_of(stage_id):
        problem = packed_of(stage_id, sequences, head_dim, causal=True)
        given = random_given(problem)
        plain = given.run(stage_id).outputs
        order = [3, 0, 4, 2, 1]
        starts = starts_of([q for q, _ in sequences])
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).cuda()
        other = Given(problem.with_(sequences=tuple(sequences[i] for i in order)), *(
            x[:, :, rows].contiguous() for x in (given.q, given.k, given.v)
        ))  # fmt: skip
        other.do = None if given.do is None else given.do[:, :, rows].contiguous()
        other.starts = (starts_of([sequences[i][0] for i in order]),) * 2
        for name, x in other.run(stage_id).outputs.items():
            if not same(x, plain[name][:, :, rows]):
                yield f"{problem}: {name} depends on the order of sequences"


@case(policy="sequences")
def a_graph_of_other_lengths(stage_id, args):
    """A CUDA graph reads the lengths of its replay, not those it was captured with."""
    module = ladder.load(stage_id)[1]
    first, then = ((100, 100), (200, 200), (84, 84)), ((0, 0), (383, 383), (1, 1))
    if module.STAGES[0].most_keys:
        first, then = ((100, 100), (17, 17), (84, 84)), ((0, 0), (128, 128), (73, 73))
    for head_dim in head_dims_of(stage_id):
        given, other = (random_given(packed_of(stage_id, x, head_dim, causal=True)) for x in (first, then))
        t = given.allocate(stage_id)
        compiled = compile_stage(stage_id, given.problem)
        graph = captured(partial(module.run_kernel, compiled, t))
        fresh = other.allocate(stage_id)
        for name in ("q", "k", "v", "do", *(("o", "lse") if t.do is not None else ())):
            if getattr(t, name) is not None:
                getattr(t, name).copy_(getattr(fresh, name))
        for mine, theirs in zip(t.cu_seqlens, fresh.cu_seqlens):
            mine.copy_(theirs)
        other.poison(t)
        graph.replay()
        torch.cuda.synchronize()
        stage = ladder.load(stage_id)[0]
        rounding = reference.rounding_of(stage, module, other.problem, **stage.options)
        for failure in other.judge(t.outputs, rounding):
            yield f"{other.problem}, replayed: {failure}"
