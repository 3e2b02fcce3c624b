"""The work a stage declares is the work its machine code does: kernels, products, shared memory, and the
bound that follows."""

from dataclasses import replace
from math import ceil

import pytest
from compiled_stages import (
    CONFIGS,
    INSPECTED,
    TMA,
    disassemble_once,  # noqa: F401
    every_config,
    problem_at,
    works_of,
)

from harness import machine_code
from harness.hardware import H100_SXM
from harness.machine_code import cubin_of, demand
from hopper_attention.launch import compile_stage

FUSED = ("fa1", "k2", *TMA)


@pytest.mark.parametrize(("stage_id", "head_dim", "causal"), [c for c in CONFIGS if c[0] in FUSED])
def test_products_are_those_declared(stage_id: str, head_dim: int, causal: bool) -> None:
    problem = problem_at(stage_id, head_dim, causal)
    (work,) = works_of(stage_id, problem)
    assert work.ffma == 2 * 64 * 64 * head_dim // 256  # of one thread, in one 64×64 tile
    (found,) = machine_code.inspect(compile_stage(stage_id, problem), [work])
    # No tenth more than needed either: what is left over is the rescaling.
    with pytest.raises(ValueError, match="are the trips right"):
        demand(found.code, replace(work, ffma=ceil(1.1 * work.ffma)))


@pytest.mark.parametrize("stage_id", ["fa1", "k2", *TMA, "bwd2"])
def test_wrong_work_is_refused(stage_id: str) -> None:
    problem = problem_at(stage_id, *INSPECTED[stage_id][0])
    compiled = compile_stage(stage_id, problem)
    (work,) = works_of(stage_id, problem)
    for at in range(len(work.trips)):
        fewer = tuple(n - (i == at) for i, n in enumerate(work.trips))
        with pytest.raises(ValueError, match=rf": \d+ products in one pass, not the {work.ffma}"):
            machine_code.inspect(compiled, [replace(work, trips=fewer)])
    for trips in ((), (*work.trips, 8)):
        with pytest.raises(ValueError, match=rf"{len(work.trips)} innermost loops .*, not {len(trips)}"):
            machine_code.inspect(compiled, [replace(work, trips=trips)])
    with pytest.raises(ValueError, match="0 kernels named 'Nothing' in the cubin"):
        machine_code.inspect(compiled, [replace(work, kernel="Nothing")])


def test_k1_is_three_kernels() -> None:
    problem = problem_at("k1", *INSPECTED["k1"][0])
    found = machine_code.disassemble(cubin_of(compile_stage("k1", problem)))
    assert len(found) == 3
    demands = machine_code.inspect(compile_stage("k1", problem), works_of("k1", problem))
    assert [x.work.kernel for x in demands] == ["score", "softmax", "output"]
    assert len({x.code.symbol for x in demands}) == 3
    with pytest.raises(ValueError, match="3 kernels named 'NaiveAttention'"):
        every = replace(demands[0].work, kernel="NaiveAttention")
        machine_code.inspect(compile_stage("k1", problem), [every])


def test_bwd1_is_one_kernel_a_product() -> None:
    problem = problem_at("bwd1", *INSPECTED["bwd1"][0])
    found = machine_code.disassemble(cubin_of(compile_stage("bwd1", problem)))
    assert len(found) == 6
    demands = machine_code.inspect(compile_stage("bwd1", problem), works_of("bwd1", problem))
    names = ["probability", "grad_v", "grad_score", "grad_q", "grad_k"]  # row_dot is no product
    assert [x.work.kernel for x in demands] == names
    assert len({x.code.symbol for x in demands}) == 5
    products = sum(x.work.ffma * x.work.threads * x.work.passes for x in demands)
    assert problem.causal or 2 * products == problem.flops


@every_config
def test_bound_is_stated(stage_id: str, head_dim: int, causal: bool) -> None:
    problem = problem_at(stage_id, head_dim, causal)
    works = works_of(stage_id, problem)
    demands = machine_code.inspect(compile_stage(stage_id, problem), works)
    assert [x.work for x in demands] == works
    for x in demands:
        assert x.cycles[x.unit] == max(x.cycles.values()) > 0
        assert min(x.cycles.values()) >= 0
        assert sum(x.mix.values()) > 0
        assert x.seconds() > 0
    bound = machine_code.bound_tflops(problem, demands)
    assert 0 < bound <= problem.flops / H100_SXM.roofline_seconds(problem) / 1e12


@every_config
def test_shared_memory_is_what_the_stage_says(stage_id: str, head_dim: int, causal: bool) -> None:
    problem = problem_at(stage_id, head_dim, causal)
    launched = compile_stage(stage_id, problem).host_constants
    for work in works_of(stage_id, problem):
        assert work.smem_bytes <= 232_448, "more than a CTA may have: 227 KiB"
        assert work.smem_bytes in (*launched, 0)
    if stage_id == "k2" and head_dim == 128:
        assert {work.smem_bytes for work in works_of("k2", problem)} == {49152}
