"""The mutations: each must be caught by the pass rule, on shapes of the sweep."""

import pytest

from harness import judging, mutations
from harness.sweep import sweep
from hopper_attention.kernels import k7
from hopper_attention.kernels.contract import Problem

# On a CPU two heads, and lengths up to 4096; `ref_check.py --mutations` takes the sweep.
CPU_SIZED = [
    problem.with_(batch=1, heads=2, kv_heads=2)
    for problem in (*sweep(), *sweep("bwd"))
    if problem.seqlen_q <= 4096
]


@pytest.mark.parametrize("problem", CPU_SIZED, ids=lambda problem: f"{problem.direction} {problem}")
def test_every_mutation_is_caught(problem: Problem) -> None:
    assert mutations.survivors(problem, "cpu", all_rows=False) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
def test_every_mutation_of_rounded_gradients_is_caught(causal: bool, dtype: str) -> None:
    """Beside a yardstick that rounds P and dS, and may round what is near a tie either way."""
    for n, head_dim in ((512, 64), (1024, 128), (512, 256)):
        problem = Problem.square(
            1, 1, n, head_dim, causal, dtype=dtype, direction="bwd", scaled=True, lse_grad=True
        )
        assert mutations.survivors(problem, "cpu", all_rows=False, rounds_p=True) == []


@pytest.mark.parametrize("causal", [False, True])
def test_mutations_in_fp8_are_caught(causal: bool) -> None:
    """Beside P in e4m3. Of many keys one is less than what its roundings are: the needle finds that."""
    for n, head_dim in ((512, 64), (512, 128), (512, 256), (2048, 64)):
        problem = Problem.square(1, 1, n, head_dim, causal, direction="fp8")
        rounding = k7.lazy_maximum(problem)
        missed = {x.split(":")[0] for x in mutations.survivors(problem, "cpu", False, rounds_p=rounding)}
        assert missed <= ({"drop a key", "drop a late key"} if n > 512 else set())


def test_a_blunt_rule_lets_mutations_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without its relative factors the rule catches little."""
    for factor in ("MAX_FACTOR", "RMS_FACTOR", "BLOCK_RMS_FACTOR", "ROW_RMS_FACTOR"):
        monkeypatch.setattr(judging, factor, 1e9)
    missed = mutations.survivors(sweep()[0], "cpu", all_rows=False)
    caught = {"one NaN", "one unwritten row"}
    assert {line.split(":")[0] for line in missed} == set(mutations.MUTATIONS) - caught
    monkeypatch.setattr(judging, "MAX_FACTOR", 1e-9)
    assert mutations.survivors(sweep()[0], "cpu", all_rows=False)[0].startswith("None: max error")


def test_a_blunt_rule_lets_mutations_of_gradients_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    for factor in ("MAX_FACTOR", "RMS_FACTOR", "BLOCK_RMS_FACTOR", "ROW_RMS_FACTOR"):
        monkeypatch.setattr(judging, factor, 1e9)
    missed = {line.split(":")[0] for line in mutations.survivors(sweep("bwd")[0], "cpu", all_rows=False)}
    caught = {f"{fault}, {name}" for fault in ("one NaN", "one unwritten row") for name in ("dq", "dk", "dv")}
    assert missed == set(mutations.GRADIENT_MUTATIONS) - caught


@pytest.mark.parametrize("n", [512, 1024, 16384])
def test_sampled_rows_are_whole_blocks_with_both_ends(n: int) -> None:
    rows = mutations.sampled_rows(n, "cpu")
    assert rows[0] == 0
    assert rows[-1] == n - 1
    assert len(rows) == len(rows.unique()) == min(n, 6 * judging.BLOCK_ROWS)
    assert bool((rows.view(-1, judging.BLOCK_ROWS)[:, 0] % judging.BLOCK_ROWS == 0).all())
