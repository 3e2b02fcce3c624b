"""What the cases share: problems and inputs for them, a stage's run on them, and what of it went wrong."""

from collections.abc import Callable, Iterator

import torch

from harness import judging, reference
from harness.inputs import as_read, poison, random_inputs
from harness.registry import same
from harness.stages import backward, forward, prepare, prepare_backward
from harness.sweep import HEAD_DIMS
from hopper_attention.checks import problem_of
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import LazyMaximum, Problem, Stage, Tensors

worst_seen: dict[str, float] = {}
Outputs = dict[str, torch.Tensor]  # o and lse, or dq, dk and dv


def small(stage_id: str, **changes: object) -> list[Problem]:
    """A ragged problem of the stage's direction for each head_dim and mask, `fitted`."""
    stage = ladder.load(stage_id)[0]
    length = 203 if stage.most_keys is None else 113
    plain = fitted(stage, Problem.square(2, 3, length, 64, False, direction=stage.direction).with_(**changes))
    return [plain.with_(head_dim=d, causal=causal) for d in HEAD_DIMS for causal in (False, True)]


def fitted(stage: Stage, problem: Problem) -> Problem:
    """The problem with no more keys than the stage takes, ragged if it was; queries are as many as before."""
    if stage.most_keys is None or problem.seqlen_kv <= stage.most_keys:
        return problem
    return problem.with_(seqlen_kv=stage.most_keys - problem.seqlen_kv % 32)


def inputs_for(problem: Problem, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random q, k, v, and of a backward problem also o, lse, do."""
    q, k, v, *do = random_inputs(problem, seed=seed)
    return judging.Expected(q, k, v, problem.causal, *do, top_left=problem.top_left).inputs


def ready(
    stage_id: str, inputs: tuple[torch.Tensor, ...], causal: bool, top_left: bool = False
) -> tuple[object, object, Tensors]:
    """`prepare` or `prepare_backward`: (module, compiled, tensors) of a stage for `Expected.inputs`."""
    if len(inputs) == 3:
        return prepare(*inputs, causal=causal, top_left=top_left, stage=stage_id)
    *inputs, do = inputs
    return prepare_backward(do, *inputs, causal=causal, top_left=top_left, stage=stage_id)


def run(
    stage_id: str,
    inputs: tuple[torch.Tensor, ...],
    causal: bool,
    out: object = None,
    top_left: bool = False,
) -> Outputs:
    """The stage's outputs through `stages.forward` or `stages.backward`, for `Expected.inputs`."""
    options = {"causal": causal, "top_left": top_left, "stage": stage_id, "out": out}
    if len(inputs) == 3:
        return dict(zip(("o", "lse"), forward(*inputs, **options)))
    *inputs, do = inputs
    return dict(zip(("dq", "dk", "dv"), backward(do, *inputs, **options)))


def run_poisoned(
    stage_id: str, inputs: tuple[torch.Tensor, ...], causal: bool, top_left: bool = False
) -> Outputs:
    """The stage's outputs, into outputs and scratch filled with NaN."""
    module, compiled, tensors = ready(stage_id, inputs, causal, top_left)
    module.run_kernel(compiled, poison(tensors))
    return tensors.outputs


def judged(stage_id: str, q, k, v, do, causal: bool, what: object, top_left: bool = False) -> Iterator[str]:
    """The pass rule; `do` is None for a forward stage."""
    stage, module = ladder.load(stage_id)
    q, k, v = as_read(stage.direction, q, k, v)
    expected = judging.Expected(q, k, v, causal, do, top_left)
    module, compiled, tensors = ready(stage_id, expected.inputs, causal, top_left)
    shape = problem_of(q, k, v, causal, top_left).with_(direction=stage.direction)
    rounding = reference.rounding_of(stage, module, shape, **stage.options)
    yield from noted(expected.run(module, compiled, tensors, rounding), what)


def as_multiplied(stage_id: str, problem: Problem, q, k, v) -> tuple[torch.Tensor, ...]:
    """q, k and v as a forward stage multiplies them: as `as_read`, or as it quantises them itself."""
    stage, module = ladder.load(stage_id)
    rounding = reference.rounding_of(stage, module, problem, **stage.options)
    if isinstance(rounding, LazyMaximum) and rounding.quantized:
        return judging.Expected(q, k, v, problem.causal).quantized(rounding.quantized).inputs
    return as_read(problem.direction, q, k, v)


def noted(verdict: judging.Verdict, what: object) -> Iterator[str]:
    """The verdict's failures; its ratios join the worst seen."""
    for name in ("max_ratio", "rms_ratio", "block_rms_ratio", "row_rms_ratio", "lse_error"):
        worst_seen[name] = max(worst_seen.get(name, 0.0), getattr(verdict, name))
    for failure in verdict.failures:
        yield f"{what}: {failure}"


def captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of a launch, which is made once before: that loads the module, which a capture must not."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def differing(stage_id: str, found: Outputs, expected: Outputs) -> list[str]:
    """The outputs that differ. They must be bit-identical, but for a stage with float atomics: there sums of
    another order, rounded to 16 bits, may differ by a unit in the last place, or where they cancel by a
    little of what was added."""
    if not ladder.load(stage_id)[0].atomics:
        return [name for name, x in found.items() if not same(x, expected[name])]
    close = lambda x, y: torch.allclose(
        x.float(), y.float(), rtol=2**-7, atol=2**-12 * y.abs().max().item() if y.numel() else 0
    )
    return [name for name, x in found.items() if not close(x, expected[name])]


def refused(call: Callable[[], object], error: type[Exception], words: str) -> Iterator[str]:
    try:
        call()
    except error as raised:
        if words not in str(raised):
            yield f"refused with {raised!s:.120}, expected a message with {words!r}"
    else:
        yield f"not refused, expected {error.__name__} with {words!r}"
