"""The identity of machine code: the same code has one digest, other code another; records hold today's."""

import re

import pytest
from compiled_stages import MASKED, STAGES, every_config, problem_at
from rotating import recorded

from harness import machine_code
from harness.machine_code import cubin_of
from hopper_attention.kernels import division, ladder
from hopper_attention.kernels.contract import Problem
from hopper_attention.launch import (
    FORWARD_IN_ROWS,
    IN_SLICES_OF_ROWS,
    compile_kernel,
    compile_stage,
    compiled_for,
)


def identity_of(stage_id: str, problem: Problem) -> str:
    """By the record, or where that is not current by compiling."""
    kernel = compiled_for(stage_id, problem)
    return recorded(stage_id).get(kernel) or machine_code.identity(compile_stage(stage_id, problem))


def test_compiler_is_deterministic() -> None:
    problem = problem_at("k2", 64, False)
    module = ladder.load("k2")[1]
    first, second = module.compile_kernel(problem), module.compile_kernel(problem)
    assert first is not second
    assert cubin_of(first) == cubin_of(second)
    sha = machine_code.identity(first)
    assert re.fullmatch(r"[0-9a-f]{64}", sha)
    assert sha == machine_code.identity(
        compile_stage("k2", problem.with_(batch=1, seqlen_q=65, seqlen_kv=65))
    )


def test_the_number_of_sms_is_the_hosts_matter() -> None:
    """Of k6 only the launch knows it."""
    problem = problem_at("k6", 64, False)
    fewer = compile_kernel("k6", problem, sms=114)
    assert machine_code.identity(fewer) == machine_code.identity(compile_stage("k6", problem))


@pytest.mark.parametrize("causal", [False, True])
def test_bwd4_at_head_dim_256_is_deterministic_already(causal: bool) -> None:
    problem = problem_at("bwd4", 256, causal)
    both = [identity_of(stage_id, problem) for stage_id in ("bwd4", "bwd4_det")]
    assert both[0] == both[1]


def test_hash_follows_the_tile() -> None:
    problem = problem_at("k2", 64, False)
    other = ladder.load("k2")[1].compile_kernel(problem, tile=32)
    assert machine_code.identity(other) != machine_code.identity(compile_stage("k2", problem))


def test_hash_tells_configurations_apart() -> None:
    """Of every stage, compiled here or recorded, the plain ones, but a height that is k6's own."""
    heights = FORWARD_IN_ROWS, IN_SLICES_OF_ROWS
    own = {(of.get(rows), d) for of in heights for d, (rows, *_) in division.TILES.items()}
    every = [
        (stage_id, *config) for stage_id in STAGES for config in MASKED if (stage_id, config[0]) not in own
    ]
    found = {identity_of(stage_id, problem_at(stage_id, d, causal)) for stage_id, d, causal in every}
    assert len(found) == len(every)


@every_config
def test_a_record_is_of_todays_machine_code(stage_id: str, head_dim: int, causal: bool) -> None:
    """A digest that was not made by compiling is found out here, sooner or later."""
    problem = problem_at(stage_id, head_dim, causal)
    if recorded(stage_id):
        compiled = machine_code.identity(compile_stage(stage_id, problem))
        assert identity_of(stage_id, problem) == compiled
