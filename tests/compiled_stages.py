"""The stages' cases whose machine code is inspected, and what they compile to."""

import functools
import re
from collections.abc import Iterator

import pytest
from rotating import some

from harness import machine_code
from harness.case_runs import fitted
from harness.machine_code import KernelCode, Loop, cubin_of
from harness.sweep import HEAD_DIMS
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import compile_stage

STAGES = list(ladder.CHECKED)
TMA = ("k3_1", "k3_2", "k3_3")  # k2's arithmetic, its loads by TMA
MASKED = [(d, causal) for d in HEAD_DIMS for causal in (False, True)]
INSPECTED = {stage_id: some(stage_id, MASKED) for stage_id in STAGES}
CONFIGS = [(stage_id, *config) for stage_id, configs in INSPECTED.items() for config in configs]
every_config = pytest.mark.parametrize(("stage_id", "head_dim", "causal"), CONFIGS)


def problem_at(stage_id: str, head_dim: int, causal: bool) -> Problem:
    """The sweep's problem at N = 4096, of as many keys as the stage takes."""
    stage = ladder.load(stage_id)[0]
    square = Problem.square(4, 2048 // head_dim, 4096, head_dim, causal, direction=stage.direction)
    return fitted(stage, square)


def works_of(stage_id: str, problem: Problem) -> list:
    stage, module = ladder.load(stage_id)
    return module.work(problem, **stage.options)


def kernels_of(stage_id: str, head_dim: int, causal: bool) -> list[KernelCode]:
    return machine_code.disassemble(cubin_of(compile_stage(stage_id, problem_at(stage_id, head_dim, causal))))


def innermost_with_products(code: KernelCode) -> list[Loop]:
    innermost = [k for k in code.loops if not any(k.holds(other) for other in code.loops)]
    multiplies = lambda k: any(
        re.match("[HQ]GMMA", i.opcode) for i in code.instructions[k.first : k.last + 1]
    )
    return [k for k in innermost if multiplies(k)]


@pytest.fixture(scope="module", autouse=True)
def disassemble_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_code, "disassemble", functools.cache(machine_code.disassemble))
        yield
