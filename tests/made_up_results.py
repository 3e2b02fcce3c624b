"""Results whose every number is made up, and a repository in small that holds them."""

from dataclasses import replace
from pathlib import Path

from harness.results import Results, Row
from hopper_attention.kernels import ladder
from hopper_attention.kernels.contract import Problem

ENVIRONMENT = {
    "gpu": "NVIDIA H100 80GB HBM3",
    "power_cap_w": 700.0,
    "driver": "1.2.3",
    "cuda": "12.9",
    "torch": "2.0",
    "cutlass_dsl": "4.0",
    "python": "3.11",
    "cudnn": "9.1",
    "peers": {"fa2": "2.0", "cudnn": "9.1"},
    "host_us": {"k2": 9.5},
    "date": "2000-01-01",
}
FOLDER = "h100-80gb-hbm3"
SHA = "0123456789abcdef" * 4


def sweep_problem(seqlen: int = 4096, head_dim: int = 128, causal: bool = False) -> Problem:
    return Problem.square(16384 // seqlen, 2048 // head_dim, seqlen, head_dim, causal)


def make_row(provider: str, tflops: float | None, problem: Problem | None = None, **changes: object) -> Row:
    row = Row.on(problem or sweep_problem(), provider)
    if tflops is not None:
        row = replace(row, tflops=tflops, ms_median=row.problem.flops / tflops / 1e9, ms_iqr=0.01)
        if provider in ladder.LADDER:
            row = replace(row, check="pass", max_error=0.002, cubin_sha256=SHA)
    return replace(row, **changes)


def make_results(stage: str = "k2", *rows: Row, **environment: object) -> Results:
    return Results(stage, ENVIRONMENT | environment, list(rows))


def sample(stage: str = "k2", rate: float = 8.0) -> Results:
    rows = [
        make_row(provider, tflops, sweep_problem(n, d, causal))
        for d in (64, 128)
        for causal in (False, True)
        for n in (512, 4096)
        for provider, tflops in ((stage, rate), ("fa2", 300.0), ("cudnn", 500.0))
    ]
    rows.append(make_row("math", None, error="OOM: needs 34.4 GB"))
    return make_results(stage, *rows)


def backward_sample(stage: str = "bwd1", rate: float = 4.0) -> Results:
    rows = []
    for n, sustained in ((4096, None), (16384, 0.9 * rate)):
        problem = sweep_problem(n).with_(direction="bwd")
        passed = {"check": "pass", "cubin_sha256": SHA, "tflops_sustained": sustained}
        rows += [make_row(stage, rate, problem, **passed), make_row("fa2", 200.0, problem)]
    return make_results(stage, *rows)


def block(name: str) -> str:
    return f"<!-- results:begin {name} -->\n<!-- results:end {name} -->\n"


def small_repository(folder: Path) -> Path:
    """A repository in small: results of two stages, and documents with every block."""
    for stage, rate in (("k1", 0.5), ("k2", 8.0)):
        sample(stage, rate).save(folder / "results" / FOLDER / f"{stage}.json")
    (folder / "notes").mkdir()
    (folder / "README.md").write_text(
        f"# Top\n{block('ladder')}{block('environment')}{block('sustained')}Bottom\n"
    )
    (folder / "notes" / "k2.md").write_text(f"{block('stage-k2')}between\n{block('ladder')}")
    return folder
